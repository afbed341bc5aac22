"""One finished step: immutable columns and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdptrace import events as ev
from fsdptrace.model_map import ModelMap
from fsdptrace.summary import Summary, rows_of, summarise


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """Events of one step of one model.

    Attributes:
        map: the model.
        number: number of the step, counted per recorded root.
        records: the raw integers, :data:`fsdptrace.events.WIDTH` per event, in order of recording.
        texts: the strings that records refer to.
    """

    map: ModelMap
    number: int
    records: tuple[int, ...]
    texts: ev.Texts

    def __repr__(self) -> str:
        return f"Step({self.map.root}, number={self.number}, events={len(self)})"

    def __len__(self) -> int:
        return len(self.records) // ev.WIDTH

    def __iter__(self) -> Iterator[ev.Event]:
        return iter(self.events)

    @property
    def events(self) -> list[ev.Event]:
        """The events, in order of ``seq``."""
        tensors = self.map.tensors
        made = [ev.decode(row, self.number, self.texts, tensors) for row in rows_of(self.records)]
        return sorted(made, key=lambda event: event.seq)

    @property
    def counts(self) -> dict[str, int]:
        """Events by kind."""
        kinds = Counter(self.records[ev.KIND :: ev.WIDTH])
        return {ev.KINDS[kind]: number for kind, number in sorted(kinds.items())}

    def columns(self) -> dict[str, Any]:
        """numpy arrays (int64) by name: the seven common columns, then ``a`` to ``e``."""
        import numpy as np

        table = np.asarray(self.records, dtype=np.int64).reshape(-1, ev.WIDTH)
        names = ("kind", "seq", "t0", "t1", "group", "parent", "context", "a", "b", "c", "d", "e")
        return {name: table[:, index] for index, name in enumerate(names)}

    def summary(self) -> Summary:
        """Per unit and in all; see :class:`fsdptrace.summary.Summary`."""
        return summarise(self.map, self.records, self.texts)


def scalars(step: Step, violations: int, dropped: int) -> dict[str, float]:
    """At most 12 floats of ``step``, named as metrics are; ``violations`` are those that somebody should look at."""
    summary = step.summary()
    rows = summary.groups
    return {
        "fsdp/step": float(step.number),
        "fsdp/step_seconds": summary.duration_ns / 1e9,
        "fsdp/unsharded_peak_bytes": float(summary.unsharded_peak),
        "fsdp/unsharded_bytes": float(summary.unsharded_bytes),
        "fsdp/past_backward_peak_bytes": float(summary.past_backward_peak),
        "fsdp/gathers": float(sum(row.gathers for row in rows)),
        "fsdp/gathers_wasted": float(sum(row.wasted for row in rows)),
        "fsdp/gathered_bytes": float(sum(row.gathered_bytes for row in rows)),
        "fsdp/wire_bytes": float(sum(row.wire_bytes + row.reduce_wire_bytes for row in rows)),
        "fsdp/reduce_scatters": float(sum(row.reduce_scatters for row in rows)),
        "fsdp/violations": float(violations),
        "fsdp/dropped": float(dropped),
    }
