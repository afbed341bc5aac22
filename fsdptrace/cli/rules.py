"""``fsdptrace rules``: what the rules say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdptrace.checks.base import Rule
from fsdptrace.checks.registry import RULES, check_names
from fsdptrace.cli.output import STYLES, Column, Screen


def choose(name: str | None) -> list[type[Rule]]:
    """The rule of that name, or all of them.

    Raises:
        ValueError: no such rule; the message lists those that there are.
    """
    if name is None:
        return list(RULES.values())
    check_names([name], "rules")
    return [RULES[name]]


def to_json(rule: type[Rule]) -> dict[str, Any]:
    """Plain data."""
    return {
        "name": rule.name, "severity": rule.severity, "opt_in": rule.opt_in, "summary": rule.summary,
        "explanation": rule.explanation, "example": rule.example, "mend": rule.mend, "silent": rule.silent,
        "unseen": rule.unseen, "cost": rule.cost,
    }  # fmt: skip


def show_all(screen: Screen, rules: Sequence[type[Rule]]) -> None:
    """One row per rule."""
    if screen.width is not None and screen.width < 100:
        for rule in rules:
            screen.line((rule.name, "bold"), "  ", (_severity(rule), STYLES.get(rule.severity, "")))
            screen.prose(rule.summary, 4)
    else:
        columns = [Column("rule", right=False), Column("severity", right=False), Column("broken when", right=False)]
        room = None if screen.width is None else screen.width - 50
        cells = [[rule.name, _severity(rule), _short(rule.summary, room)] for rule in rules]
        screen.table(columns, cells)
    screen.line()
    screen.prose("`fsdptrace rules NAME` has an example and what to change.", style="dim")


def _short(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else text[: room - 1].rsplit(" ", 1)[0] + "…"


def _severity(rule: type[Rule]) -> str:
    return f"{rule.severity}, opt-in" if rule.opt_in else rule.severity


def show_one(screen: Screen, rule: type[Rule]) -> None:
    """All of one rule."""
    screen.line((rule.name, "bold"), "  ", (_severity(rule), STYLES.get(rule.severity, "")))
    for title, text in (("broken when", rule.summary), ("what it means", rule.explanation)):
        screen.title(title)
        screen.prose(text, 2)
    screen.title("an example that breaks it")
    screen.code(rule.example)
    rest = (("what to change", rule.mend), ("stays silent on", rule.silent), ("does not see", rule.unseen), ("cost", rule.cost))
    for title, text in rest:
        if text:
            screen.title(title)
            screen.prose(text, 2)
