"""``fsdptrace top``: a run while it goes on, rank by rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsdptrace.analysis.live import RankNow, RunNow, RunWatch
from fsdptrace.analysis.notes import spans
from fsdptrace.checks.text import count, size
from fsdptrace.cli.output import STYLES, clean, duration, name

SCHEMA = "fsdptrace-top/1"
PIPE_WIDTH = 160
_TEXTS = ("units open", "doing", "host")
FRAME = 8  # lines of the screen that are not rows of ranks


def follow(watch: RunWatch, every: float) -> None:
    """Shows the run on the whole terminal until it is over or Ctrl-C; what was seen last stays there. Without a terminal,
    once."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    now = watch.look()
    if console.is_terminal:
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(page(now, console.height - FRAME, console.width), refresh=True)
                    if now.over:
                        break
                    time.sleep(every)
                    now = watch.look()
        except KeyboardInterrupt:
            pass
    console.print(page(now, None if not console.is_terminal else console.height - FRAME, console.width))
    sys.stdout.flush()


def page(now: RunNow, room: int | None, width: int) -> RenderableType:
    """The run as it stands: a line about all ranks, one per rank as far as there is ``room``, the last finding."""
    problems = (Text(clean(problem, 300), "yellow") for problem in now.problems[:3])
    return Group(head(now), Text(), table(now, room, width), *last(now), *problems)


def head(now: RunNow) -> Text:
    """One line about all ranks."""
    ranks = now.ranks
    world = max((rank.world_size for rank in ranks), default=1)
    steps = [rank.step for rank in ranks if rank.step >= 0]
    at = f"step {min(steps)}" + (f" to {max(steps)}" if max(steps) > min(steps) else "") if steps else "no step yet"
    errors, warnings = sum(rank.errors for rank in ranks), sum(rank.warnings for rank in ranks)
    silent = [rank.rank for rank in ranks if rank.ended == "silent"]
    text = Text()
    text.append(f"{clean(now.label, 80)}", "bold")
    text.append(f"  {len(ranks)} of {count(world, 'rank')}  {at}  ")
    text.append(count(errors, "error"), STYLES["error"] if errors else "green")
    text.append("  ")
    text.append(count(warnings, "warning"), STYLES["warning"] if warnings else "")
    if silent:
        text.append(f"  no line for a while from rank{'s' if len(silent) > 1 else ''} {spans(silent)}", "bold yellow")
    if now.over:
        text.append("  ended", "dim")
    return text


def table(now: RunNow, room: int | None, width: int) -> RenderableType:
    """One row per rank; of more than fit, those that stand out. Where it is narrow, texts are cut, numbers not."""
    shown = now.ranks if room is None or len(now.ranks) <= room else _chosen(now.ranks, max(1, room - 1))
    rows = [_cells(rank, width) for rank in shown]
    made = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    titles = list(_cells(RankNow(0, 1, "", ""), width))
    for title in titles:
        text = title in _TEXTS
        widest = max([len(title), *(len(row[title]) for row in rows)])
        made.add_column(
            title, justify="left" if text else "right", no_wrap=True, overflow="ellipsis",
            min_width=min(12, widest) if text else widest,
        )  # fmt: skip
    for row in rows:
        made.add_row(*row.values())
    if len(shown) < len(now.ranks):
        return Group(made, Text(f"and {count(len(now.ranks) - len(shown), 'rank')} more", "dim"))
    return made


def _cells(rank: RankNow, width: int) -> dict[str, Text]:
    """A row, by title; some columns only where there is room."""
    found = rank.errors + rank.warnings
    cells = {"rank": Text(f"{clean(rank.role, 20)} {rank.rank}".strip())}
    cells["step"] = Text(str(rank.step) if rank.step >= 0 else "-")
    if width >= 100:
        cells["took"] = Text(duration(rank.step_ns) if rank.step_ns else "-")
    cells["gathered"] = Text(size(rank.gathered) if rank.gathered is not None else "?")
    if width >= 100:
        cells["peak"] = Text(size(rank.peak))
    cells["past backward"] = Text(size(rank.past_backward), "yellow" if rank.past_backward else "")
    cells["units open"] = units(rank)
    cells["found"] = Text(f"{found:,}" if found else "-", STYLES["error"] if rank.errors else "yellow" if found else "dim")
    style = "bold yellow" if rank.ended == "silent" or rank.exception else "dim" if rank.ended else ""
    cells["doing"] = Text(doing(rank), style)
    if width >= 130:
        cells["host"] = Text(clean(rank.host, 20))
    return cells


def _chosen(ranks: Sequence[RankNow], room: int) -> list[RankNow]:
    """Those that are silent, have findings, are behind or hold most, in the order of ranks."""
    order = sorted(
        ranks, key=lambda r: (r.ended != "silent", not r.exception, -r.errors, -r.warnings, r.step, -(r.gathered or 0), r.rank)
    )
    return sorted(order[:room], key=lambda rank: (rank.role, rank.rank))


def units(rank: RankNow) -> Text:
    """The units that are open, largest first."""
    if rank.gathered is None:
        return Text("not known", "dim")
    if not rank.open:
        return Text("-", "dim")
    more = f" and {len(rank.open) - 1} more" if len(rank.open) > 1 else ""
    return Text(f"{name(rank.open[0][0], 60)}{more}")


def doing(rank: RankNow) -> str:
    """What the rank is at."""
    if rank.exception and rank.ended:
        return f"{rank.ended} after {clean(rank.exception, 40)}"
    if rank.ended == "ended":
        return "ended"
    where = f"in {clean(rank.inside, 80)}" if rank.inside else ""
    if where and rank.inside_s >= 2:
        where += f" for {rank.inside_s:.0f} s"
    if rank.ended == "silent":
        return f"silent for {rank.idle_s:.0f} s" + (f", {where}" if where else "")
    return where or "running"


def last(now: RunNow) -> list[RenderableType]:
    """The last error, or the last warning where there is none."""
    if now.last is None:
        return []
    found = now.last
    text = Text()
    text.append(f"\nlast {found.severity}: {clean(found.rule, 60)}", STYLES.get(found.severity, ""))
    text.append(f"  {name(found.fqn)}  (rank {found.rank}, step {found.step})\n")
    text.append(clean(found.message, 600))
    return [text]


def to_json(now: RunNow) -> dict[str, Any]:
    """Plain data, as ``top --json`` prints it."""
    return {
        "schema": SCHEMA, "run": now.label, "folder": str(now.folder), "over": now.over,
        "ranks": [
            {**asdict(rank), "open": [{"name": unit, "bytes": held} for unit, held in rank.open]} for rank in now.ranks
        ],
        "last": asdict(now.last) if now.last is not None else None, "problems": now.problems,
    }  # fmt: skip
