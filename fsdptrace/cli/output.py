"""Text for a terminal or a pipe: names from files made harmless, tables that fit, prose that wraps only where one reads."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

LONGEST_NAME = 100  # characters of a name that are shown in a table
LONGEST_TEXT = 4000  # characters of a message that are shown
NARROWEST = 30

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def clean(text: object, limit: int = LONGEST_TEXT) -> str:
    """``text`` without what a terminal would obey (control, format and unassigned characters, as ``\\x1b``), and not
    longer than ``limit``: the middle of a longer one is left out."""
    out = "".join(
        char if unicodedata.category(char)[0] not in "C" and unicodedata.category(char) not in ("Zl", "Zp")
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in str(text)[: 4 * limit]
    )  # fmt: skip
    if len(str(text)) > 4 * limit or len(out) > limit:
        head = limit * 2 // 3
        out = f"{out[:head]}…{out[-(limit - head - 1) :]}"
    return out


def name(text: str, limit: int = LONGEST_NAME) -> str:
    """A module's name to show; the root has none of its own."""
    return clean(text, limit) if text else "(root)"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``keep`` orders what stays when room is short: the highest goes first, 0 never."""

    title: str
    right: bool = True
    keep: int = 0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads on: :func:`fsdptrace.cli.frame.clear` knows what that means; rich's own way ends in status 1."""
        raise BrokenPipeError


class Screen:
    """Standard output. ``width`` is None in a pipe without COLUMNS: nothing is wrapped or left out there."""

    def __init__(self) -> None:
        self.console = _Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
        columns = os.environ.get("COLUMNS", "")
        if self.console.is_terminal:
            self.width: int | None = max(NARROWEST, self.console.width)
        else:
            self.width = max(NARROWEST, int(columns)) if columns.isdigit() else None

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line of parts, each a text or ``(text, style)``; not wrapped."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def title(self, text: str) -> None:
        """An empty line and a heading."""
        self.line()
        self.prose(text, style="bold")

    def prose(self, text: str, indent: int = 0, style: str = "", hang: int | None = None) -> None:
        """A paragraph, wrapped to the terminal; further lines are indented by ``hang``."""
        lines = [" " * indent + text]
        if self.width is not None:
            lines = textwrap.wrap(
                text, self.width, initial_indent=" " * indent, subsequent_indent=" " * (indent if hang is None else hang),
                break_long_words=False, break_on_hyphens=False,
            ) or [""]  # fmt: skip
        for line in lines:
            self.line((line, style))

    def item(self, text: str, style: str = "") -> None:
        """A paragraph with a dash before it."""
        self.prose(f"- {text}", 2, style, 4)

    def code(self, text: str, indent: int = 4) -> None:
        """Lines as they are."""
        for line in text.splitlines():
            self.line((" " * indent + clean(line), "cyan"))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
        """A table with two spaces between columns; in a terminal too narrow for it the least important columns go, and a
        line says so."""
        widths = [max(len(column.title), *(len(row[i]) for row in rows)) for i, column in enumerate(columns)]
        shown = list(range(len(columns)))
        gone: list[str] = []
        limit = self.width
        if limit is not None:
            widths[0] = min(widths[0], max(16, limit // 2))
            for i in sorted((i for i in shown if columns[i].keep), key=lambda i: -columns[i].keep):
                if sum(widths[j] + 2 for j in shown) <= limit:
                    break
                shown.remove(i)
                gone.append(columns[i].title)
        self.line(("  ".join(_cell(columns[i].title, widths[i], columns[i].right) for i in shown).rstrip(), "dim"))
        for number, row in enumerate(rows):
            text = "  ".join(_cell(row[i], widths[i], columns[i].right) for i in shown).rstrip()
            self.line((text, styles[number] if styles else ""))
        if gone:
            self.prose(f"(no room for: {', '.join(gone)}; widen the terminal, pipe it, or use --json)", style="dim")


def _cell(text: str, width: int, right: bool) -> str:
    if len(text) > width:
        head = max(1, (width - 1) // 3)
        text = f"{text[:head]}…{text[-(width - head - 1) :]}"
    return text.rjust(width) if right else text.ljust(width)


def print_json(data: Any) -> None:
    """``data`` on standard output, as ASCII, so that it survives any terminal and pipe."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def number(value: float) -> str:
    """A mean: whole where it is, else two figures after the point."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else f"{value:,.2f}"


def duration(ns: float) -> str:
    """Nanoseconds for a reader: ``1.23 ms``."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= scale:
            value = ns / scale
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{ns:.0f} ns"
