"""Units other than one module with one group: grouped, several groups, frozen, offloaded, unwrapped roots, two models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from support.models import Block, Calls, chain, sharded_chain, train
from support.show import trace, tree
from support.torches import RELEASE, since

GROUPED = since(2, 13, "a grouped unit's pre-forward runs for each of its modules")
PER_MESH = since(2, 13, "one module can have param groups on several meshes")


def two_in_one(mesh: Any, run: Any) -> nn.Module:
    """A root with the grouped unit (a, b); ``run(self, x)`` is its forward. 2 x 288 bytes over 4 ranks."""
    model = Calls(run, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    fully_shard([model.a, model.b], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@GROUPED
def test_grouped_unit(fake_pg: Any, record: Any) -> None:
    model = two_in_one(fake_pg(4), lambda self, x: self.b(self.a(x)))
    with record(model) as rec:
        train(model)
    # One gather for both modules; the second one's pre-forward finds it open. The post-forward comes after the last.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward a input=none
                unshard a 576
                wait a 576
            pre_forward a input=unknown forward->forward
                unshard a 0 open
            post_forward a
                reshard a 576
        backward
            pre_backward a
                unshard a 576
                wait a 576
            post_backward a tensors=4 final_callback
                reshard a 576
                reduce_scatter a 576 avg tensors=4
    """)
    info = rec.model_map().groups[0]
    assert (info.fqn, info.modules) == ("a", ("a", "b"))
    assert [param.name for param in info.params] == ["a.weight", "a.bias", "b.weight", "b.bias"]


@GROUPED
def test_grouped_unit_of_which_one_module_runs(fake_pg: Any, record: Any) -> None:
    model = two_in_one(fake_pg(4), lambda self, x: self.a(x))
    with record(model) as rec:
        train(model)
    # The root's post-forward completes the group. Only a's two parameters have gradients: 288 bytes are reduced.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward a input=none
                unshard a 576
                wait a 576
            post_forward a
                reshard a 576
        backward
            pre_backward a
                unshard a 576
                wait a 576
            post_backward a tensors=2 final_callback
                reshard a 576
                reduce_scatter a 288 avg tensors=2
    """)


@GROUPED
def test_grouped_unit_whose_head_runs_apart(fake_pg: Any, record: Any) -> None:
    # Chunked loss: the model's forward runs a; b is called on two chunks afterwards.
    model = two_in_one(fake_pg(4), lambda self, x: self.a(x))
    x = torch.randn(4, 8)
    with record(model) as rec:
        hidden = model(x)
        for chunk in hidden.detach().requires_grad_().chunk(2):
            model.b(chunk).sum().backward()
        hidden.sum().backward()
    step = rec.steps[0]
    # Three outermost forwards and three backwards: a step takes what is in it until somebody steps.
    assert step.counts["forward"] == 3
    assert step.counts["backward"] == 3
    scatters = [(event["bytes"], event["tensors"]) for event in step if event.kind == "reduce_scatter"]
    assert scatters == [(288, 2)] * 3
    assert step.events[-1]["unsharded_bytes"] == 0


@PER_MESH
def test_several_groups_in_one_module(fake_pg: Any, record: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = fake_pg(4)
    small = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"], shard_mesh_dim=0)
    model = chain(2)

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), small) if param.ndim == 1 else None

    for layer in model:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model)
    # Weights over 4 ranks: 64 x 4 = 256 bytes. Biases over 2: 8 x 4 = 32. Forward in order, backward reversed; the group
    # of index 1 prefetches all groups of the module before, the others none.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 256
                wait 0 256
            pre_forward 0#1 input=none
                unshard 0#1 32
                wait 0#1 32
            post_forward 0
                reshard 0 256
            post_forward 0#1
                reshard 0#1 32
            pre_forward 1 input=hooked
                unshard 1 256
                wait 1 256
            pre_forward 1#1 input=hooked
                unshard 1#1 32
                wait 1#1 32
            post_forward 1
                reshard 1 256
            post_forward 1#1
                reshard 1#1 32
        backward
            pre_backward 1
                unshard 1 256
                wait 1 256
            pre_backward 1#1
                unshard 1#1 32
                wait 1#1 32
                prefetch 1#1 > 0#1 backward implicit
                    unshard 0#1 32 by 1#1 backward implicit
                prefetch 1#1 > 0 backward implicit
                    unshard 0 256 by 1#1 backward implicit
            post_backward 1#1 tensors=1 autograd
                reshard 1#1 32
                reduce_scatter 1#1 32 avg tensors=1
            post_backward 1 tensors=1 autograd
                reshard 1 256
                reduce_scatter 1 256 avg tensors=1
            pre_backward 0
                unshard 0 0 pending
                wait 0 256
            pre_backward 0#1
                unshard 0#1 0 pending
                wait 0#1 32
            post_backward 0#1 tensors=1 final_callback
                reshard 0#1 32
                reduce_scatter 0#1 32 avg tensors=1
            post_backward 0 tensors=1 final_callback
                reshard 0 256
                reduce_scatter 0 256 avg tensors=1
    """)
    assert [(group.fqn, group.world, group.unit) for group in rec.model_map()] == [
        ("0", 4, 1), ("0#1", 2, 1), ("1", 4, 2), ("1#1", 2, 2),
    ]  # fmt: skip
    assert rec.model_map().units[1].groups == (0, 1)


def test_frozen_groups(fake_pg: Any, record: Any) -> None:
    model = chain(3)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    mesh = fake_pg(4)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model)
    # Layer 2 takes part in the backward but has nothing to reduce. Layer 0 takes no part: nobody hooks its output, its
    # post-backward is a formality, and the gather that layer 1 ordered for it is thrown away.
    # A group is finalised after its post-backward; since 2.15 all are after the last one (_fsdp_state.py there,
    # wait_for_gradient_reduction). Before 2.7 the formality is for groups that are open alone.
    formality = "" if RELEASE >= (2, 7) else "#"
    early, late = ("#", "") if RELEASE >= (2, 15) else ("", "#")
    trace(rec.steps[0]).reads(f"""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
            pre_forward 1 input=none
                unshard 1 288
                wait 1 288
            post_forward 1
                reshard 1 288
            pre_forward 2 input=hooked
                unshard 2 288
                wait 2 288
            post_forward 2
                reshard 2 288
        backward
            pre_backward 2
                unshard 2 288
                wait 2 288
                prefetch 2 > 1 backward implicit
                    unshard 1 288 by 2 backward implicit
            post_backward 2 tensors=0 autograd
                reshard 2 288
            pre_backward 1
                unshard 1 0 pending
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 288 by 1 backward implicit
            {formality}post_backward 0 tensors=0 final_callback idle->post_backward
            {early}discard 0 288
            post_backward 1 tensors=2 final_callback
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            {late}discard 0 288
    """)
    assert [group.trainable for group in rec.model_map()] == [0, 2, 0]


def test_unused_parameter_is_not_counted(fake_pg: Any, record: Any) -> None:
    # Only `up` runs: 2 of 4 parameters have a gradient, and 288 of 576 bytes are reduced.
    model = Calls(lambda self, x: self.block.up(x), block=Block())
    mesh = fake_pg(4)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model)
    (scatter,) = [event for event in rec.steps[0] if event.kind == "reduce_scatter"]
    assert (scatter["bytes"], scatter["tensors"]) == (288, 2)


def test_cpu_offload(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        train(model, optimizer)
    counts = rec.steps[0].counts
    # 2 layers: gathered in forward and backward, the second backward gather is asked for twice (prefetch, then no-op).
    assert (counts["unshard"], counts["wait"], counts["reshard"], counts["reduce_scatter"]) == (5, 4, 4, 2)
    assert {event["bytes"] for event in rec.steps[0] if event.kind in ("wait", "reshard", "reduce_scatter")} == {288}
    assert all(group.offload for group in rec.model_map())


@since(2, 9, "set_custom_all_gather is new in it")
def test_custom_all_gather(fake_pg: Any, record: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class Mine(AllGather):
        calls = 0

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            Mine.calls += 1
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model = sharded_chain(fake_pg(4), 1)
    model[0].set_custom_all_gather(Mine())
    with record(model) as rec:
        train(model)
    gathers = [event for event in rec.steps[0] if event.kind == "unshard" and not event.get("noop")]
    assert Mine.calls == len(gathers) == 2
    assert [(event["bytes"], event["wire_bytes"]) for event in gathers] == [(288, 216)] * 2
    assert type(model[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm) is Mine


def test_root_that_is_not_wrapped(fake_pg: Any, record: Any) -> None:
    model = chain(2)
    mesh = fake_pg(4)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    with record(model) as rec:
        train(model)
    # Every layer is a root of its own: it stays open after its forward, has its own order list (so no prefetch) and its
    # own final callback. It is one forward and one backward all the same.
    trace(rec.steps[0], drop=("state", "step", "flag")).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
            pre_forward 1 input=hooked
                unshard 1 288
                wait 1 288
            post_forward 1
        backward
            pre_backward 1
                unshard 1 0 open
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            pre_backward 0
                unshard 0 0 open
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
    """)
    units = rec.model_map().units
    assert [(unit.fqn, unit.sharded, unit.groups) for unit in units] == [("", False, ()), ("0", True, (0,)), ("1", True, (1,))]


def test_parameters_outside_every_group_are_named(fake_pg: Any, record: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = fake_pg(4)
    fully_shard(model[0], mesh=mesh)
    with record(model) as rec:
        train(model)
    assert rec.model_map().uncovered == ("1.weight", "1.bias")


def test_two_models_at_once(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)
    one, two = sharded_chain(mesh, 1), sharded_chain(mesh, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with record([one, two]) as rec:
        two(one(torch.randn(4, 8))).sum().backward()
        optimizer.step()
    first, second = sorted(rec.steps, key=lambda step: step.map.model)
    assert (first.map.model, second.map.model) == (0, 1)
    assert {event.model for event in first} == {0}
    assert {event.model for event in second} == {1}
    # One optimizer holds both: its step is an event of each model, with the other's parameters as foreign.
    assert "optimizer_step SGD#1 tensors=2 groups=1 foreign=4" in tree(first, first.map)
    assert "optimizer_step SGD#1 tensors=4 groups=2 foreign=2" in tree(second, second.map)
    for step, layers in ((first, 1), (second, 2)):
        assert step.counts["forward"] == step.counts["backward"] == step.counts["step"] == 1
        assert step.counts["reduce_scatter"] == layers
        assert step.events[-1]["unsharded_bytes"] == 0


def test_names_leave_wrappers_out(fake_pg: Any, record: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = fake_pg(4)
    model = nn.ModuleDict({"blocks": nn.Sequential(checkpoint_wrapper(Block()), torch.compile(Block(), backend="eager"))})
    for block in model["blocks"]:
        fully_shard(block, mesh=mesh)
    fully_shard(model["blocks"], mesh=mesh)
    with record(model) as rec:
        pass
    assert [group.fqn for group in rec.model_map()] == ["blocks.0", "blocks.1"]
    assert rec.model_map().groups[0].params[0].name == "blocks.0.up.weight"
    assert rec.model_map().groups[1].params[0].name == "blocks.1.up.weight"
    assert rec.model_map().root == "ModuleDict"


def test_a_model_without_units_is_refused(fake_pg: Any, record: Any) -> None:
    fake_pg(4)
    with pytest.raises(ValueError, match="no module of it was wrapped by fully_shard"), record(nn.Linear(8, 8)):
        pass
    with pytest.raises(TypeError, match="a module or several are needed"):
        record(["layer"])
