"""``fsdptrace postmortem``: where each rank stood, who left the common order, what had been found, what was held."""

from __future__ import annotations

from fsdptrace.analysis.postmortem import Postmortem
from fsdptrace.checks.text import count, size
from fsdptrace.cli import report
from fsdptrace.cli.output import STYLES, Screen, clean, name
from fsdptrace.places import ranks_text

HOLDERS = 4  # ranks whose bytes are shown
UNITS = 4  # units of one rank


def show(screen: Screen, dead: Postmortem) -> None:
    """The whole answer."""
    screen.prose(f"run {clean(dead.run)}: {clean(dead.folder)}", style="bold", hang=4)
    report.other_runs(screen, dead.others)
    if dead.running:
        screen.prose(
            f"{ranks_text(dead.running)} may still be running: the files grew in the last seconds. Times are up to now.",
            style="yellow",
        )  # fmt: skip
    screen.title(f"where {count(len(dead.ranks), 'rank')} of {dead.world} stood")
    for group in dead.groups:
        screen.item(clean(str(group)))
    if dead.missing:
        screen.item(f"{ranks_text(dead.missing)}: no file", "yellow")
    _order(screen, dead)
    _found(screen, dead)
    _held(screen, dead)
    report.footing(screen, (), dead.notes, [str(problem) for problem in dead.problems])


def _order(screen: Screen, dead: Postmortem) -> None:
    screen.title("who left the common order first")
    if not dead.parted:
        screen.prose("nobody, as far as the files go: ranks issued the same collectives in the same order", 2)
        return
    for violation in dead.parted:
        screen.prose(clean(violation.message), 2, "bold red")
        screen.prose(clean(violation.hint), 4)


def _found(screen: Screen, dead: Postmortem) -> None:
    screen.title("rules that had been broken by then")
    serious = [finding for finding in dead.findings if finding.severity != "info"]
    if not serious:
        screen.prose("none", 2)
    for finding in serious:
        screen.line(("  ", ""), (f"{finding.severity.upper()} ", STYLES[finding.severity]), clean(finding.rule))
        # What the ranks' order is was said above, from the files.
        if finding.rule != "rank-order" or not dead.parted:
            screen.prose(f"{ranks_text(finding.ranks)}, step {finding.first.step}: {clean(finding.first.message)}", 4)
            screen.prose(clean(finding.first.hint), 4)


def _held(screen: Screen, dead: Postmortem) -> None:
    screen.title("parameters gathered at the end")
    if not dead.holding:
        screen.prose("none", 2)
        return
    for held, rank, units in dead.holding[:HOLDERS]:
        named = ", ".join(f"{name(fqn)} {size(own)}" for fqn, own in units[:UNITS])
        more = f" and {len(units) - UNITS} more" if len(units) > UNITS else ""
        screen.item(f"rank {rank}: {size(held)}" + (f", most in {named}{more}" if named else ""))
    if len(dead.holding) > HOLDERS:
        left = dead.holding[HOLDERS:]
        screen.item(f"{count(len(left), 'rank')} more: {size(left[-1][0])} to {size(left[0][0])} each")
