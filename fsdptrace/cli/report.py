"""``fsdptrace report``: findings first, then units, memory, and what it is all based on."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptrace.analysis import Finding, ModelReport, Run, StepLine, UnitRow, by_pattern
from fsdptrace.analysis.notes import Basis, ranks_text, spans
from fsdptrace.checks.text import count, size
from fsdptrace.cli import device, sections
from fsdptrace.cli.output import STYLES, Column, Screen, clean, duration, name, number

MANY_ROWS = 30  # more units than this are shown by name pattern
MANY_MODELS = 8  # of more models (or stages of a pipeline), the first ones are shown
EDGE_STEPS = 10  # of many steps, so many at either end


def show(screen: Screen, run: Run, every: bool = False, steps: bool = False) -> None:
    """The whole report of ``run``; ``every`` shows each unit and step, ``steps`` adds the table of steps."""
    heading(screen, run)
    findings(screen, run.findings, run.basis)
    shown = run.models if every else run.models[:MANY_MODELS]
    for model in shown:
        units(screen, model, every, run.several_models)
        memory(screen, model)
        sections.communication(screen, model, every)
        sections.prefetches(screen, model)
        sections.regions(screen, model, every)
        device.show(screen, model, every)
    if len(shown) < len(run.models):
        screen.line()
        screen.prose(f"({len(shown)} of {len(run.models)} models and stages; --all shows each)", style="dim")
    sections.ranks(screen, run, every)
    if steps:
        step_table(screen, run, every)
    sections.own_cost(screen, run.side_by_side.rows, run)
    footing(screen, run.coverage, run.notes, [str(problem) for problem in run.problems])


def heading(screen: Screen, run: Run) -> None:
    """Which run this is, of which there may be several."""
    torch = sorted({process.header.versions.get("torch", "?") for process in run.processes})
    screen.prose(f"run {clean(run.label)}: {clean(run.folder)}", style="bold", hang=4)
    basis = run.basis
    screen.prose(
        f"{count(basis.ranks, 'rank')} of {basis.world_size}, {count(basis.steps, 'step')}, {count(basis.events, 'event')}, "
        f"torch {clean(', '.join(torch))}"
    )
    other_runs(screen, run.others)


def other_runs(screen: Screen, others: Sequence[str]) -> None:
    """Says which other runs lie in the folder."""
    if others:
        shown = ", ".join(clean(label) for label in others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        screen.prose(f"(other runs here: {shown}; --run ID shows one, without it the newest)", style="dim")


def findings(screen: Screen, found: Sequence[Finding], basis: Basis) -> None:
    """What was found, worst first; or on what the answer "nothing" is based."""
    serious = [finding for finding in found if finding.severity != "info"]
    if not found:
        screen.line()
        _nothing(screen, basis)
        return
    for finding in serious:
        one_finding(screen, finding)
    notes = [finding for finding in found if finding.severity == "info"]
    if notes:
        screen.line()
    if notes and not serious:
        screen.prose("nothing wrong found; for information:", style="bold green")
    for finding in notes:
        screen.line(("info ", STYLES["info"]), clean(finding.rule), f"  {_where(finding)}")
        screen.prose(f"{_times(finding)}. {clean(finding.first.message)} {clean(finding.first.hint)}".rstrip(), 2)


def _nothing(screen: Screen, basis: Basis) -> None:
    if not basis.rules and not basis.partly:
        screen.prose("nothing was looked for: no rule ran while recording. `fsdptrace check` runs them now.", style="yellow")
        return
    style = "bold green" if basis.steps else "yellow"
    screen.prose("nothing found", style=style)
    ended = f"{count(basis.steps, 'step')} that ended" if basis.steps else "no step that ended"
    rules = (*basis.rules, *basis.partly)
    screen.prose(
        f"based on {count(len(rules), 'rule')} that saw all {count(basis.events, 'event')} of {ended}, "
        f"on {basis.ranks} of {count(basis.world_size, 'rank')}: {', '.join(rules)}", 2,
    )  # fmt: skip


def _where(finding: Finding) -> str:
    return name(finding.pattern) + (f"  (model {finding.model}: {clean(finding.root, 60)})" if finding.model else "")


def _times(finding: Finding) -> str:
    parts = [
        "once" if finding.times == 1 else f"{finding.times:,} times",
        count(finding.unit_count, "unit"),
        ranks_text(finding.ranks),
        f"step {finding.steps[0]}" if finding.step_count == 1 else f"steps {spans(finding.steps)}",
    ]
    if finding.bytes:
        parts.append(f"{size(finding.bytes)} each" if finding.step_bytes != finding.bytes else size(finding.bytes))
    if finding.step_bytes > finding.bytes:
        parts.append(f"{size(finding.step_bytes)} in one step of one rank")
    return ", ".join(parts)


def one_finding(screen: Screen, finding: Finding, origin: str = "") -> None:
    """One finding: what, where, how often, the first message and the mend in full."""
    style = STYLES.get(finding.severity, "bold")
    screen.line()
    screen.line((clean(finding.severity, 20).upper(), style), " ", (clean(finding.rule, 60), style), f"  {_where(finding)}")
    screen.prose(_times(finding) + (f" ({origin})" if origin else ""), 2)
    first = finding.first
    evidence = ", ".join(map(str, first.evidence[:8])) + (" …" if len(first.evidence) > 8 else "")
    screen.prose(
        f"first: rank {first.rank}, step {first.step}, event {first.seq}" + (f" (evidence: {evidence})" if evidence else ""), 2
    )  # fmt: skip
    screen.prose(clean(first.message), 4)
    if first.hint:
        screen.line("  what to change:")
        screen.prose(clean(first.hint), 4, "green")


def units(screen: Screen, model: ModelReport, every: bool, many: bool) -> None:
    """The table per unit, means per step and rank."""
    title = f"units of {clean(model.called(many), 160)}"
    if not model.rows:
        screen.title(title)
        screen.prose("no step whose events are all in the files", 2)
        return
    grouped = not every and len(model.rows) > MANY_ROWS
    rows = by_pattern(model.rows) if grouped else model.rows
    screen.title(f"{title}: per step{' and unit' if grouped else ''}, {model.behind}")
    columns, cells = unit_cells(rows)
    screen.table(columns, cells, ["yellow" if row.sums.wasted else "" for row in rows])
    if grouped:
        screen.prose(f"({len(model.rows)} units by name pattern; --all shows each)", style="dim")
    differing = [row for row in rows if row.differs]
    if differing:
        shown = "; ".join(f"{name(row.name)}: {', '.join(row.differs)}" for row in differing[:3])
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        screen.prose(f"ranks differ: {shown}{more}", style="yellow")
    if model.map.uncovered:
        names = ", ".join(name(text) for text in model.map.uncovered[:3])
        more = f" and {len(model.map.uncovered) - 3} more" if len(model.map.uncovered) > 3 else ""
        screen.prose(f"in no unit: {names}{more}", style="dim")


def unit_cells(rows: Sequence[UnitRow]) -> tuple[list[Column], list[list[str]]]:
    """Columns and cells of the table per unit; columns of what did not happen are left out."""
    reduces = any(row.sums.all_reduces for row in rows)
    other = any(row.sums.gathers_other for row in rows)
    columns = [
        Column("unit", right=False), Column("gathers fwd"), Column("bwd"), Column("recompute", keep=3),
        *([Column("other", keep=4)] if other else []), Column("no-op", keep=7), Column("wasted"),
        Column("bytes/gather", keep=2), Column("reduce-scatter", keep=6), *([Column("all-reduce", keep=5)] if reduces else []),
        Column("gathered for", keep=8), Column("issue to use", keep=9), Column("at most", keep=10),
    ]  # fmt: skip
    cells = []
    for row in rows:
        low, high = row.bytes_low, row.bytes_high
        title = name(row.name) + (f"  x{row.units}" if row.units > 1 else "")
        cells.append([
            title, number(row.mean("gathers_forward")), number(row.mean("gathers_backward")),
            number(row.mean("gathers_recompute")), *([number(row.mean("gathers_other"))] if other else []),
            number(row.mean("noops")), number(row.mean("wasted")), size(high) if low == high else f"{size(low)}-{size(high)}",
            number(row.mean("reduce_scatters")), *([number(row.mean("all_reduces"))] if reduces else []),
            duration(row.mean("lifetime_ns")), duration(row.sums.distance_ns / row.sums.waits) if row.sums.waits else "-",
            duration(row.sums.distance_max_ns) if row.sums.waits else "-",
        ])  # fmt: skip
    return columns, cells


def memory(screen: Screen, model: ModelReport) -> None:
    """Bytes gathered now and at most, and who held them."""
    screen.title("memory in gathered parameters, of the rank that holds most")
    peak = model.peak
    screen.prose(f"now   {size(model.now[0])}" + (f" (rank {model.now[1]})" if model.now[0] else ""), 2)
    where = f"rank {peak.rank}, step {peak.step}" + (f", event {peak.seq}" if peak.seq else "")
    screen.prose(f"peak  {size(peak.bytes)}" + (f" ({where})" if peak.bytes else ""), 2)
    if peak.units:
        shown = [f"{name(unit)} {size(held)}" for unit, held in peak.units[:8]]
        left = peak.units[8:]
        rest = f" and {len(left)} more with {size(sum(held for _, held in left))}" if left else ""
        screen.prose(f"held by {', '.join(shown)}{rest}", 8)
    elif peak.bytes:
        screen.prose("by which units is not in the files: that step was written as one line", 8)
    past = f"past their backward, at most  {size(model.past_backward_peak)}"
    if model.past_backward[0]:
        past += f" ({size(model.past_backward[0])} still at the end of the last step)"
    screen.prose(past, 2, "yellow" if model.past_backward_peak else "")


def step_table(screen: Screen, run: Run, every: bool) -> None:
    """One row per rank and step; of many, those at the ends and those with violations."""
    lines = run.step_lines()
    if not lines:
        return
    shown = lines
    if not every and len(lines) > 3 * EDGE_STEPS:
        edge = {*range(EDGE_STEPS), *range(len(lines) - EDGE_STEPS, len(lines))}
        found = [i for i, (_, line) in enumerate(lines) if line.violations][:EDGE_STEPS]
        shown = [lines[i] for i in sorted(edge | set(found))]
    screen.title("steps")
    many = run.several_models
    columns = [
        Column("step"), *([Column("model")] if many else []), Column("rank"), Column("took", keep=3), Column("events", keep=4),
        Column("gathers asked", keep=5), Column("peak bytes", keep=1), Column("past backward", keep=2), Column("violations"),
        Column("detail", right=False, keep=6),
    ]  # fmt: skip
    cells = [
        [
            str(line.step), *([str(line.model)] if many else []), str(rank), _took(line), f"{line.events:,}",
            f"{line.gathers:,}", size(line.unsharded_peak), size(line.past_backward_peak), f"{line.violations:,}",
            "full" if line.full else "one line",
        ]
        for rank, line in shown
    ]  # fmt: skip
    screen.table(columns, cells, ["red" if line.violations else "" for _, line in shown])
    if len(shown) < len(lines):
        screen.prose(f"({len(shown)} of {len(lines)} rows; --all shows each)", style="dim")


def _took(line: StepLine) -> str:
    return duration(line.duration_ns) if line.duration_ns else "-"  # of a first step whose events were not written


def footing(screen: Screen, coverage: Sequence[str], notes: Sequence[str], problems: Sequence[str]) -> None:
    """What could not be seen, what is missing, what could not be read."""
    for title, lines in (("not visible in this run", coverage), ("about these files", notes), ("could not be used", problems)):
        if lines:
            screen.title(title)
            for line in lines[:12]:
                screen.item(clean(line, 600))
            if len(lines) > 12:
                screen.item(f"and {len(lines) - 12} more (--json has all)")
