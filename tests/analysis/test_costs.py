"""Communication beside the closed form, prefetches, ranks beside each other: numbers that a person worked out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdptrace
from fsdptrace.analysis import load
from fsdptrace.analysis.traffic import Difference, gradient_bytes
from fsdptrace.model_map import ModelMap
from support import made as by_hand
from support.made import Made, run

FORWARD, BACKWARD, RECOMPUTE = {"pass": "forward"}, {"pass": "backward"}, {"pass": "recompute"}


def test_communication_beside_the_closed_form(tmp_path: Path) -> None:
    """Three steps on two ranks. Per step, layers.0 (1,000 B) is gathered twice and layers.1 (3,000 B) once, since it stays open
    over the end of the forward, where the form has two; each rank receives half of every gather and reduction."""
    run(tmp_path, ranks=2, steps=3)
    traffic = load(tmp_path).models[0].traffic
    gathers, reductions = traffic.rows
    assert (gathers.collective, gathers.mesh, gathers.world, gathers.dtype) == ("all-gather", "dim 0 (2)", 2, "float32")
    assert (gathers.calls, gathers.expected_calls) == (6 * 3, 6 * 4)
    assert gathers.bytes == 6 * (1000 + 1000 + 3000)
    assert gathers.wire_bytes == 6 * (500 + 500 + 1500)
    assert gathers.expected_wire_bytes == 6 * (2 * 500 + 2 * 1500)
    assert (reductions.collective, reductions.calls, reductions.expected_calls) == ("reduce-scatter", 12, 12)
    assert reductions.wire_bytes == reductions.expected_wire_bytes == 6 * (500 + 1500)
    assert traffic.wire_bytes == 6 * 4500
    assert traffic.expected_wire_bytes == 6 * 6000
    assert traffic.differences == [Difference("layers.1", "all-gather", 6, 12, 6 * 1500, 12 * 1500)]
    assert traffic.unknown == []


def _hybrid(**changes: Any) -> dict[str, Any]:
    """400 parameters: gathered in bfloat16 (800 B) over 4 ranks, in backward over 2, reduced in float32, replicated twice."""
    line = by_hand.model({"block": 800})
    line["groups"][0].update(
        dtype="bfloat16", reduce_dtype="float32", world=4, post_forward_world=2, replicate_world=2, reshard_after_forward=2,
        mesh={"replicate": 2, "shard": 4}, **changes,
    )  # fmt: skip
    return line


def _hybrid_step(made: Made) -> None:
    made.event("forward", root=1, grad=True, inference=False, **FORWARD)
    made.unshard(0, 800, "forward")
    made.event("wait", 0, bytes=800, **FORWARD)
    made.event("pre_forward", 0, **FORWARD)
    made.event("reshard", 0, bytes=800, to="post_forward", **FORWARD)
    made.event("post_forward", 0, **FORWARD)
    made.unshard(0, 800, "backward", world=2)
    made.event("wait", 0, bytes=800, **BACKWARD)
    made.event("pre_backward", 0, **BACKWARD)
    made.event("reshard", 0, bytes=800, **BACKWARD)
    made.event("reduce_scatter", 0, bytes=1600, world=4, dtype="float32", tensors=1, **BACKWARD)
    made.event("all_reduce", 0, bytes=400, world=2, dtype="float32", tensors=1, **BACKWARD)
    made.event("post_backward", 0, tensors=1, **BACKWARD)
    made.end_step(800)


def test_meshes_and_dtypes(tmp_path: Path) -> None:
    """A gather of 800 B over 4 ranks brings 600, over 2 of them 400; 1,600 B of gradients reduce-scattered over 4 bring 1,200,
    and the shard of 400 all-reduced over 2 replicas 200 there and 200 back."""
    made = Made(0, 8)
    made.lines[1] = json.dumps(_hybrid())
    _hybrid_step(made)
    made.end()
    made.write(tmp_path)
    traffic = load(tmp_path).models[0].traffic
    assert [(row.collective, row.mesh, row.dtype, row.wire_bytes, row.expected_wire_bytes) for row in traffic.rows] == [
        ("all-gather", "2 ranks of shard (4)", "bfloat16", 400, 400),
        ("all-gather", "shard (4)", "bfloat16", 600, 600),
        ("reduce-scatter", "shard (4)", "float32", 1200, 1200),
        ("all-reduce", "replicate (2)", "float32", 400, 400),
    ]
    assert traffic.differences == []


def test_a_root_that_stays_open_by_default(tmp_path: Path) -> None:
    """With the default policy (torch 2.8) the outermost unit is not gathered again in its backward; another one is."""
    for outermost, calls in ((1, 1), (0, 2)):
        line = by_hand.model({"block": 800})
        line["groups"][0]["auto_policy"] = True
        made = Made(0, 2)
        made.lines[1] = json.dumps(line)
        made.event("forward", root=outermost, grad=True, inference=False, **FORWARD)
        made.unshard(0, 800, "forward")
        made.event("pre_forward", 0, **FORWARD)
        made.event("pre_backward", 0, **BACKWARD)
        made.end_step(800)
        made.end()
        made.write(tmp_path)
        assert load(tmp_path).models[0].traffic.rows[0].expected_calls == calls


def test_a_unit_of_two_modules_is_used_once(tmp_path: Path) -> None:
    """The hooks of both modules of a grouped unit run in one forward of it (as in Accelerate, which wraps the last norm and the
    head together): one gather by the form, and none for the backward, since it stays open."""
    line = by_hand.model({"norm": 800})
    line["groups"][0].update(modules=["norm", "head"], reshard_after_forward=False, post_forward_world=1)
    made = Made(0, 2)
    made.lines[1] = json.dumps(line)
    made.unshard(0, 800, "forward")
    made.event("pre_forward", 0, **FORWARD)
    made.event("unshard", 0, bytes=0, noop="open", **FORWARD)
    made.event("pre_forward", 0, before="forward", **FORWARD)
    made.event("pre_backward", 0, **BACKWARD)
    made.end_step(800)
    made.end()
    made.write(tmp_path)
    traffic = load(tmp_path).models[0].traffic
    assert (traffic.rows[0].calls, traffic.rows[0].expected_calls) == (1, 1)


def test_gathers_again_and_gradients_held_back(tmp_path: Path) -> None:
    """Two micro-batches; in each backward the recomputation gathers, frees, and the backward gathers again; the first one's
    gradients are not reduced. The form has 4 gathers and 2 reductions."""
    made = Made(0, 2)
    for last in (False, True):
        made.unshard(0, 1000, "forward")
        made.event("pre_forward", 0, **FORWARD)
        made.event("reshard", 0, bytes=1000, **FORWARD)
        made.unshard(0, 1000, "recompute")
        made.event("pre_forward", 0, **RECOMPUTE)
        made.event("reshard", 0, bytes=1000, **RECOMPUTE)
        made.unshard(0, 1000, "backward")
        made.event("pre_backward", 0, **BACKWARD)
        made.event("reshard", 0, bytes=1000, **BACKWARD)
        if last:
            made.event("reduce_scatter", 0, bytes=1000, world=2, dtype="float32", tensors=1, **BACKWARD)
    made.end_step(1000)
    made.end()
    made.write(tmp_path)
    model = load(tmp_path).models[0]
    assert (model.rows[0].sums.forwards, model.rows[0].sums.backwards) == (2, 2)
    assert model.traffic.differences == [
        Difference("layers.0", "all-gather", 6, 4, 3000, 2000), Difference("layers.0", "reduce-scatter", 1, 2, 500, 1000),
    ]  # fmt: skip


def test_bytes_of_gradients() -> None:
    params = [
        {"name": "a", "shape": [100], "dtype": "float32", "trainable": True, "bytes": 200},
        {"name": "b", "shape": [10], "dtype": "float32", "trainable": False, "bytes": 20},
    ]
    group = ModelMap.from_json(_hybrid(params=params)).groups[0]
    assert gradient_bytes(group) == 400  # 100 parameters of 2 bytes gathered, 4 reduced
    assert gradient_bytes(ModelMap.from_json(_hybrid(params=[])).groups[0]) == 1600
    mixed = _hybrid(params=params)
    mixed["groups"][0]["dtype"] = "uint8"  # gathered as they are stored: 50 parameters of 4 bytes
    assert gradient_bytes(ModelMap.from_json(mixed).groups[0]) == 200
    mixed["groups"][0]["reduce_dtype"] = "unknown"
    assert gradient_bytes(ModelMap.from_json(mixed).groups[0]) is None


def test_prefetches_used_late_and_wasted(tmp_path: Path) -> None:
    """Forward: layers.0 asks for layers.1 explicitly and computes meanwhile (used, in time). Backward: layers.1 asks for
    layers.0, which is freed unused; then layers.0 is asked for again and waited for at once (late)."""
    made = Made(0, 1)
    explicit = {"direction": "forward", "mode": "explicit"}
    implicit = {"direction": "backward", "mode": "implicit"}
    made.unshard(0, 1000, "forward")
    made.unshard(1, 3000, "forward", issuer=0, **explicit)  # event 2
    made.event("pre_forward", 0, **FORWARD)
    made.event("post_forward", 0, **FORWARD)
    made.event("wait", 1, bytes=3000, **FORWARD)  # event 5, 30 ns after its issue
    made.event("pre_forward", 1, **FORWARD)
    made.event("reshard", 0, bytes=1000, **FORWARD)
    made.unshard(0, 1000, "backward", issuer=1, **implicit)
    made.event("pre_backward", 1, **BACKWARD)
    made.event("reshard", 0, bytes=1000, **BACKWARD)
    made.unshard(0, 1000, "backward", issuer=1, **implicit)  # event 11
    made.event("wait", 0, bytes=1000, **BACKWARD)  # event 12, 10 ns later
    made.event("pre_backward", 0, **BACKWARD)
    made.unshard(1, 0, "backward", noop="open", issuer=0, **implicit)  # nothing was issued
    made.end_step(4000)
    made.end()
    made.write(tmp_path)
    model = load(tmp_path).models[0]
    found = {key: (p.issued, p.used, p.late, p.wasted, p.waits, p.distance_ns) for key, p in model.prefetches.items()}
    assert found == {("forward", "explicit"): (1, 1, 0, 0, 1, 30), ("backward", "implicit"): (2, 1, 1, 1, 1, 10)}
    assert [(row.sums.waits, row.sums.distance_ns, row.sums.distance_max_ns) for row in model.rows] == [
        (1, 10, 10),
        (1, 30, 30),
    ]
    assert [row.sums.wait_ns for row in model.rows] == [5, 5]


def test_ranks_beside_each_other(tmp_path: Path) -> None:
    """Both on one host, so on one clock: all that rank 1 does comes 7 ns later, but for the last reduction: 1 ns earlier."""
    for rank in range(2):
        made = Made(rank, 2, clock={"perf_counter_ns": 50, "unix_ns": 1_000 + 900 * rank})
        made.step()
        made.end()
        late = [json.loads(line) for line in made.lines]
        for data in late:
            if rank and "seq" in data:
                shift = -1 if data["kind"] == "reduce_scatter" and data["group"] == 0 else 7
                data["t0"] += shift
                data["t1"] += shift + (100 if data["kind"] == "wait" else 0)
        made.write(tmp_path, "".join(json.dumps(data) + "\n" for data in late))
    side = load(tmp_path).side_by_side
    assert (side.steps, side.compared, side.different, side.hosts) == (1, 5, 0, 1)  # 3 gathers and 2 reductions
    zero, one = side.rows
    assert (zero.last, one.last) == (1, 4)
    assert (zero.behind_ns, one.behind_ns) == (1 / 5, 4 * 7 / 5)
    assert (zero.wait_ns, one.wait_ns) == (3 * 5, 3 * 105)
    assert (zero.step_ns, one.step_ns) == (175, 175)  # from the begin of event 1 to the end of event 18
    worst = {(item.collective, item.unit): (item.calls, item.rank, item.times, item.mean_ns) for item in side.slowest}
    assert worst == {
        ("all-gather", "layers.0"): (2, 1, 2, 7.0), ("all-gather", "layers.1"): (1, 1, 1, 7.0),
        ("reduce-scatter", "layers.0"): (1, 0, 1, 1.0), ("reduce-scatter", "layers.1"): (1, 1, 1, 7.0),
    }  # fmt: skip


def test_ranks_that_do_other_things_are_not_compared(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, steps=2, world=2)
    other = Made(1)
    other.step()
    other.unshard(1, 3000, "forward")
    other.end_step(3000)
    other.end()
    other.write(tmp_path)
    side = load(tmp_path).side_by_side
    assert (side.steps, side.different) == (1, 1)


def test_what_tracing_cost(tmp_path: Path) -> None:
    paths = run(tmp_path, ranks=2, steps=2)
    rows = load(tmp_path).side_by_side.rows
    assert [(row.events, row.dropped, row.drain_ns) for row in rows] == [(36, 0, 1), (36, 0, 1)]
    assert [row.bytes for row in rows] == [path.stat().st_size for path in paths]


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


def _model(mesh: Any, checkpoint: str = "", frozen: int = -1, **options: Any) -> nn.Module:
    """Three blocks of 220 parameters, and 77 in the root. Over 4 ranks 10 rows are padded to 12, and 7 to 8: 264 and 88."""
    model = nn.Sequential(*[_block() for _ in range(3)], nn.Linear(10, 7))
    for i in range(3):
        if i == frozen:
            model[i].requires_grad_(False)
        if checkpoint == "inside":
            model[i] = checkpoint_wrapper(model[i])
        fully_shard(model[i], mesh=mesh, **options)
        if checkpoint == "outside":
            model[i] = checkpoint_wrapper(model[i])
    policy = {name: value for name, value in options.items() if name == "mp_policy"}
    return fully_shard(model, mesh=mesh, **policy)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Parameters that travel per pass, of three blocks and the root, three quarters of them received: 3 * 264 + 88 = 880, 660.
BLOCKS, ROOT = 3 * 264 * 3 // 4, 88 * 3 // 4


@pytest.mark.parametrize(
    ("shape", "names", "options", "batches", "received"),
    [
        # float32: gathers of all in forward, of the blocks in backward (the root stays open), reductions of all.
        ((4,), None, {}, 1, 4 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS + ROOT)),
        ((4,), None, {}, 3, 3 * (4 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS + ROOT))),
        ((4,), None, {"mp_policy": HALF}, 1, 2 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS + ROOT)),
        ((4,), None, {"reshard_after_forward": False}, 1, 4 * (BLOCKS + ROOT) + 4 * (BLOCKS + ROOT)),
        # In backward over 2 ranks: half of the parameters instead of three quarters.
        ((4,), None, {"reshard_after_forward": 2}, 1, 4 * (BLOCKS + ROOT + 3 * 264 // 2) + 4 * (BLOCKS + ROOT)),
        ((4,), None, {"checkpoint": "inside"}, 1, 4 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS + ROOT)),
        ((4,), None, {"checkpoint": "outside"}, 1, 4 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS + ROOT)),
        ((4,), None, {"frozen": 1}, 1, 4 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS * 2 // 3 + ROOT)),
        # Two replicas: all-reduce of a quarter, there and back.
        ((2, 4), ("dp", "fsdp"), {}, 1, 4 * (2 * BLOCKS + ROOT) + 4 * (BLOCKS + ROOT) + 4 * 2 * (880 // 4 // 2)),
        ((1,), None, {}, 1, 0),
    ],
)  # fmt: skip
def test_the_form_is_what_real_programs_do(
    shape: tuple[int, ...], names: Any, options: dict[str, Any], batches: int, received: int,
    fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording],
) -> None:  # fmt: skip
    model = _model(fake_pg(*shape, names=names), **options)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with record(model, detail="full") as recording:
        for _ in range(2):
            for _ in range(batches):
                model(torch.randn(2, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    recording.close()
    traffic = load(recording.path).models[0].traffic
    assert (traffic.wire_bytes, traffic.expected_wire_bytes) == (2 * received, 2 * received)
    assert (traffic.differences, traffic.unknown, traffic.steps) == ([], [], 2)


def test_what_real_programs_do_besides_the_form(
    fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording]
) -> None:
    """Gradients held back over three micro-batches, and a frozen unit in front that the prefetch gathers for nothing."""
    model = _model(fake_pg(4), frozen=0)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with record(model, detail="full") as recording:
        for batch in range(3):
            model.set_requires_gradient_sync(batch == 2)  # type: ignore[operator]
            model(torch.randn(2, 10)).sum().backward()
        optimizer.step()
    recording.close()
    differences = load(recording.path).models[0].traffic.differences
    assert {(item.unit, item.collective): (item.calls, item.expected_calls) for item in differences} == {
        ("0", "all-gather"): (6, 3),
        **{(unit, "reduce-scatter"): (1, 3) for unit in ("1", "2", "")},
    }
