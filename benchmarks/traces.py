"""Large traces, made without training: what a recorder writes for a model of equal blocks, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fsdptrace import events as ev
from fsdptrace.files import LineFormatter, step_line
from fsdptrace.model_map import GroupInfo, ModelMap, ParamInfo, UnitInfo

BLOCKS = 90
BYTES = 8 << 20
WORLD = 8
EVENTS_PER_BLOCK = 13
EVENTS_PER_STEP = BLOCKS * EVENTS_PER_BLOCK  # its step line included: the last block is not prefetched

_FORWARD = ev.PASS_FORWARD
_BACKWARD = ev.PASS_BACKWARD
_F32 = ev.DTYPE_NUMBER["float32"]
_PREFETCH = ev.pack_how(0, 2, 1)
_PENDING = ev.pack_how(2, 0, 0)


def model_map(blocks: int = BLOCKS, size: int = BYTES, world: int = WORLD) -> ModelMap:
    """``blocks`` units of ``size`` bytes, sharded over ``world`` ranks."""
    groups = tuple(
        GroupInfo(
            i, f"layers.{i}", i + 1, (f"layers.{i}",), (ParamInfo(f"layers.{i}.weight", (size // 4,), "float32", True, size),),
            1, size, size // world, "float32", "float32", world, world, 1, {"dp": world}, True, False, 1, False,
        )
        for i in range(blocks)
    )  # fmt: skip
    units = (UnitInfo(0, "", ("",), (), True), *(UnitInfo(g.unit, g.fqn, g.modules, (g.id,), True) for g in groups))
    return ModelMap(0, "Transformer", units, groups)


def step_records(blocks: int, size: int, world: int, seq: int, start: int) -> Iterator[tuple[int, ...]]:
    """The records of one step, in the order of recording: forward, backward with implicit prefetch, reduction."""
    t = start
    gather = (size, world, _F32)

    def event(kind: int, group: int, context: int, *data: int, parent: int = 0) -> tuple[int, ...]:
        nonlocal seq, t
        seq += 1
        t += 2_000
        return (kind, seq, t, t + 1_500, group, parent, context, *data, *[0] * (5 - len(data)))

    for g in range(blocks):
        yield event(ev.UNSHARD, g, _FORWARD, *gather, -1, 0)
        yield event(ev.WAIT, g, _FORWARD, size)
        yield event(ev.PRE_FORWARD, g, _FORWARD, 4, 1, 1, 1)
        yield event(ev.RESHARD, g, _FORWARD, size)
        yield event(ev.POST_FORWARD, g, _FORWARD, 1, 4)
    for g in reversed(range(blocks)):
        first = g == blocks - 1
        yield (
            event(ev.UNSHARD, g, _BACKWARD, *gather, -1, 0)
            if first
            else event(ev.UNSHARD, g, _BACKWARD, 0, world, _F32, -1, _PENDING)
        )
        yield event(ev.WAIT, g, _BACKWARD, size)
        if g:
            yield event(ev.UNSHARD, g - 1, _BACKWARD, *gather, g, _PREFETCH, parent=seq + 2)
            yield event(ev.PREFETCH, g, _BACKWARD, g - 1, _PREFETCH)
        yield event(ev.PRE_BACKWARD, g, _BACKWARD, 4, 2)
        yield event(ev.RESHARD, g, _BACKWARD, size)
        yield event(ev.REDUCE_SCATTER, g, _BACKWARD, size, world, _F32, 1, 0)
        yield event(ev.POST_BACKWARD, g, _BACKWARD, 2, 3, 0, 1)
    yield event(ev.STEP, -1, 0, 0, 2 * size, 0, 0, 0)


def header(rank: int, world: int) -> str:
    """The first line of a rank's file."""
    return json.dumps({
        "schema": ev.SCHEMA, "rank": rank, "world_size": world, "local_rank": rank, "role": None, "host": "bench", "pid": rank,
        "run_id": "bench", "run_id_source": "option", "attempt": 0, "versions": {"fsdptrace": "0", "torch": "2.13.0"},
        "options": {"checks": None, "detail": "full", "budget_bytes": None},
        "clock": {"perf_counter_ns": 0, "unix_ns": 1_700_000_000_000_000_000}, "coverage": [],
    }) + "\n"  # fmt: skip


def make(folder: Path, events: int, ranks: int = WORLD, blocks: int = BLOCKS) -> int:
    """Writes a run of ``ranks`` files with ``events`` events in all, or a few fewer; how many there are."""
    steps = max(1, events // ranks // (EVENTS_PER_BLOCK * blocks))
    model = model_map(blocks, world=ranks)
    texts = ev.Texts()
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    formatter = LineFormatter(texts, {0: model})
    written = 0
    for rank in range(ranks):
        with open(folder / "bench" / f"rank{rank:05d}.bench-{rank}.jsonl", "w", encoding="utf-8") as out:
            out.write(header(rank, ranks) + json.dumps(model.to_json(), separators=(",", ":")) + "\n")
            seq, now = 0, 1_000_000 + 137 * rank
            for step in range(steps):
                flat = [value for record in step_records(blocks, BYTES, ranks, seq, now) for value in record]
                count = len(flat) // ev.WIDTH
                out.write(formatter.lines(flat, 0, len(flat) - ev.WIDTH, step) + step_line(formatter, flat, step, 0))
                seq += count
                now += count * 2_000 + 10_000
                written += count
            out.write(
                json.dumps({"kind": "end", "events": seq, "dropped": 0, "violations": 0, "t": now, "drain_ns": 2_700 * seq})
            )
            out.write("\n")
    return written


def ensure(folder: Path, events: int) -> int:
    """Makes a run in ``folder`` unless one lies there; how many events it has."""
    if not (folder / "bench").exists():
        return make(folder, events)
    lines = (_last_line(path) for path in (folder / "bench").glob("*.jsonl"))
    return sum(int(json.loads(line)["events"]) for line in lines)


def _last_line(path: Path) -> bytes:
    with open(path, "rb") as stream:
        stream.seek(-500, 2)
        return stream.read().splitlines()[-1]
