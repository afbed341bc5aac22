"""``fsdptrace check``: the rules again over files, and how that compares with what was found while recording."""

from __future__ import annotations

from fsdptrace.analysis import CheckResult, known_as
from fsdptrace.checks.text import count
from fsdptrace.cli import report
from fsdptrace.cli.output import Screen, clean, name

_ORIGINS = {
    "file": "found in the files, not while recording",
    "both": "found while recording, and again in the files",
    "online": "found while recording, repeated: the files do not have all events of it",
}


def show(screen: Screen, result: CheckResult) -> None:
    """The whole answer."""
    screen.prose(f"run {clean(result.run)}: {clean(result.folder)}", style="bold", hang=4)
    report.other_runs(screen, result.others)
    names = ", ".join(result.rules) or "none"
    judged = f"{count(result.judged, 'step')} judged (summed over {count(result.ranks, 'rank')})"
    if result.incomplete:
        judged += f", {count(result.incomplete, 'step')} incomplete"
    screen.prose(f"{judged} by {count(len(result.rules), 'rule')}: {names}")
    known = [finding for finding in result.findings if known_as(finding) in result.known]
    for finding in result.findings:
        if finding not in known:
            report.one_finding(screen, finding, _ORIGINS.get(finding.source, ""))
    if known:
        screen.line()
        screen.prose(f"known from the baseline: {', '.join(f'{clean(f.rule)} {name(f.pattern)}' for f in known)}", style="dim")
    screen.line()
    _verdict(screen, result)
    report.footing(screen, (), result.notes, [str(problem) for problem in result.problems])


def _verdict(screen: Screen, result: CheckResult) -> None:
    new = sum(known_as(finding) not in result.known for finding in result.findings)
    found = f"{count(new, 'finding')}, none of severity error" if new else "nothing found"
    if result.known:
        found = found.replace("nothing", "nothing new")
    if result.failed:
        screen.prose(f"failed: {count(len(result.errors), 'finding')} of severity error", style="bold red")
    elif result.missing:
        screen.prose(
            f"incomplete: {found} in what there is, which is not all (--allow-incomplete accepts that):", style="yellow"
        )
    else:
        screen.prose(f"passed: {found}", style="bold green")
    for line in result.missing:
        screen.item(clean(line), "yellow")
    if not result.judged or not result.compared:
        return
    if result.new or result.gone:
        screen.prose(
            f"other than while recording: {result.new} more, {result.gone} fewer; the rules or their options were others then",
            style="yellow",
        )  # fmt: skip
    else:
        screen.prose("the steps that were judged have the verdicts that they had while recording", style="dim")
