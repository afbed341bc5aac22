"""``fsdptrace check``: the rules again over files, and how that compares with what was found while recording."""

from __future__ import annotations

from fsdptrace.analysis import CheckResult
from fsdptrace.checks.text import count
from fsdptrace.cli import report
from fsdptrace.cli.output import Screen, clean


def show(screen: Screen, result: CheckResult) -> None:
    """The whole answer."""
    screen.prose(f"run {clean(result.run)}: {clean(result.folder)}", style="bold", hang=4)
    report.other_runs(screen, result.others)
    names = ", ".join(result.rules) or "none"
    judged = f"{count(result.judged, 'step')} judged (summed over {count(result.ranks, 'rank')})"
    if result.incomplete:
        judged += f", {count(result.incomplete, 'step')} incomplete"
    screen.prose(f"{judged} by {count(len(result.rules), 'rule')}: {names}")
    for finding in result.findings:
        origin = "found while recording, repeated" if finding.source == "online" else "found again in the files"
        report.one_finding(screen, finding, origin)
    screen.line()
    _verdict(screen, result)
    report.footing(screen, (), result.notes, [str(problem) for problem in result.problems])


def _verdict(screen: Screen, result: CheckResult) -> None:
    errors = sum(finding.severity == "error" for finding in result.findings)
    if errors:
        screen.prose(f"failed: {count(errors, 'finding')} of severity error", style="bold red")
    elif not result.judged and not result.findings:
        screen.prose("no verdict: no step could be judged", style="yellow")
    else:
        found = f"{count(len(result.findings), 'finding')}, none of severity error" if result.findings else "nothing found"
        screen.prose(f"passed: {found}", style="bold green" if not result.incomplete else "green")
    if not result.judged or not result.compared:
        return
    if result.new or result.gone:
        screen.prose(
            f"other than while recording: {result.new} more, {result.gone} fewer; the rules or their options were others then",
            style="yellow",
        )  # fmt: skip
    else:
        screen.prose("the steps that were judged have the verdicts that they had while recording", style="dim")
