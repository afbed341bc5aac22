"""Traces made by hand, line by line, so that a test knows every number in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = {"layers.0": 1000, "layers.1": 3000}
STEP_EVENTS = 18  # what `Made.step` writes, its step line included


def group(number: int, fqn: str, size: int, world: int = 2) -> dict[str, Any]:
    """A group of a `model` line."""
    return {
        "id": number, "fqn": fqn, "unit": number + 1, "modules": [fqn], "params": [], "tensors": 1, "bytes": size,
        "sharded_bytes": size // world, "dtype": "float32", "reduce_dtype": "float32", "world": world,
        "post_forward_world": world, "replicate_world": 1, "mesh": {"0": world}, "reshard_after_forward": True,
        "auto_policy": False, "trainable": 1, "offload": False,
    }  # fmt: skip


def model(names: dict[str, int] | None = None, number: int = 0, root: str = "Net") -> dict[str, Any]:
    """A `model` line with one unit per name."""
    names = names or SIZES
    groups = [group(i, fqn, size) for i, (fqn, size) in enumerate(names.items())]
    units = [{"id": 0, "fqn": "", "modules": [""], "groups": [], "sharded": True}]
    units += [{"id": g["unit"], "fqn": g["fqn"], "modules": g["modules"], "groups": [g["id"]], "sharded": True} for g in groups]
    return {"kind": "model", "model": number, "root": root, "units": units, "groups": groups, "uncovered": []}


class Made:
    """One process's file in the making. Time goes on by 10 ns an event."""

    def __init__(self, rank: int = 0, world: int = 2, run_id: str = "run", names: dict[str, int] | None = None, **header: Any):
        self.rank = rank
        self.run_id = run_id
        self.seq = 0
        self.tick = 10
        self.number = 0
        self.counts: dict[str, int] = {}
        options = {"checks": None, "detail": "full", "budget_bytes": None, **header.pop("options", {})}
        self.lines: list[str] = []
        self.line({
            "schema": "fsdptrace/1", "rank": rank, "world_size": world, "local_rank": rank, "role": None, "host": "node",
            "pid": 100 + rank, "run_id": run_id, "run_id_source": "store", "attempt": 0,
            "versions": {"fsdptrace": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}, "options": options,
            "clock": {"perf_counter_ns": 0, "unix_ns": 1_000}, "coverage": [], **header,
        })  # fmt: skip
        self.line(model(names))

    def line(self, data: Any) -> None:
        """One line as it is."""
        self.lines.append(json.dumps(data))

    def event(self, kind: str, group: int | None = None, **data: Any) -> int:
        """One event; its number."""
        self.seq += 1
        self.counts[kind] = self.counts.get(kind, 0) + 1
        t0 = self.tick * self.seq
        at = {"seq": self.seq, "kind": kind, "t0": t0, "t1": t0 + self.tick // 2, "step": self.number}
        self.line({**at, **({"group": group} if group is not None else {}), **data})
        return self.seq

    def unshard(self, group: int, size: int, pass_: str, **data: Any) -> int:
        """A gather."""
        return self.event("unshard", group, bytes=size, **{"pass": pass_}, **data)

    def end_step(self, peak: int = 4000, now: int = 0, past: int = 0, **data: Any) -> None:
        """The step line."""
        counts, self.counts = self.counts, {}
        values = {"unsharded_bytes": now, "unsharded_peak": peak, "past_backward_bytes": past, "dropped": 0}
        self.event("step", **values, counts=counts, **data)
        self.counts = {}
        self.number += 1

    def step(self) -> None:
        """A step of two units: layers.1 (3,000 B) stays open over the forward's end, and its backward prefetches layers.0
        (1,000 B), so that the peak is 4,000 B, at the eleventh event of the step."""
        forward, backward = {"pass": "forward"}, {"pass": "backward"}
        self.unshard(0, 1000, "forward")
        self.event("wait", 0, bytes=1000, **forward)
        self.event("pre_forward", 0, **forward)
        self.event("reshard", 0, bytes=1000, **forward)
        self.event("post_forward", 0, **forward)
        self.unshard(1, 3000, "forward")
        self.event("wait", 1, bytes=3000, **forward)
        self.event("pre_forward", 1, **forward)
        self.event("post_forward", 1, **forward)
        self.event("pre_backward", 1, **backward)
        self.unshard(0, 1000, "backward", issuer=1, direction="backward", mode="implicit")
        self.event("reduce_scatter", 1, bytes=3000, world=2, dtype="float32", tensors=1, **backward)
        self.event("reshard", 1, bytes=3000, **backward)
        self.event("wait", 0, bytes=1000, **backward)
        self.event("pre_backward", 0, **backward)
        self.event("reduce_scatter", 0, bytes=1000, world=2, dtype="float32", tensors=1, **backward)
        self.event("reshard", 0, bytes=1000, **backward)
        self.end_step()

    def one_line_step(self, peak: int = 4000, **data: Any) -> None:
        """A step of which only its line was written."""
        self.seq += STEP_EVENTS - 1
        self.counts = {"unshard": 3}
        self.end_step(peak, **data)

    def violation(self, rule: str, fqn: str, **data: Any) -> None:
        """A violation as the recorder writes it."""
        body = {"severity": "error", "message": f"{rule} at {fqn}", "hint": "change it", "evidence": [1, self.seq], "bytes": 0}
        self.event("violation", data.pop("group", None), rule=rule, fqn=fqn, **{**body, "cause": "", **data})

    def end(self) -> None:
        """The last line."""
        self.line({"kind": "end", "events": self.seq, "dropped": 0, "violations": 0, "t": 10 * self.seq + 9, "drain_ns": 1})

    def write(self, folder: Path, text: str | None = None) -> Path:
        """Writes the file under ``folder / run_id``; its path."""
        path = folder / self.run_id / f"rank{self.rank:05d}.node-{100 + self.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.lines) + "\n" if text is None else text)
        return path


def run(
    folder: Path, ranks: int = 2, steps: int = 2, run_id: str = "run", world: int | None = None, **header: Any
) -> list[Path]:
    """The first ``ranks`` ranks of a run of ``world``: each has ``steps`` full steps and an end line."""
    paths = []
    for rank in range(ranks):
        made = Made(rank, world or ranks, run_id, **header)
        for _ in range(steps):
            made.step()
        made.end()
        paths.append(made.write(folder))
    return paths
