"""For each rule, ways to break it that no public report describes, and legal programs that look like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

import fsdptrace
from gallery.models import DIM, checkpointed_layers, data, layers, linear, sgd, shard, steps
from gallery.verdict import verdict
from support.models import Block, Calls
from support.torches import RECOMPUTE, RELEASE, RESET, since


def on_output(module: nn.Module, call: Any) -> Any:
    """``call()`` in the backward, when the gradient of ``module``'s output is there (before its own pre-backward or after)."""
    return module.register_forward_hook(lambda m, args, out: out.register_hook(lambda grad: (call(), None)[1]) and None)


def step(model: nn.Module, optimizer: Any = None) -> None:
    model(data()).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# -- gather-after-backward ---------------------------------------------------------------------------------------------
class TestGatherAfterBackward:
    def test_a_list_that_points_the_wrong_way(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 4)
        for one, following in zip(model, list(model)[1:], strict=False):
            one.set_modules_to_backward_prefetch([following])
        with watch(model) as rec:
            steps(model, 1)
        # Layer 2's backward prefetches layer 3, layer 1's layer 2, layer 0's layer 1: each just done. Layer 3 has no list.
        found = verdict(rec)
        found.reads("""
            0 error gather-after-backward 3 256
            0 error gather-after-backward 2 256
            0 error gather-after-backward 1 256
        """)
        v = found.violations[0]
        over, gathered = v.evidence
        assert v.message == (
            f"The explicit backward prefetch of 2 gathered 3 (256 B) at event {gathered}, after its backward was over (event "
            f"{over}). Nobody will use it before the parameters change; it stays until this backward ends."
        )
        assert v.hint.startswith("Correct the list of 2.set_modules_to_backward_prefetch(...): it names 3")

    def test_opened_by_hand_in_the_backward(self, fake_pg: Any, watch: Any) -> None:
        # A hook that fetches the wrong neighbour: when layer 0's gradient arrives layer 1 is over.
        model = layers(fake_pg(2))
        on_output(model[0], lambda: model[1].unshard(async_op=True))
        with watch(model) as rec:
            steps(model, 1)
        found = verdict(rec)
        found.reads("0 error gather-after-backward 1 256")
        assert found.only().message.startswith("A call of unshard() gathered 1 (256 B)")
        assert "Take the call of unshard() on 1 out of the backward" in found.only().hint

    @RECOMPUTE
    def test_a_forward_list_repeated_by_a_region_over_several(self, fake_pg: Any, watch: Any) -> None:
        # Reentrant checkpointing of two layers at a time; the second of a pair names the first of the next.
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for pair in self.pairs:
                x = checkpoint(pair, x, use_reentrant=True)
            return x

        pairs = nn.ModuleList([nn.Sequential(linear(), linear()) for _ in range(2)])
        model = Calls(run, inp=linear(), pairs=pairs)
        shard(model, [model.inp, *pairs[0], *pairs[1]], fake_pg(2))
        pairs[0][1].set_modules_to_forward_prefetch([pairs[1][0]])
        with watch(model) as rec:
            steps(model, 1)
        found = verdict(rec)
        found.reads("0 error gather-after-backward pairs.1.0 256")
        assert found.only().message.startswith("The explicit forward prefetch of pairs.0.1 gathered pairs.1.0")

    def test_raises_at_the_gather(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        model[0].set_modules_to_backward_prefetch([model[1]])
        with (
            pytest.raises(fsdptrace.InvariantViolation, match="gather-after-backward") as caught,
            watch(model, on_violation="raise") as rec,
        ):
            steps(model, 1)
        assert caught.value.violation == rec.violations[0]
        assert rec.violations[0].fqn == "1"

    def test_silent_for_a_unit_whose_second_use_is_to_come(self, fake_pg: Any, watch: Any) -> None:
        # a b a c: c's backward gathers a for its second use, a's gathers b, b's gathers a once more: all used.
        model = Calls(lambda self, x: self.c(self.a(self.b(self.a(x)))), a=linear(), b=linear(), c=linear())
        shard(model, [model.a, model.b, model.c], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    def test_silent_for_a_gather_by_hand_before_the_use(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 4)
        on_output(model[3], lambda: model[0].unshard(async_op=True))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    def test_silent_for_an_unsharded_forward_inside_a_backward(self, fake_pg: Any, watch: Any) -> None:
        # One model's forward and backward inside the other's backward, as overlapped schedules do.
        mesh = fake_pg(2)
        outer, inner = layers(mesh, 2), layers(mesh, 2)
        optimizers = [sgd(outer), sgd(inner)]
        on_output(outer[0], lambda: inner(data()))
        with watch([outer, inner], on_violation="raise") as rec:
            outer(data()).sum().backward()
            for unit in inner:
                unit.reshard()
            for optimizer in optimizers:
                optimizer.step()
        verdict(rec).silent()


# -- unpaired-unshard --------------------------------------------------------------------------------------------------
class TestUnpairedUnshard:
    def test_the_switch_set_back_too_late(self, fake_pg: Any, watch: Any) -> None:
        # Back on after the last backward instead of before it: nothing frees the units any more.
        model = layers(fake_pg(2), 2)
        optimizer = sgd(model)
        with watch(model) as rec:
            model.set_reshard_after_backward(False)
            model(data()).sum().backward()
            model.set_reshard_after_backward(True)
            optimizer.step()
        verdict(rec).reads("""
            0 error unpaired-unshard 0 256
            0 error unpaired-unshard 1 256
        """)

    @RECOMPUTE
    def test_a_forward_inside_another_models_backward(self, fake_pg: Any, watch: Any) -> None:
        # Since torch 2.10 a forward inside a backward does not free its units, and no final callback of theirs comes.
        mesh = fake_pg(2)
        outer, inner = layers(mesh, 2), layers(mesh, 2)
        optimizers = [sgd(outer), sgd(inner)]
        on_output(outer[0], lambda: inner(data()))
        with watch([outer, inner]) as rec:
            outer(data()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        found = verdict(rec)
        found.reads("""
            0 error unpaired-unshard 0@1 256
            0 error unpaired-unshard 1@1 256
        """)
        assert "as a forward inside a backward does" in found.violations[0].message

    @since(2, 11, "older ones do not gather it there, and fail")
    def test_a_forward_of_a_unit_that_is_done(self, fake_pg: Any, watch: Any) -> None:
        # A look at layer 2 in the backward, after its own: its hook gathers it and leaves it to a post-backward that was.
        model = layers(fake_pg(2), 3)

        def peek() -> None:
            with torch.no_grad():
                model[2](data())

        on_output(model[0], peek)
        with watch(model) as rec:
            steps(model, 2)
        verdict(rec).reads("""
            0 error unpaired-unshard 2 256
            1 error stale-weights 2 256
            1 error unpaired-unshard 2 256
        """)

    @since(2, 11, "older ones do not gather it there, and fail")
    @pytest.mark.parametrize("how", ["a unit used twice", "two forwards"])
    def test_reentrant_recomputation_of_a_unit_that_is_done(self, fake_pg: Any, watch: Any, how: str) -> None:
        # FSDPState stays in PRE_BACKWARD after the unit's first reentrant backward: the second recomputation returns early,
        # gathers the unit and hooks nothing. Nobody frees it, nor reduces the gradients of that use. (torch 2.11 to 2.13;
        # the next step computes with the old copy, which a world of one shows.)
        mesh = fake_pg(1)

        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2 if how == "a unit used twice" else 1):
                x = checkpoint(self.cell, x, use_reentrant=True)
            return self.out(x)

        model = Calls(run, cell=linear(), out=linear())
        shard(model, [model.cell, model.out], mesh)

        def loss() -> torch.Tensor:
            out = model(data(grad=True))
            return (out if how == "a unit used twice" else out * model(data(grad=True))).square().mean()

        with watch(model) as rec:
            steps(model, 2, loss)
        found = verdict(rec)
        found.reads("""
            0 error unpaired-unshard cell 256
            0 error missing-reduction cell 0
            1 error stale-weights cell 256
            1 error unpaired-unshard cell 256
            1 error missing-reduction cell 0
        """)
        assert "they lie on the gathered copy" in found.of("missing-reduction")[0].message
        (param,) = _groups(model.cell)[0].fsdp_params
        assert not torch.equal(param._unsharded_param.detach(), param.sharded_param.to_local())

    def test_opened_by_hand_with_no_optimizer(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model) as rec:
            step(model)
            model[1].unshard()
            rec.step()
        found = verdict(rec)
        found.reads("0 error unpaired-unshard 1 256")
        assert "at the end of the step" in found.only().message

    def test_raises_at_the_optimizers_step(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with (
            pytest.raises(fsdptrace.InvariantViolation, match="unpaired-unshard: 0 was still open when the optimizer stepped"),
            watch(model, on_violation="raise"),
        ):
            steps(model, 1, before_step=lambda: model[0].unshard())

    def test_silent_for_another_models_optimizer(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        one, two = layers(mesh, 2, reshard_after_forward=False), layers(mesh, 2)
        one_opt, two_opt = sgd(one), sgd(two)
        with watch([one, two], on_violation="raise") as rec:
            for _ in range(2):
                out = one(data())
                step(two, two_opt)
                out.sum().backward()
                one_opt.step()
        verdict(rec).reads("")

    def test_silent_for_a_frozen_unit_kept_open(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        model = nn.Sequential(linear(), linear(), linear())
        model[1].requires_grad_(False)
        shard(model, list(model), mesh, reshard_after_forward=False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                step(model)
                model[1].unshard()
                optimizer.step()
        verdict(rec).silent()

    def test_silent_for_a_pair_by_hand(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)

        def export() -> None:
            for layer in model:
                layer.unshard()
                layer.reshard()

        with watch(model, on_violation="raise") as rec:
            steps(model, 2, before_step=export)
        verdict(rec).reads("")


# -- pending-gather ----------------------------------------------------------------------------------------------------
class TestPendingGather:
    def test_gathered_ahead_of_the_optimizers_step(self, fake_pg: Any, watch: Any) -> None:
        # "Overlap" of the next forward's first gather with the optimizer: it gathers what the optimizer is about to change.
        model = layers(fake_pg(2), 2)
        with watch(model) as rec:
            steps(model, 2, before_step=lambda: model[0].unshard(async_op=True))
        found = verdict(rec)
        found.reads("""
            0 error pending-gather 0 256
            1 error pending-gather 0 256
        """)
        assert "a call of unshard(async_op=True) issued it" in found.violations[0].message
        assert "0.unshard(); 0.reshard()" in found.violations[0].hint

    def test_layers_left_out_of_an_evaluation(self, fake_pg: Any, watch: Any) -> None:
        # Early exit: the eval pass stops after layer 0, whose list names both others.
        def run(self: Any, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
            x = self.layers[0](x)
            return self.layers[2](self.layers[1](x)) if deep else x

        model = Calls(run, layers=nn.ModuleList([linear() for _ in range(3)]))
        shard(model, list(model.layers), fake_pg(2))
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])

        def early_exit() -> None:
            with torch.no_grad():
                model(data(), deep=False)

        with watch(model) as rec:
            steps(model, 1, before_step=early_exit)
        found = verdict(rec)
        found.reads("""
            0 error pending-gather layers.1 256
            0 error pending-gather layers.2 256
        """)
        for v in found.violations:
            assert "layers.0.set_modules_to_forward_prefetch(...)" in v.hint

    def test_silent_when_gathered_after_the_step(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for _ in range(3):
                step(model, optimizer)
                model[0].unshard(async_op=True)
        verdict(rec).reads("")

    def test_silent_when_used_before_the_step(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        model[0].set_modules_to_forward_prefetch([model[1]])
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            step(model, optimizer)
            with torch.no_grad():
                model[0](data())  # layer 1 is gathered ahead and stays pending,
            step(model, optimizer)  # until this forward uses it
        verdict(rec).silent()

    def test_silent_for_a_frozen_unit(self, fake_pg: Any, watch: Any) -> None:
        model = nn.Sequential(linear(), linear())
        model[0].requires_grad_(False)
        shard(model, list(model), fake_pg(2))
        optimizer = sgd(model[1])
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                step(model)
                model[0].unshard(async_op=True)
                optimizer.step()
        verdict(rec).silent()


# -- unused-gather -----------------------------------------------------------------------------------------------------
class TestUnusedGather:
    def test_a_forward_list_with_a_unit_that_does_not_run(self, fake_pg: Any, watch: Any) -> None:
        model = Calls(lambda self, x: self.used(x), used=linear(), spare=linear())
        shard(model, [model.used, model.spare], fake_pg(2))
        model.used.set_modules_to_forward_prefetch([model.spare])
        with watch(model) as rec:
            steps(model, 2)
        found = verdict(rec)
        found.reads("""
            0 warning unused-gather spare 256
            1 warning unused-gather spare 256
        """)
        assert "the explicit forward prefetch of used" in found.violations[0].message
        assert found.violations[0].hint.startswith("Take spare off the list of used.set_modules_to_forward_prefetch(...)")

    def test_a_detached_branch(self, fake_pg: Any, watch: Any) -> None:
        # Only the probe trains here: what its backward prefetches, the trunk's last layer, has none.
        model = Calls(lambda self, x: self.probe(self.b(self.a(x)).detach()), a=linear(), b=linear(), probe=linear())
        shard(model, [model.a, model.b, model.probe], fake_pg(2))
        with watch(model) as rec:
            steps(model, 2)
        found = verdict(rec)
        found.reads("""
            0 warning unused-gather b 256
            1 warning unused-gather b 256
        """)
        assert "the implicit backward prefetch of probe" in found.violations[0].message
        assert "probe.set_modules_to_backward_prefetch([probe])" in found.violations[0].hint

    def test_a_gradient_of_a_tensor_in_the_middle(self, fake_pg: Any, watch: Any) -> None:
        # autograd.grad with respect to layer 1's output stops there. The hook on that tensor has run, though: layer 1 was
        # gathered (used, so to speak), and it has gathered layer 0, for which nothing comes.
        model = layers(fake_pg(2), 4)
        kept: list[torch.Tensor] = []
        model[1].register_forward_hook(lambda m, args, out: kept.append(out))
        with watch(model) as rec:
            torch.autograd.grad(model(data()).sum(), kept)
            rec.step()
        found = verdict(rec)
        found.reads("0 warning unused-gather 0 256")

    def test_silent_when_everything_has_a_backward(self, fake_pg: Any, watch: Any) -> None:
        model = Calls(lambda self, x: self.b(self.a(x)) + self.c(self.a(x)), a=linear(), b=linear(), c=linear())
        shard(model, [model.a, model.b, model.c], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    def test_silent_for_what_is_opened_and_closed_by_hand(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model, on_violation="raise") as rec:
            steps(model, 1)
            model[0].unshard()
            model[0].reshard()
            model[1].unshard(async_op=True).wait()
            model[1].reshard()
        verdict(rec).reads("")

    def test_silent_for_a_frozen_unit_in_front(self, fake_pg: Any, watch: Any) -> None:
        # The first trainable unit prefetches its neighbour, which is frozen: legal, and said as info.
        model = nn.Sequential(linear(), linear(), linear())
        model[0].requires_grad_(False)
        shard(model, list(model), fake_pg(2))
        optimizer = sgd(nn.ModuleList([model[1], model[2]]))
        with watch(model, on_violation="raise") as rec:
            step(model, optimizer)
        verdict(rec).reads("0 info unused-gather 0 256")


# -- repeated-gather ---------------------------------------------------------------------------------------------------
class TestRepeatedGather:
    def test_a_unit_called_for_each_view(self, fake_pg: Any, watch: Any) -> None:
        # Contrastive: after the model, its encoder by itself for three more views, one backward for all. Three forwards
        # gather it three times; the three backwards come in a row as well, on one gather, since the views are raw inputs.
        model = Calls(lambda self, x: self.head(self.enc(x)), enc=linear(), head=linear())
        shard(model, [model.enc, model.head], fake_pg(2))

        def loss() -> torch.Tensor:
            out = model(data()).mean()
            views = [model.enc(data()) for _ in range(3)]
            return out + (views[0] * views[1] * views[2]).mean()

        with watch(model) as rec:
            steps(model, 1, loss)
        found = verdict(rec)
        found.reads("0 warning repeated-gather enc 768")
        assert "gathered 4 times in 3 calls" in found.only().message

    def test_a_head_called_per_position(self, fake_pg: Any, watch: Any) -> None:
        # Scoring without grad: the trunk once, then the head once per position. 6 gathers, 5 of them for nothing: 5 * 256.
        model = Calls(lambda self, x: self.trunk(x), trunk=linear(), head=linear())
        shard(model, [model.trunk, model.head], fake_pg(2))
        with watch(model) as rec, torch.no_grad():
            hidden = model(data(6))
            for row in hidden:
                model.head(row)
        found = verdict(rec)
        found.reads("0 warning repeated-gather head 1280")
        assert "gathered 6 times in 6 calls" in found.only().message

    def test_silent_for_micro_batches_of_the_model(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model, on_violation="raise") as rec:
            steps(model, 2, before_step=lambda: [step(model) for _ in range(4)])
        verdict(rec).reads("")

    def test_silent_for_a_unit_that_loops_inside_the_forward(self, fake_pg: Any, watch: Any) -> None:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.cell(x)
            return self.out(x)

        model = Calls(run, cell=linear(), out=linear())
        shard(model, [model.cell, model.out], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    @since(2, 8, "set_reshard_after_forward is new in it")
    def test_silent_for_a_head_kept_open(self, fake_pg: Any, watch: Any) -> None:
        model = Calls(lambda self, x: self.trunk(x), trunk=linear(), head=linear())
        shard(model, [model.trunk, model.head], fake_pg(2))
        with watch(model, on_violation="raise") as rec, torch.no_grad():
            model.head.set_reshard_after_forward(False)
            hidden = model(data(6))
            for row in hidden:
                model.head(row)
            model.head.reshard()
        verdict(rec).reads("")


# -- late-reshard ------------------------------------------------------------------------------------------------------
class Batch:
    """An object that FSDP2 does not look into."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class TestLateReshard:
    def test_tensors_hidden_in_objects(self, fake_pg: Any, watch: Any) -> None:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(Batch(x))
            return x

        units = [Calls(lambda self, batch: self.a(batch.h), a=linear()) for _ in range(3)]
        model = Calls(run, layers=nn.ModuleList(units))
        shard(model, list(model.layers), fake_pg(2))
        with watch(model) as rec:
            steps(model, 2)
        # The first layer's tensor needs no grad; those of the other two do, and are not hooked: 2 * 256 bytes.
        found = verdict(rec)
        found.reads("""
            0 warning late-reshard layers.1 512
            1 warning late-reshard layers.1 512
        """)
        assert "2 units (layers.1, layers.2) stayed open together" in found.violations[0].message
        assert "as arguments, or in a tuple, list" in found.violations[0].hint

    def test_a_set_of_tensors(self, fake_pg: Any, watch: Any) -> None:
        model = Calls(
            lambda self, x: self.last({self.first(x)}), first=linear(), last=Calls(lambda self, s: self.a(*s), a=linear())
        )  # fmt: skip
        shard(model, [model.first, model.last], fake_pg(2))
        with watch(model) as rec:
            steps(model, 1)
        verdict(rec).reads("0 warning late-reshard last 256")

    def test_towers_with_raw_inputs(self, fake_pg: Any, watch: Any) -> None:
        # Two encoders that each begin with raw pixels or samples: both stay open until the whole backward ends.
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.join(self.image(x) + self.sound(2 * x))

        model = Calls(run, image=linear(), sound=linear(), join=linear())
        shard(model, [model.image, model.sound, model.join], fake_pg(2))
        with watch(model) as rec:
            steps(model, 1)
        found = verdict(rec)
        found.reads("0 warning late-reshard image 512")
        assert "2 units (image, sound) stayed open together" in found.only().message
        assert "requires_grad_()" in found.only().hint

    def test_silent_for_towers_whose_inputs_need_grad(self, fake_pg: Any, watch: Any) -> None:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.join(self.image(x.clone().requires_grad_()) + self.sound((2 * x).requires_grad_()))

        model = Calls(run, image=linear(), sound=linear(), join=linear())
        shard(model, [model.image, model.sound, model.join], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    def test_silent_for_embeddings_and_one_raw_input(self, fake_pg: Any, watch: Any) -> None:
        def run(self: Any, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.join(self.words(ids) + self.places(ids) + self.image(x))

        model = Calls(
            run, words=nn.Embedding(20, DIM), places=nn.Embedding(20, DIM), image=linear(), join=linear()
        )  # fmt: skip
        shard(model, [model.words, model.places, model.image, model.join], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2, lambda: model(torch.randint(0, 20, (4,)), data()).square().mean())
        verdict(rec).reads("")

    def test_silent_for_a_frozen_prefix(self, fake_pg: Any, watch: Any) -> None:
        model = nn.Sequential(*[linear() for _ in range(4)])
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        shard(model, list(model), fake_pg(2))
        optimizer = sgd(nn.ModuleList([model[2], model[3]]))
        with watch(model, on_violation="raise") as rec:
            step(model, optimizer)
        verdict(rec).silent()


# -- unsharded-budget --------------------------------------------------------------------------------------------------
class TestUnshardedBudget:
    def test_a_prefetch_exceeds_it(self, fake_pg: Any, watch: Any) -> None:
        # In the backward layer 2's hook gathers layer 1 beside it: 512 bytes. The forward holds one layer at a time.
        model = layers(fake_pg(2))
        with watch(model, budget_bytes=511) as rec:
            steps(model, 1)
        # Said once per unit in a step: layer 1 beside 2, then layer 0 beside 1.
        found = verdict(rec)
        found.reads("""
            0 error unsharded-budget 1 512
            0 error unsharded-budget 0 512
        """)
        assert "Open or pending: 1 256 B, 2 256 B" in found.violations[0].message

    def test_kept_open_after_forward(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), reshard_after_forward=False)
        with watch(model, budget_bytes=700) as rec, torch.no_grad():
            model(data())
            model.reshard()
            for layer in model:
                layer.reshard()
        found = verdict(rec)
        found.reads("0 error unsharded-budget 2 768")
        assert "unshard of 2" in found.only().message

    def test_silent_at_the_budget(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2))
        with watch(model, budget_bytes=512, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    def test_silent_without_one(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), reshard_after_forward=False)
        with watch(model, checks="all", on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")


# -- policy-ignored ----------------------------------------------------------------------------------------------------
class TestPolicyIgnored:
    def test_a_post_forward_that_frees_nothing(self, fake_pg: Any, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def post_forward(self: Any, module: Any, input: Any, output: Any) -> Any:
            self._record_post_forward()
            self._training_state = TrainingState.IDLE
            return output

        monkeypatch.setattr(FSDPParamGroup, "post_forward", post_forward)
        model = layers(fake_pg(2), 2)
        with watch(model) as rec:
            steps(model, 1)
        found = verdict(rec)
        found.reads("""
            0 warning policy-ignored 0 256
            0 warning policy-ignored 1 256
        """)
        assert "against its reshard_after_forward=True: 256 B are held until its backward" in found.violations[0].message

    def test_a_post_forward_that_always_frees(self, fake_pg: Any, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        usual = FSDPParamGroup.post_forward

        def post_forward(self: Any, module: Any, input: Any, output: Any) -> Any:
            output = usual(self, module, input, output)
            self._to_sharded()
            return output

        monkeypatch.setattr(FSDPParamGroup, "post_forward", post_forward)
        model = layers(fake_pg(2), 2, reshard_after_forward=False)
        with watch(model) as rec:
            steps(model, 1)
        found = verdict(rec)
        found.reads("""
            0 warning policy-ignored 0 256
            0 warning policy-ignored 1 256
        """)
        assert "was freed after its forward" in found.violations[0].message

    @since(2, 8, "set_reshard_after_forward is new in it")
    def test_silent_for_a_setting_changed_on_the_way(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for i in range(4):
                model.set_reshard_after_forward(i % 2 == 0)
                with torch.no_grad():
                    model(data())
                model.reshard()
                for layer in model:
                    layer.reshard()
                step(model, optimizer)
        verdict(rec).silent()

    def test_silent_for_what_is_opened_by_hand(self, fake_pg: Any, watch: Any) -> None:
        # A user's forward hook that opens the unit again, for a read that follows.
        model = layers(fake_pg(2), 2)
        model[0].register_forward_hook(lambda m, args, out: m.unshard())
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).reads("")

    def test_silent_for_a_state_dict_between(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2, reshard_after_forward=False)
        with watch(model, on_violation="raise") as rec:
            out = model(data())
            model.state_dict()
            out.sum().backward()
        verdict(rec).reads("")


# -- illegal-state -----------------------------------------------------------------------------------------------------
class TestIllegalState:
    def test_an_unshard_that_gathers_nothing(self, fake_pg: Any, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # A patch that skips gathers ("already done elsewhere"): the forward computes on the shard.
        model = layers(fake_pg(2), 2)
        steps(model, 1)
        (group,) = _groups(model[1])
        monkeypatch.setattr(group, "unshard", lambda async_op=False: None)
        with watch(model) as rec, pytest.raises(RuntimeError, match="DTensor"):
            model(data())
        found = verdict(rec)
        found.reads("0 error illegal-state 1 0")
        assert "a forward of 1 computes at event" in found.only().message

    def test_a_hook_called_out_of_order(self, fake_pg: Any, watch: Any) -> None:
        # A training loop that calls the group's post-backward by hand to reduce early, outside any backward.
        model = layers(fake_pg(2), 2)
        with watch(model) as rec:
            model(data())
            for group in _groups(model[0]):
                group.post_backward()
            model(data())
        found = verdict(rec)
        found.reads("0 error illegal-state 0 0")
        assert "found it in state post_backward" in found.only().message

    def test_silent_for_further_modules_of_a_grouped_unit(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        model = Calls(lambda self, x: self.b(self.mid(self.a(x))), a=linear(), mid=linear(), b=linear())
        fully_shard(model.mid, mesh=mesh)
        fully_shard([model.a, model.b], mesh=mesh)
        fully_shard(model, mesh=mesh)
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).silent()

    @RECOMPUTE
    def test_silent_for_a_forward_of_the_same_model_in_its_backward(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 3)

        def peek() -> None:
            with torch.no_grad():
                model[0](data())

        on_output(model[2], peek)
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).silent()


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else list(groups)


# -- lost-pre-backward -------------------------------------------------------------------------------------------------
class TestLostPreBackward:
    def test_an_inner_modules_output_taken_by_a_hook(self, fake_pg: Any, watch: Any) -> None:
        # Feature extraction: a forward hook on a layer inside the unit keeps its output, and the loss is on that alone.
        model = nn.Sequential(linear(), Block(DIM))
        shard(model, list(model), fake_pg(2))
        kept: list[torch.Tensor] = []
        model[1].up.register_forward_hook(lambda m, args, out: kept.append(out))
        with watch(model) as rec:
            model(data())
            with pytest.raises(RuntimeError, match="storage of size 0"):
                kept[0].sum().backward()
        # The block: two layers of 288 bytes.
        verdict(rec).reads("0 error lost-pre-backward 1 576")

    @since(2, 13, "older ones do not warn of it")
    def test_one_of_several_chunks_changed_in_place(self, fake_pg: Any, watch: Any) -> None:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            gate = self.two(x)
            gate.sigmoid_()
            return gate

        two = Calls(lambda self, x: self.a(x).view(2, -1), a=linear())
        model = Calls(run, two=two)
        shard(model, [model.two], fake_pg(2))
        with watch(model) as rec:
            with pytest.warns(UserWarning, match="view"):
                out = model(data(grad=True))
            with pytest.raises(RuntimeError, match="storage of size 0"):
                out.sum().backward()
        verdict(rec).reads("0 error lost-pre-backward two 256")

    def test_raises_with_the_module_instead_of_the_storage(self, fake_pg: Any, watch: Any) -> None:
        model = nn.Sequential(linear(), Block(DIM))
        shard(model, list(model), fake_pg(2))
        kept: list[torch.Tensor] = []
        model[1].up.register_forward_hook(lambda m, args, out: kept.append(out))
        with watch(model, on_violation="raise") as rec:
            model(data())
            with pytest.raises(RuntimeError, match="storage of size 0"):
                kept[0].sum().backward()
        assert [v.fqn for v in rec.violations] == ["1"]

    def test_silent_when_the_output_is_used_as_well(self, fake_pg: Any, watch: Any) -> None:
        model = nn.Sequential(linear(), Block(DIM))
        shard(model, list(model), fake_pg(2))
        kept: list[torch.Tensor] = []
        model[1].up.register_forward_hook(lambda m, args, out: kept.append(out))

        def loss() -> torch.Tensor:
            kept.clear()
            return model(data()).mean() + kept[0].square().mean()

        with watch(model, on_violation="raise") as rec:
            steps(model, 2, loss)
        verdict(rec).reads("")

    def test_silent_when_the_unit_is_open(self, fake_pg: Any, watch: Any) -> None:
        model = nn.Sequential(linear(), Block(DIM))
        shard(model, list(model), fake_pg(2), reshard_after_forward=False)
        kept: list[torch.Tensor] = []
        model[1].up.register_forward_hook(lambda m, args, out: kept.append(out))

        def loss() -> torch.Tensor:
            kept.clear()
            model(data())
            return kept[0].square().mean()

        with watch(model, on_violation="raise") as rec:
            steps(model, 2, loss)
        verdict(rec).silent()

    def test_silent_for_an_error_of_another_kind(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2))

        def fail() -> None:
            raise ValueError("as planned")

        on_output(model[1], fail)
        with watch(model, on_violation="raise") as rec, pytest.raises(ValueError, match="as planned"):
            model(data()).sum().backward()
        verdict(rec).reads("")


# -- unclean-start -----------------------------------------------------------------------------------------------------
class TestUncleanStart:
    def failing(self, mesh: Any) -> tuple[Any, list[bool]]:
        """Three layers of which the middle one fails while the list is not empty."""
        model = layers(mesh)
        now: list[bool] = []

        def fail(module: nn.Module, args: Any) -> None:
            if now:
                raise ValueError("as planned")

        model[1].register_forward_pre_hook(fail)
        return model, now

    def test_a_batch_that_fails_in_the_forward(self, fake_pg: Any, watch: Any) -> None:
        model, now = self.failing(fake_pg(2))
        with watch(model) as rec:
            now.append(True)
            with pytest.raises(ValueError, match="as planned"):
                model(data())
            now.clear()
            model(data())
        found = verdict(rec)
        found.reads("0 error unclean-start 1 0")
        v = found.only()
        failed, began = v.evidence
        assert v.message == (
            f"an outermost forward (event {began}) started while an earlier pass was half done: 1 in forward; the root of an "
            f"unfinished forward still remembered. An exception left it so at event {failed}. This pass skips hooks and may "
            "run on stale or freed parameters."
        )
        assert ("model.reset_iter_state()" in v.hint) == (RELEASE >= (2, 13))

    @since(2, 13, "the forward after it fails on older ones")
    def test_a_backward_that_fails(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2))
        now = [True]

        def fail() -> None:
            if now:
                raise ValueError("as planned")

        on_output(model[0], fail)
        with watch(model) as rec:
            with pytest.raises(ValueError, match="as planned"):
                model(data()).sum().backward()
            now.clear()
            model(data())
        found = verdict(rec)
        found.reads("0 error unclean-start 0 0")
        assert "0 in pre_backward; a final callback still marked queued" in found.only().message

    def test_an_interrupted_evaluation(self, fake_pg: Any, watch: Any) -> None:
        model, now = self.failing(fake_pg(2))
        with watch(model) as rec:
            steps(model, 1)
            now.append(True)
            with pytest.raises(ValueError, match="as planned"), torch.no_grad():
                model(data())
            now.clear()
            steps(model, 1)
        assert [v.fqn for v in verdict(rec).of("unclean-start") if v.severity == "error"] == ["1"]

    @RESET
    def test_silent_after_reset_iter_state(self, fake_pg: Any, watch: Any) -> None:
        model, now = self.failing(fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                now.append(True)
                with pytest.raises(ValueError, match="as planned"):
                    model(data())
                now.clear()
                model.reset_iter_state()
                steps(model, 1)
        verdict(rec).reads("")

    def test_silent_for_an_error_outside_the_model(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                out = model(data())
                with pytest.raises(RuntimeError, match="size"):
                    out + torch.zeros(3)
                out.sum().backward()
        verdict(rec).reads("")


# -- wrong-root --------------------------------------------------------------------------------------------------------
class TestWrongRoot:
    def test_features_cached_by_a_tower_first(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        tower = layers(mesh, 2)
        model = Calls(lambda self, x: self.head(self.tower(x)), tower=tower, head=linear())
        fully_shard(model, mesh=mesh)
        with watch(model) as rec:
            with torch.no_grad():
                model.tower(data())
            with pytest.raises(RuntimeError, match="already been lazily initialized"):
                model(data())
        found = verdict(rec)
        found.reads("0 warning wrong-root tower 0")
        assert "although it lies in (root)" in found.only().message

    def test_a_unit_below_a_unit_below_the_root(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        inner = shard(nn.Sequential(linear(), linear()), [], mesh)
        model = shard(nn.Sequential(nn.Sequential(inner, linear())), [], mesh, root=False)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        with watch(model) as rec:
            model[0][0](data())
        verdict(rec).reads("0 warning wrong-root 0.0 0")

    def test_silent_for_a_unit_by_itself_after_the_root(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model, on_violation="raise") as rec:
            with torch.no_grad():
                model(data())
            model[1](data()).sum().backward()
        verdict(rec).silent()

    def test_silent_for_roots_side_by_side(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        model = Calls(lambda self, x: self.right(self.left(x)), left=layers(mesh, 2), right=layers(mesh, 2))
        with watch(model, on_violation="raise") as rec:
            model.right(data()).sum().backward()
            model(data()).sum().backward()
        verdict(rec).silent()


# -- one leak, many guises ---------------------------------------------------------------------------------------------
@RECOMPUTE
@pytest.mark.parametrize("count", [2, 6])
def test_the_leak_grows_with_the_layers(fake_pg: Any, watch: Any, count: int) -> None:
    model = checkpointed_layers(fake_pg(2), count, use_reentrant=True)
    for one, following in zip(model.layers, model.layers[1:], strict=False):
        one.set_modules_to_forward_prefetch([following])
    with watch(model) as rec:
        steps(model, 1)
    # One per layer but the first; the last message counts them all: from the second on "n units, n * 256 B, are held".
    found = verdict(rec)
    assert len(found.of("gather-after-backward")) == len(found.violations) == count - 1
    if count == 6:
        assert "5 units, 1,280 B, are held that way now" in found.violations[-1].message
