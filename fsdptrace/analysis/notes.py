"""What a reader must know before believing a report: what it is based on, what is missing, what could not be seen."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptrace.analysis.process import ProcessTrace
from fsdptrace.analysis.sources import exists
from fsdptrace.analysis.stages import Stage, first_difference, stages
from fsdptrace.checks import registry
from fsdptrace.checks.text import count
from fsdptrace.model_map import show_name

GONE = 2.0  # seconds: the same where its process is not there
STILL_RUNNING = 10.0  # seconds: a file without an end line that grew so recently is probably still written


@dataclass(frozen=True, slots=True)
class Basis:
    """What the findings are based on.

    Attributes:
        rules: names of the rules that ran while recording, in all processes.
        ranks, world_size: files that were read, and ranks of the job.
        steps: steps that ended, on the rank that has most of them; ``rank_steps`` over all ranks, ``full_rank_steps`` of
            these with every event in the files.
        events: events of all steps, written or not.
        partly: rules that ran on some ranks only.
    """

    rules: tuple[str, ...]
    ranks: int
    world_size: int
    steps: int
    rank_steps: int
    full_rank_steps: int
    events: int
    partly: tuple[str, ...] = ()


def rules_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the rules that a recording with these options (of a header) ran; unknown ones are left out."""
    checks = options.get("checks")
    if isinstance(checks, list):
        checks = [name for name in checks if isinstance(name, str) and (name == "all" or name.lstrip("-") in registry.RULES)]
    elif checks is not None and not isinstance(checks, bool):
        checks = None
    return tuple(rule.name for rule in registry.select(checks, options.get("budget_bytes") is not None))


def basis(processes: Sequence[ProcessTrace]) -> Basis:
    """What was looked at."""
    per_rank = [set(rules_of(process.header.options)) for process in processes]
    everywhere = set.intersection(*per_rank)
    somewhere = set.union(*per_rank)
    in_order = [name for name in registry.RULES if name in somewhere]
    return Basis(
        rules=tuple(name for name in in_order if name in everywhere),
        ranks=len({(process.header.role, process.rank) for process in processes}),
        world_size=max(process.header.world_size for process in processes),
        steps=max((len(process.steps.numbers) for process in processes), default=0),
        rank_steps=sum(len(process.steps) for process in processes),
        full_rank_steps=sum(process.steps.full for process in processes),
        events=sum(process.steps.events for process in processes)
        + sum(sum(process.running_events.values()) for process in processes),
        partly=tuple(name for name in in_order if name not in everywhere),
    )  # fmt: skip


def coverage(processes: Sequence[ProcessTrace]) -> list[str]:
    """What the run cannot show, each line once, with the ranks where not all say it."""
    said: dict[str, list[int]] = {}
    for process in processes:
        for line in dict.fromkeys((*process.header.coverage, *process.coverage)):
            said.setdefault(line, []).append(process.rank)
    return [
        line if len(ranks) == len(processes) else f"{line} ({ranks_text(ranks)})" for line, ranks in said.items()
    ]  # fmt: skip


def ranks_text(ranks: Sequence[int], limit: int = 6) -> str:
    """``rank 3``, ``ranks 0-7``, ``ranks 0, 3, 5 and 9 more``."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {spans(ordered, limit)}"


def spans(numbers: Sequence[int], limit: int = 6) -> str:
    """``0-7, 12, 40-99``: at most ``limit`` parts, then how many numbers more."""
    parts: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts[:limit])
    left = sum(high - low + 1 for low, high in parts[limit:])
    return f"{shown} and {left} more" if left else shown


def about(processes: Sequence[ProcessTrace]) -> list[str]:
    """All that is incomplete or out of the ordinary, most important first."""
    return [
        *_not_ended(processes), *missing_ranks(processes), *_apart(processes), *_exceptions(processes), *_stages(processes),
        *files(processes),
    ]  # fmt: skip


def files(processes: Sequence[ProcessTrace]) -> list[str]:
    """What is incomplete or odd about the files themselves."""
    return [
        *_versions(processes),
        *_lost(processes),
        *_detail(processes),
        *_rules(processes),
    ]


def _not_ended(processes: Sequence[ProcessTrace]) -> list[str]:
    lines = []
    for process in processes:
        if process.end is not None:
            continue
        where = [f"last sign of life at event {process.last_seq}, in step {max(process.running_step.values(), default=0)}"]
        if process.running_step and all(step < process.last_step(m) for m, step in process.running_step.items()):
            where = [f"last sign of life at event {process.last_seq}"]
        how = "still running, or it ended in the last seconds" if fresh(process) else "killed, crashed, or cut off"
        text = f"rank {process.rank} ({process.header.host}-{process.header.pid}): no end line: {how}; {where[0]}"
        inside = entered_text(process)
        lines.append(f"{text}; {inside}" if inside else text)
    if len(lines) > 8:
        lines[8:] = [f"and {len(lines) - 8} more ranks without an end line"]
    return lines


def fresh(process: ProcessTrace) -> bool:
    """Whether its files grew in the last seconds, so that it probably still runs: a heartbeat comes every second, and a slow
    file system may hold it back. Sooner where it ran on this host and is not among its processes (a container next door has
    the same host name and other processes)."""
    try:
        newest = max(path.stat().st_mtime for path in (*process.source.parts, process.source.tail) if path is not None)
    except OSError:
        return False
    return time.time() - newest < (GONE if _gone(process) else STILL_RUNNING)


def _gone(process: ProcessTrace) -> bool:
    if process.header.host != socket.gethostname().split(".")[0] or process.header.pid <= 0:
        return False
    return not exists(process.header.pid)


def entered_text(process: ProcessTrace) -> str:
    """The collective that a process without an end line had entered and not left; empty when there is none."""
    entered = process.entered
    if process.end is not None or entered is None:
        return ""
    model = process.models.get(entered.get("model", 0))
    group = entered.get("group")
    name = show_name(model.groups[group].fqn) if model and isinstance(group, int) and 0 <= group < len(model.groups) else "?"
    what = {"unshard": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "wait": "all-gather wait"}
    kind = str(entered.get("kind"))
    return f"it had entered the {what.get(kind, kind)} of {name} and not left it"


def missing_ranks(processes: Sequence[ProcessTrace]) -> list[str]:
    """One line per role of which not every rank has a file."""
    lines = []
    for role in dict.fromkeys(process.header.role for process in processes):
        own = [process for process in processes if process.header.role == role]
        world = max(process.header.world_size for process in own)
        missing = sorted(set(range(world)) - {process.rank for process in own})
        if not missing:
            continue
        of = f" of role {role}" if role else ""
        text = f"no file of {ranks_text(missing)}{of} ({len(own)} of {world} ranks are here)"
        if all(process.header.run_id_source == "local" for process in own) and len(own) == 1:
            text += ": each process made a run id of its own; set FSDPTRACE_RUN_ID to one value for all ranks"
        lines.append(text)
    return lines


def _apart(processes: Sequence[ProcessTrace]) -> list[str]:
    """Ranks that stand at different steps."""
    steps = {process.rank: process.last_step() for process in processes if process.last_step() >= 0}
    if len(set(steps.values())) < 2:
        return []
    most = max(steps.values())
    behind = {rank: step for rank, step in steps.items() if step < most}
    by_step = Counter(behind.values())
    parts = [
        f"{ranks_text([rank for rank, at in behind.items() if at == step])} at step {step}" for step in sorted(by_step)[:4]
    ]
    return [f"ranks stand apart: {'; '.join(parts)}; the others at step {most}"]


def _stages(processes: Sequence[ProcessTrace]) -> list[str]:
    """Models that not all ranks have alike."""
    lines = []
    of: dict[tuple[int, str], list[Stage]] = {}
    for stage in stages(processes):
        of.setdefault((stage.map.model, stage.map.root), []).append(stage)
    for (_, root), (first, *others) in of.items():
        if not others:
            continue
        if any(other.units != first.units for other in others):
            said = "has other units on other ranks, as stages of a pipeline do"
            parts = [f"{ranks_text(s.ranks)}: {s.names} ({count(len(s.map.groups), 'unit')})" for s in (first, *others)]
        else:
            said = "is not the same on all ranks"
            parts = [_difference(first, other) for other in others]
        more = f"; and {len(parts) - 8} more" if len(parts) > 8 else ""
        lines.append(f"{root} {said}, and has tables for each: {'; '.join(parts[:8])}{more}")
    return lines


def _difference(a: Stage, b: Stage) -> str:
    found = first_difference(a.map, b.map)
    if found is None:
        return f"other modules on {ranks_text(a.ranks)} than on {ranks_text(b.ranks)}"
    unit, name = found
    mine, theirs = (next(getattr(g, name) for g in s.map.groups if g.fqn == unit) for s in (a, b))
    if name == "params":
        return f"{show_name(unit)} has other parameters on {ranks_text(b.ranks)} than on {ranks_text(a.ranks)}"
    return f"{name} of {show_name(unit)} is {theirs} on {ranks_text(b.ranks)} and {mine} on {ranks_text(a.ranks)}"


def _exceptions(processes: Sequence[ProcessTrace]) -> list[str]:
    seen: dict[tuple[int, str, str], list[int]] = {}
    for process in processes:
        for exception in process.exceptions[-2:]:
            seen.setdefault(exception, []).append(process.rank)
    return [
        f"{kind} left {show_name(fqn) if fqn else 'the recorded block'} in step {step} on {ranks_text(ranks)}"
        for (step, kind, fqn), ranks in list(seen.items())[:6]
    ]


def _versions(processes: Sequence[ProcessTrace]) -> list[str]:
    lines = []
    for name in ("torch", "fsdptrace"):
        ranks: dict[str, list[int]] = {}
        for process in processes:
            ranks.setdefault(process.header.versions.get(name, "unknown"), []).append(process.rank)
        if len(ranks) > 1:
            parts = [f"{version} on {ranks_text(on)}" for version, on in ranks.items()]
            lines.append(f"ranks differ in their version of {name}: {'; '.join(parts)}")
    return lines


def _lost(processes: Sequence[ProcessTrace]) -> list[str]:
    lines = []
    dropped = sum(process.dropped for process in processes)
    if dropped:
        on = ranks_text([process.rank for process in processes if process.dropped])
        lines.append(f"{count(dropped, 'event')} did not fit in memory and were dropped on {on}; rules saw all of them")
    lost = sum(process.lost_violations for process in processes)
    if lost:
        lines.append(f"{count(lost, 'violation')} more were found whose lines were not kept")
    return lines


def _detail(processes: Sequence[ProcessTrace]) -> list[str]:
    total = sum(len(process.steps) for process in processes)
    full = sum(process.steps.full for process in processes)
    if full == total:
        return []
    return [
        f"all events of {full:,} of {count(total, 'step')} (summed over ranks) are in the files, one line for each of "
        "the others (see `detail` and `schedule`); the table is of the former, rules saw all"
    ]


def _rules(processes: Sequence[ProcessTrace]) -> list[str]:
    found = basis(processes)
    if not found.rules and not found.partly:
        return ["no rule ran while recording (checks=False); `fsdptrace check` runs them over the files"]
    if found.partly:
        return [f"{', '.join(found.partly)} ran on some ranks only"]
    return []
