"""What a step looks like without its times: per unit the sequence of its events and what they add up to.

Two runs of one program have the same prints, whatever the machine did meanwhile. Equal ones are kept once, so that a run of a
million steps alike takes little memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from fsdptrace import events as ev
from fsdptrace.analysis.process import StepPart
from fsdptrace.checks.text import size
from fsdptrace.model_map import ModelMap, show_name
from fsdptrace.summary import GroupSummary, Summariser

COUNTED = tuple(
    item.name for item in fields(GroupSummary)
    if item.name not in ("group", "fqn", "bytes") and not item.name.endswith("_ns")
)  # fmt: skip
WHOLE_MODEL = "\0"  # stands for the events that belong to no group: outermost forwards, backwards, optimizer steps
_LEFT_OUT = {"region", "recompute"}  # numbers of events
_NUMBERS = {
    kind: {i for i, field in enumerate(fields_of) if field.name in _LEFT_OUT}
    for kind, fields_of in ev.WRITTEN.items()
    if any(field.name in _LEFT_OUT for field in fields_of)
}
_OF_THE_MACHINE = (ev.STEP, ev.DEVICE, ev.MEMORY)  # what the device took, and sums; no two runs agree on them

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPrint:
    """One step: per unit the digest of its events' sequence (empty where not all were read) and its counts, in the order of
    :data:`COUNTED`; and the bytes that were held."""

    sequences: Mapping[str, bytes]
    counts: Mapping[str, Counts]


@dataclass(slots=True)
class Describer:
    """Events as text, without what differs from run to run: numbers, times, ids."""

    map: ModelMap
    texts: ev.Texts
    _known: dict[tuple[int, ...], tuple[str, bytes]] = field(default_factory=dict)

    def __call__(self, kind: int, context: int, data: tuple[int, ...]) -> tuple[str, bytes]:
        """The text and its digest."""
        if kind in _NUMBERS:
            data = tuple(0 if i in _NUMBERS[kind] else value for i, value in enumerate(data))
        key = (kind, context % 4, *data)
        known = self._known.get(key)
        if known is None:
            text = self._text(kind, context, data)
            known = self._known[key] = text, hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest()
        return known

    def _text(self, kind: int, context: int, data: tuple[int, ...]) -> str:
        parts = [ev.KINDS[kind]]
        if context % 4:
            parts.append(f"in {ev.PASSES[context % 4]}")
        for spec, value in zip(ev.WRITTEN[kind], data, strict=False):
            if spec.name not in _LEFT_OUT and (text := self._field(spec, value)):
                parts.append(text)
        return ", ".join(parts)

    def _field(self, spec: ev.FieldSpec, value: int) -> str:
        if spec.codec == "how":
            noop, direction, mode = ev.unpack_how(value)
            shown = [f"not needed: {noop}" if noop else "", " ".join(part for part in (mode, direction) if part)]
            return ", ".join(part for part in shown if part)
        if spec.codec == "op":
            which = ev.which_text(value // ev.OP_UNIT)
            return f"op {ev.OPS[value % ev.OP_UNIT]}" + (f", of parameters {which}" if which else "")
        if spec.codec == "group":
            return f"{spec.name} {show_name(self.map.groups[value].fqn)}" if value >= 0 else ""
        if spec.codec == "unit":
            return f"{spec.name} {show_name(self.map.units[value].fqn)}" if value >= 0 else ""
        if spec.codec in ("count", "ns"):
            return f"{spec.name} {value}" if value >= 0 else ""
        if spec.codec == "bytes":
            return f"{size(value)} ({value})" if value >= 10240 else f"{value} B" if value >= 0 else ""
        if spec.codec in ("text", "json"):
            return self.texts.get(value)
        names = {"enum": spec.names, "dtype": ev.DTYPES}.get(spec.codec)
        return f"{spec.name} {names[value] if names else value}"


@dataclass(slots=True)
class Prints:
    """A sink for :func:`~fsdptrace.analysis.lines.read_process`: the prints of one process's full steps, by model and step.

    ``wanted`` names units of steps whose events are kept as text besides: ``(model, step, unit)``; they land in ``told`` with
    their numbers.
    """

    wanted: frozenset[tuple[int, int, str]] = frozenset()
    steps: dict[tuple[int, int], StepPrint] = field(default_factory=dict)
    told: dict[tuple[int, int, str], list[tuple[int, str]]] = field(default_factory=dict)
    _describers: dict[int, Describer] = field(default_factory=dict)
    _sums: dict[int, tuple[Summariser, dict[str, Counts]]] = field(default_factory=dict)
    _same: dict[tuple[object, ...], StepPrint] = field(default_factory=dict)

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader."""
        number = part.map.model
        if not part.full:
            self._sums.pop(number, None)
            return
        describe = self._describers.get(number)
        if describe is None or describe.map is not part.map:
            describe = self._describers[number] = Describer(part.map, part.texts)
        names = [group.fqn for group in part.map.groups]
        wanted = {unit for model, step, unit in self.wanted if (model, step) == (number, part.step)}
        digests: dict[int, list[bytes]] = {}
        for kind, seq, _, _, group, _, context, *data in zip(*[iter(part.records)] * ev.WIDTH, strict=True):
            if kind in _OF_THE_MACHINE:
                continue
            text, digest = describe(kind, context, tuple(data))
            digests.setdefault(group, []).append(digest)
            if wanted and (unit := names[group] if group >= 0 else WHOLE_MODEL) in wanted:
                self.told.setdefault((number, part.step, unit), []).append((seq, text))
        sequences = {
            names[group] if group >= 0 else WHOLE_MODEL: hashlib.blake2b(b"".join(items), digest_size=8).digest()
            for group, items in digests.items()
        }
        counts = self._counts(part)
        key = (tuple(sorted(sequences.items())), tuple(sorted(counts.items())))
        self.steps[number, part.step] = self._same.setdefault(key, StepPrint(sequences, counts))

    def _counts(self, part: StepPart) -> dict[str, Counts]:
        """What the step added, per unit."""
        number = part.map.model
        known = self._sums.get(number) if part.contiguous else None
        summariser, before = known if known is not None else (Summariser(part.map), {})
        summariser.feed(part.records)
        after = {row.fqn: tuple(getattr(row, name) for name in COUNTED) for row in summariser.result().groups}
        self._sums[number] = summariser, after
        nothing = (0,) * len(COUNTED)
        return {
            fqn: tuple(now - then for now, then in zip(values, before.get(fqn, nothing), strict=True))
            for fqn, values in after.items()
        }

    def finish(self) -> Prints:
        """Drops what only reading needs."""
        self._describers, self._sums, self._same = {}, {}, {}
        return self
