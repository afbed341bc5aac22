"""For the tests of projects that use FSDP2: the collectives that their wrap is meant to make, as a regression test.

from fsdptrace.testing import expect

def test_the_wrap():
    with expect(model, gathers={"": 1, "layers.*": 2}, reductions={"**": 1}):
        model(batch).sum().backward()
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from fsdptrace.adapters.describe import describe
from fsdptrace.checks.base import Violation
from fsdptrace.files import read_file
from fsdptrace.model_map import ModelMap
from fsdptrace.recording import Recording, record

__all__ = ["expect"]

Counts = int | Mapping[str, int]


@contextmanager
def expect(
    model: nn.Module,
    *,
    gathers: Counts | None = None,
    reductions: Counts | None = None,
    violations: int | None = 0,
    **options: Any,
) -> Iterator[Recording]:
    """Records ``model`` inside the block, and fails if the collectives of this rank are not the ones named.

    Args:
        model: wrapped by ``fully_shard``, or containing wrapped modules.
        gathers: all-gathers that were issued, in every pass: in all, or for each unit by name. ``""`` is the root, ``*``
            stands for one part of a name between dots, ``**`` for any number of them, and of several patterns that fit a
            unit the first one counts. A unit that no pattern fits may do what it likes.
        reductions: the collectives that reduce gradients (reduce-scatters, and with replicas the all-reduces too), likewise.
        violations: rules that were broken, of severity ``error`` or ``warning``; ``None`` to leave this open.
        **options: of :func:`fsdptrace.record`. With ``out`` the trace is kept; else it goes with the block.

    The block is usually one training step; counts are of the whole of it, on this rank. What the block raises passes
    through. Inside it is the :class:`fsdptrace.Recording`.

    Raises:
        AssertionError: something differs; the message has every unit that does, and every violation.
        ValueError: a pattern fits no unit of the model, or no module of it is wrapped.
        RuntimeError: under ``FSDPTRACE=0``, or when the trace is not whole.
    """
    wanted = {"gathers": gathers, "reductions": reductions}
    model_map = describe(model, 0).map
    patterns = {what: _by_unit(model_map, what, counts) for what, counts in wanted.items()}
    with tempfile.TemporaryDirectory(prefix="fsdptrace-expect-") as folder:
        # A run id of our own: a rank that is alone in here must not wait for one from rank 0.
        own = {"out": folder, "run_id": "expect", "on_violation": "record", "detail": "full"}
        recording = record(model, **{**own, **options})
        if not recording.enabled:
            raise RuntimeError("fsdptrace.testing.expect: FSDPTRACE=0 turns recording off, so nothing can be counted")
        try:
            with recording:
                yield recording
        finally:
            recording.close()
        found = _count(recording)
        wrong = [line for what in wanted for line in _differences(what, wanted[what], patterns[what], found[what])]
        wrong += _broken(recording, violations)
        if wrong:
            raise AssertionError("\n  ".join([f"{model_map.root} does not do what is expected of it:", *wrong]))


def _by_unit(model: ModelMap, what: str, counts: Counts | None) -> dict[str, int]:
    """The number wanted of each param group, by name.

    Raises:
        ValueError: a pattern fits none.
    """
    if not isinstance(counts, Mapping):
        return {}
    names = [group.fqn for group in model.groups]
    wanted: dict[str, int] = {}
    for text, number in counts.items():
        fits = re.compile(_expression("" if text == "(root)" else text))
        matched = [name for name in names if fits.fullmatch(name)]
        if not matched:
            there = ", ".join(name or '""' for name in names[:8]) + (", …" if len(names) > 8 else "")
            raise ValueError(
                f"expect({what}={{{text!r}: …}}): no unit with parameters of {model.root} has such a name; "
                + (f"there are {there}" if names else "fully_shard wrapped none")
            )
        for name in matched:
            wanted.setdefault(name, number)
    return wanted


def _expression(text: str) -> str:
    return "".join({"**": ".*", "*": "[^.]*"}.get(part) or re.escape(part) for part in re.split(r"(\*\*|\*)", text))


def _count(recording: Recording) -> dict[str, dict[str, Counter[str]]]:
    """What each param group did, by name: how often, by pass for gathers and by kind for reductions.

    Raises:
        RuntimeError: events are missing in the file, so that nothing can be said.
    """
    if not recording.enabled or recording.faults:
        raise RuntimeError("fsdptrace.testing.expect: recording broke off, see the log; nothing can be counted")
    trace = read_file(recording.path)
    if trace.damaged or trace.end is None or trace.end.get("dropped"):
        raise RuntimeError(f"fsdptrace.testing.expect: the trace is not whole ({recording.path}); put less into the block")
    model = recording.model_map()
    found = {what: {group.fqn: Counter[str]() for group in model.groups} for what in ("gathers", "reductions")}
    for event in trace.events:
        if event.model != model.model or event.group is None:
            continue
        name = model.groups[event.group].fqn
        if event.kind == "unshard" and not event.get("noop"):
            found["gathers"][name][event.pass_] += 1
        elif event.kind in ("reduce_scatter", "all_reduce"):
            found["reductions"][name][event.kind] += 1
    return found


def _differences(what: str, counts: Counts | None, wanted: Mapping[str, int], found: Mapping[str, Counter[str]]) -> list[str]:
    if isinstance(counts, int):
        total = sum(counter.total() for counter in found.values())
        if total == counts:
            return []
        each = ", ".join(f"{name or '(root)'} {counter.total()}" for name, counter in found.items())
        return [f"{what}: {total}, not {counts}: {each}"]
    return [
        f"{what} of {name or '(root)'}: {found[name].total()}, not {number}" + _parts(found[name])
        for name, number in wanted.items()
        if found[name].total() != number
    ]


def _parts(counter: Counter[str]) -> str:
    parts = [f"{number} {'outside a pass' if name == 'none' else name}" for name, number in counter.items()]
    return f" ({', '.join(parts)})" if parts else ""


def _broken(recording: Recording, violations: int | None) -> list[str]:
    found: list[Violation] = [violation for violation in recording.violations if violation.severity != "info"]
    if violations is None or len(found) == violations:
        return []
    return [f"violations: {len(found)}, not {violations}", *(f"  {violation}" for violation in found)]
