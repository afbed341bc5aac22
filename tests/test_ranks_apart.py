"""Real ranks that part ways or stop: what the others say while it happens, and what the files say afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdptrace
from fsdptrace.adapters.store import default_store
from fsdptrace.analysis import check
from fsdptrace.analysis.postmortem import postmortem
from support.models import Calls, sharded_chain, train
from support.ranks import run_ranks, run_to_the_end
from support.torches import since

DIM = 4


class Towers(nn.Module):
    """Two towers of one layer each and two layers after them; every layer is a unit."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.visual = nn.Linear(DIM, DIM)
        self.aux = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        for layer in (self.visual, self.aux, *self.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x: torch.Tensor, image: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        if image:
            x = x + self.visual(x)
        for layer in self.layers:
            x = layer(x)
        return x, self.aux(x)


def skipped_tower(model: Any, rank: int) -> None:
    x, _ = model(torch.randn(2, DIM), image=rank == 0)
    x.sum().backward()


def another_pass(model: Any, rank: int) -> None:
    for _ in range(2 if rank == 1 else 1):
        model(torch.randn(2, DIM))
    sum(part.sum() for part in model(torch.randn(2, DIM))).backward()


def branch_of_the_loss(model: Any, rank: int) -> None:
    x, aux = model(torch.randn(2, DIM))
    (x.sum() if rank == 1 else x.sum() + aux.sum()).backward()


def asleep(model: Any, rank: int) -> None:
    if rank == 1:
        time.sleep(1.8)
    sum(part.sum() for part in model(torch.randn(2, DIM))).backward()


def exception(model: Any, rank: int) -> None:
    if rank == 1:
        handle = model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        sum(part.sum() for part in model(torch.randn(2, DIM))).backward()
    finally:
        if rank == 1:
            time.sleep(2)  # the program handles it, and comes no more
            handle.remove()


def more_micro_batches(model: Any, rank: int) -> None:
    count = 2 if rank == 1 else 1
    for number in range(count):
        model.set_requires_gradient_sync(number == count - 1)
        sum(part.sum() for part in model(torch.randn(2, DIM))).backward()


def exception_caught(model: Any, rank: int) -> None:
    if rank == 1:  # a bad batch, which the loop skips
        handle = model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(torch.randn(2, DIM))
        handle.remove()
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
    for _ in range(2):
        sum(part.sum() for part in model(torch.randn(2, DIM))).backward()


def some_skew(model: Any, rank: int) -> None:
    for step in range(3):
        time.sleep(0.5 * (rank == step % 2))
        sum(part.sum() for part in model(torch.randn(2, DIM))).backward()


CASES = (
    skipped_tower, another_pass, branch_of_the_loss, asleep, exception, more_micro_batches, exception_caught, some_skew,
)  # fmt: skip


def part_ways(rank: int, out: str) -> dict[str, Any]:
    """Each case on a process group of its own, whose collectives time out, so that the next one begins afresh."""
    found: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        torch.manual_seed(0)
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        model = Towers(DeviceMesh.from_group(group, "cpu"))
        with fsdptrace.record(model, out=out, run_id="r", stall_seconds=1.0, on_violation="record") as rec:
            for _ in range(2):
                sum(part.sum() for part in model(torch.randn(2, DIM))).backward()
            rec.step()
            with contextlib.suppress(RuntimeError, ZeroDivisionError):
                case(model, rank)
            found[case.__name__] = [
                (v.rule, v.severity, v.fqn, v.step, v.message) for v in rec.violations if v.rule in ("rank-order", "rank-stall")
            ]
        meet(rank, number)
    rec.close()
    return found


def ten_seconds_of_skew(rank: int, out: str) -> list[str]:
    """All defaults; rank 1 sleeps in the second of three steps."""
    model = Towers(init_device_mesh("cpu", (2,)))
    with fsdptrace.record(model, out=out, run_id="skew", on_violation="record") as rec:
        for step in range(3):
            time.sleep(10 * (rank == step == 1))
            sum(part.sum() for part in model(torch.randn(2, DIM))).backward()
            rec.step()
        time.sleep(0.5)  # for a last look
    rec.close()
    return [violation.message for violation in rec.violations]


def meet(rank: int, number: int) -> None:
    """Both ranks are here: through the store, which stays the program's own."""
    store = default_store()
    store.set(f"test/{number}/{rank}", "here")
    store.wait([f"test/{number}/0", f"test/{number}/1"], timedelta(seconds=30))


def test_two_ranks(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:  # they sleep most of the time
        skew = pool.submit(run_ranks, ten_seconds_of_skew, 2, str(tmp_path / "skew"), timeout=100)
        first, second = run_ranks(part_ways, 2, str(tmp_path / "apart"), timeout=100)
        assert skew.result() == [[], []]

    def said(case: str, rule: str, ranks: Any = (first, second)) -> list[list[tuple[str, int]]]:
        return [[(fqn, step) for name, _, fqn, step, _ in found[case] if name == rule] for found in ranks]

    # Both name the step and their own module; the message has both.
    assert said("skipped_tower", "rank-order") == [[("visual", 1)], [("layers.0", 1)]]
    message = first["skipped_tower"][0][4]
    assert message.startswith("rank 0 issued the all-gather of visual where rank 1 issued the all-gather of layers.0 (")
    assert message == second["skipped_tower"][0][4]
    # Rank 1 runs one more forward: after the first one's end rank 0 is in its second, and then in its backward.
    assert said("another_pass", "rank-order") == [[("aux", 1)], [("visual", 1)]]
    assert "rank 1 issued the all-gather of visual" in first["another_pass"][0][4]
    # Without aux in the loss, rank 1's backward begins with layers.1.
    assert said("branch_of_the_loss", "rank-order") == [[("aux", 1)], [("layers.1", 1)]]
    # Rank 1 holds the gradients of its first micro-batch back, and goes on: layers.1 was gathered ahead, next is layers.0.
    assert said("more_micro_batches", "rank-order") == [[("aux", 1)], [("layers.0", 1)]]
    assert first["more_micro_batches"][0][4].startswith(
        "rank 0 issued the reduce-scatter of aux where rank 1 issued the all-gather"
    )
    # It gives its batch up where rank 0 goes on to aux, and begins another one.
    assert said("exception_caught", "rank-order") == [[("aux", 1)], [("visual", 1)]]
    assert first["exception_caught"][0][4].startswith(
        "rank 0 issued the all-gather of aux where rank 1 issued the all-gather of vis"
    )
    # Nobody left the order: one is late, or does not come.
    for case, where in (("asleep", "test_ranks_apart.py"), ("exception", "after ZeroDivisionError")):
        assert said(case, "rank-order") == [[], []]
        assert said(case, "rank-stall", (second,)) == [[]]  # the lowest rank speaks
        (stall,) = [message for name, severity, *_, message in first[case] if name == "rank-stall" and severity == "error"]
        assert "no rank has moved for 1 s in process group" in stall
        assert "rank 0 in the all-gather of" in stall
        assert where in stall.partition("rank 1 ")[2]
    assert first["some_skew"] == second["some_skew"] == []

    # The same from the files.
    dead = postmortem(tmp_path / "apart")
    assert [standing.end for standing in dead.ranks] == ["ended in order", "ended in order"]
    names = {(a["item"][2], b["item"][2]) for a, b in (entry["sides"] for entry in dead.to_json()["parted"])}
    assert names == {("visual", "layers.0"), ("aux", "visual"), ("aux", "layers.1")}
    result = check(tmp_path / "apart")
    assert {finding.rule for finding in result.findings if finding.severity == "error"} >= {"rank-order", "rank-stall"}


# -- parameters, four ranks, a rank that is killed ---------------------------------------------------------------------
def experts(mesh: Any, fill: bool) -> nn.Module:
    """One unit whose ranks use different experts of it."""
    first, second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    model = Calls(lambda self, x, pick: (self.second if pick else self.first)(x), first=first, second=second)
    fully_shard(model, mesh=mesh)
    if fill:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return model


def four(rank: int, out: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (4,))
    found = []
    for fill in (True, False):
        model = experts(mesh, fill)
        with fsdptrace.record(model, out=out, run_id="r", on_violation="record") as rec:
            for _ in range(3):
                model(torch.randn(2, DIM), rank == 2).sum().backward()
            time.sleep(1.5)
            found.append([(v.rule, v.fqn, v.step, v.message) for v in rec.violations if v.rule == "rank-order"])
    model = sharded_chain(mesh, 3)
    with fsdptrace.record(model, out=out, run_id="r") as rec:
        train(model)
        rec.step()
        if rank == 3:
            model[1].register_forward_pre_hook(lambda module, args: (rec.flush(), os.kill(os.getpid(), signal.SIGKILL)))
        with pytest.raises(RuntimeError):
            train(model)
    rec.close()
    return found


@since(2, 13, "set_reduce_scatter_unused_params is new in it")
def test_four_ranks(tmp_path: Path) -> None:
    results = run_to_the_end(four, 4, str(tmp_path), timeout=100)
    assert [code for code, _ in results] == [0, 0, 0, -signal.SIGKILL]
    healthy, faulty = zip(*[found for _, found in results[:3]], strict=True)
    assert healthy == ([], [], [])
    ((rule, fqn, step, message),) = faulty[0]
    assert (rule, fqn, step) == ("rank-order", "", 0)
    assert message.startswith(
        "ranks 0-1, 3 issued the reduce-scatter of (root) with gradients of first.weight, first.bias where "
        "rank 2 issued the reduce-scatter of (root) with gradients of second.weight, second.bias ("
    )
    assert faulty[1] == []  # one rank of each side is named, and records it
    assert faulty[2] == [("rank-order", "", 0, message)]
    # Rank 3 was killed in the second layer's forward: the others failed in what they needed it for.
    (killed,) = tmp_path.glob("r/rank00003.*.jsonl")
    os.utime(killed, (time.time() - 60,) * 2)  # a minute ago
    dead = postmortem(tmp_path)
    ends = {standing.rank: standing.end for standing in dead.ranks}
    assert ends[3] == "ended by SIGKILL, abort() or without a word"
    assert {ends[rank] for rank in (0, 1, 2)} == {"ended after RuntimeError"}
    last = next(standing for standing in dead.ranks if standing.rank == 3)
    assert (last.place, last.step) == ("in the forward of 1", 1)
    assert {standing.place for standing in dead.ranks if standing.rank != 3} <= {
        "in the all-gather of 2", "in the all-gather of 1", "in the all-gather of 0", "in the reduce-scatter of 2",
    }  # fmt: skip
    assert [violation.fqn for violation in dead.parted] == [""]
    (rank_3,) = [entry for entry in dead.holding if entry[1] == 3]
    # The second layer is gathered: 8 x 8 weights and 8 biases, 288 bytes.
    assert rank_3[0] == 288
    assert rank_3[2] == [("1", 288)]
