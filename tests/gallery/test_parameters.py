"""Parameters, gradients, optimizers: the faults that raise nothing, and legal programs that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fsdptrace
from fsdptrace.analysis import load
from gallery.models import DIM, data, layers, linear, sgd, shard, steps
from gallery.verdict import verdict
from support.models import Calls
from support.torches import HSDP, VALUES

ROOT = 640  # bytes of the root's embedding: 20 x 8 floats


def with_root(mesh: Any, **options: Any) -> Any:
    """An embedding in the root (640 bytes), which an eval pass leaves open, and two units of 256 bytes."""
    model = Calls(lambda self, i: self.b(self.a(self.emb(i))), emb=nn.Embedding(20, DIM), a=linear(), b=linear())
    return shard(model, [model.a, model.b], mesh, **options)


def ids() -> torch.Tensor:
    return torch.randint(0, 20, (4, 3))


def train(model: Any, optimizer: Any, before_step: Callable[[], None] | None = None, count: int = 1) -> None:
    steps(model, count, lambda: model(ids()).square().mean(), before_step, optimizer)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(ids())


# -- stale-weights -----------------------------------------------------------------------------------------------------
class TestStaleWeights:
    @pytest.mark.parametrize("foreach", [False, True])
    def test_an_eval_pass_between_backward_and_step(self, fake_pg: Any, watch: Any, foreach: bool) -> None:
        # The root's default policy leaves it open; the version counters see a foreach step as little as nothing.
        model = with_root(fake_pg(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        with watch(model) as rec:
            train(model, optimizer, lambda: evaluate(model), count=2)
        found = verdict(rec)
        found.reads("""
            0 info unpaired-unshard (root) 640
            1 error stale-weights (root) 640
            1 info unclean-start (model) 0
        """)
        v = found.of("stale-weights")[0]
        gathered, changed, used = v.evidence
        assert v.message == (
            f"the forward of (root) (event {used}) computes with a copy of old parameters (640 B): gathered at event "
            f"{gathered}, 1 step ago, and an optimizer stepped at event {changed}. Its reshard_after_forward is False, so that "
            "a forward leaves it open until a backward comes."
        )
        assert v.hint.startswith("Call model.reshard() before its parameters change")

    @pytest.mark.parametrize("how", ["zero_", "lerp", "nn.init", "local", "state dict"])
    def test_shards_written_after_an_eval_pass(self, fake_pg: Any, watch: Any, how: str) -> None:
        # A moving average copied in, or a new initialisation, through references to the shards.
        model = with_root(fake_pg(2))
        shard_of_root = model.emb.weight
        kept = model.state_dict() if how == "state dict" else {}
        with watch(model) as rec, torch.no_grad():
            model(ids())
            if how == "zero_":
                shard_of_root.zero_()
            elif how == "lerp":
                shard_of_root.lerp_(shard_of_root * 2, 0.5)
            elif how == "nn.init":
                nn.init.constant_(shard_of_root, 0.1)
            elif how == "local":
                shard_of_root.to_local().mul_(0.5)
            else:
                kept["emb.weight"].copy_(kept["emb.weight"] * 2)
            model(ids())
        found = verdict(rec)
        assert [v.rule for v in found.violations if v.severity == "error"] == ["stale-weights"]
        assert "its shards were written at event" in found.of("stale-weights")[0].message

    def test_a_copy_on_a_smaller_mesh(self, fake_pg: Any, watch: Any) -> None:
        # reshard_after_forward=2 of 4 ranks: the eval pass leaves each unit with a copy on two, gathers are made from it.
        mesh = fake_pg(4)
        model = nn.Sequential(linear(), linear())
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        shards = list(model.parameters())
        with watch(model) as rec, torch.no_grad():
            model(data())
            for param in shards:
                param.mul_(0.5)
            model(data())
            for layer in model:
                layer.reshard()
            model(data())
        found = verdict(rec)
        found.reads("""
            0 error stale-weights 0 256
            0 error stale-weights 1 256
        """)
        assert "a copy on a smaller mesh" in found.violations[0].message
        assert "0.reshard()" in found.violations[0].hint

    def test_an_optimizer_and_a_smaller_mesh(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(4)
        model = nn.Sequential(linear(), linear())
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        optimizer = sgd(model)

        def validate() -> None:
            with torch.no_grad():
                model(data())

        with watch(model) as rec:
            steps(model, 2, before_step=validate, optimizer=optimizer)
        assert [v.fqn for v in verdict(rec).of("stale-weights")] == ["0", "1"]

    def test_a_pass_of_generation_before_the_weights_arrive(self, fake_pg: Any, watch: Any) -> None:
        # A reference model that is kept open and gets the actor's weights, shard by shard.
        mesh = fake_pg(2)
        actor, reference = layers(mesh, 2), layers(mesh, 2, reshard_after_forward=False)
        shards = list(reference.parameters())
        with watch(reference) as rec, torch.no_grad():
            reference(data())
            for mine, its in zip(shards, actor.parameters(), strict=True):
                mine.copy_(its)
            reference(data())
        verdict(rec).reads("""
            0 error stale-weights 0 256
            0 error stale-weights 1 256
        """)

    def test_a_pending_gather_and_a_load(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        model(data()).sum().backward()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with watch(model) as rec:
            model[1].unshard(async_op=True)
            model.load_state_dict(kept)
            model(data())
        found = verdict(rec)
        found.reads("0 error pending-gather 1 256")
        assert "was pending when its parameters changed" in found.only().message

    def test_raises_at_the_use(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        optimizer = sgd(model)
        with pytest.raises(fsdptrace.InvariantViolation, match=r"stale-weights: the forward of \(root\)"):  # noqa: SIM117
            with watch(model, on_violation="raise"):
                train(model, optimizer, lambda: evaluate(model), count=2)

    def test_silent_when_resharded_in_time(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        optimizer = sgd(model)

        def validate() -> None:
            evaluate(model)
            model.reshard()

        with watch(model, on_violation="raise") as rec:
            train(model, optimizer, validate, count=3)
        verdict(rec).silent()

    def test_silent_for_the_backward_of_the_same_copy(self, fake_pg: Any, watch: Any) -> None:
        # The optimizer steps between forward and backward: that backward belongs to the copy of its forward.
        model = layers(fake_pg(2), 2, reshard_after_forward=False)
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            steps(model, 1, optimizer=optimizer)
            loss = model(data()).sum()
            optimizer.step()
            loss.backward()
            steps(model, 1, optimizer=optimizer)
        verdict(rec).silent()

    def test_silent_for_weights_that_arrive_while_sharded(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                evaluate(model)
                model.load_state_dict(kept)  # frees what is open
                evaluate(model)
                model.to("cpu")  # so does this
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
        verdict(rec).silent()


# -- missing-reduction -------------------------------------------------------------------------------------------------
class TestMissingReduction:
    def test_sync_back_on_after_the_last_backward(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        optimizer = sgd(model)
        with watch(model) as rec:
            for _ in range(2):
                model.set_requires_gradient_sync(False)
                model(data()).sum().backward()
                model.set_requires_gradient_sync(True)
                optimizer.step()
                optimizer.zero_grad()
        # The switch is back at the step, so that only this rule can see it.
        found = verdict(rec)
        found.reads("""
            0 error missing-reduction 0 0
            1 error missing-reduction 0 0
        """)
        v = found.violations[0]
        assert v.message == (
            f"the optimizer stepped (event {v.seq}) without gradients of 2 units (0, 1): they were not reduced, since the last "
            f"backward that made any ran under set_requires_gradient_sync(False) (event {v.evidence[1]})."
        )

    def test_one_unit_under_its_own_switch(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 3)
        model[1].set_requires_gradient_sync(False)
        with watch(model) as rec:
            steps(model, 1)
        verdict(rec).reads("""
            0 error missing-reduction 1 0
            0 warning flags-at-step 1 0
        """)

    @HSDP
    @pytest.mark.parametrize("last", [True, False])
    def test_all_reduce_off(self, fake_pg: Any, watch: Any, last: bool) -> None:
        model = layers(fake_pg(2, 2, names=("replicate", "shard")), 2)
        optimizer = sgd(model)
        with watch(model) as rec:
            for _ in range(2):
                for i in range(2):
                    model.set_requires_all_reduce(i == 1 and last)
                    model(data()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = verdict(rec)
        if last:
            found.silent()
            return
        found.reads("""
            0 error missing-reduction 0 0
            0 warning flags-at-step 0 0
            1 error missing-reduction 0 0
            1 warning flags-at-step 0 0
        """)
        assert "not over the replicas" in found.violations[0].message

    @HSDP
    def test_an_expert_whose_last_micro_batch_had_no_token(self, fake_pg: Any, watch: Any) -> None:
        # Its partial sum waits for a reduction that does not come: without a gradient the post-backward returns before.
        def run(self: Any, x: torch.Tensor, expert: bool) -> torch.Tensor:
            return self.out(self.expert(x)) if expert else self.out(x)

        model = Calls(run, expert=linear(), out=linear())
        shard(model, [model.expert, model.out], fake_pg(2, 2, names=("replicate", "shard")))
        optimizer = sgd(model)
        with watch(model) as rec:
            model.set_requires_all_reduce(False)
            model(data(), True).sum().backward()
            model.set_requires_all_reduce(True)
            model(data(), False).sum().backward()
            optimizer.step()
        verdict(rec).reads("0 error missing-reduction expert 0")

    @VALUES
    def test_a_hook_that_takes_the_gradient_away(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)

        def drop(param: torch.Tensor) -> None:
            param.grad = None

        model[1].weight.register_post_accumulate_grad_hook(drop)
        with watch(model) as rec:
            steps(model, 2)
        found = verdict(rec)
        found.reads("""
            0 error missing-reduction 1 0
            1 error missing-reduction 1 0
        """)
        assert "a post-accumulate-grad hook took them away" in found.violations[0].message

    def test_silent_for_an_expert_without_tokens(self, fake_pg: Any, watch: Any) -> None:
        model = Calls(lambda self, x: self.out(x), expert=linear(), out=linear())
        shard(model, [model.expert, model.out], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).silent()

    def test_silent_for_gradients_of_the_other_optimizer(self, fake_pg: Any, watch: Any) -> None:
        # The discriminator's gradients of the generator's step are held back to save their reduction.
        mesh = fake_pg(2)
        generator, discriminator = layers(mesh, 2), layers(mesh, 2)
        theirs, its = sgd(generator), sgd(discriminator)
        with watch([generator, discriminator], on_violation="raise") as rec:
            for _ in range(2):
                discriminator.set_requires_gradient_sync(False)
                discriminator(generator(data())).sum().backward()
                theirs.step()
                theirs.zero_grad()
                discriminator.set_requires_gradient_sync(True)
                discriminator(data()).sum().backward()
                its.step()
                its.zero_grad()
        verdict(rec).silent()

    @VALUES
    def test_silent_for_optimizers_in_the_backward(self, fake_pg: Any, watch: Any) -> None:
        # Layer 1's is stepped by a hook as soon as its gradient is there; another optimizer holds everything.
        model = layers(fake_pg(2), 2)
        own, whole = sgd(model[1]), sgd(model)

        def hook(param: torch.Tensor) -> None:
            own.step()
            own.zero_grad()

        model[1].weight.register_post_accumulate_grad_hook(hook)
        with watch(model, on_violation="raise") as rec:
            steps(model, 3, optimizer=whole)
        verdict(rec).silent()

    def test_silent_for_gradients_that_were_thrown_away(self, fake_pg: Any, watch: Any) -> None:
        # A bad batch is skipped by clearing its gradients; the optimizer steps all the same.
        model = layers(fake_pg(2), 2)
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            steps(model, 2, before_step=optimizer.zero_grad, optimizer=optimizer)
        verdict(rec).silent()


# -- optimizer-owns-temporary ------------------------------------------------------------------------------------------
class TestOptimizerOwnsTemporary:
    @VALUES
    def test_built_after_an_eval_pass(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        evaluate(model)
        optimizer = sgd(model)
        with watch(model) as rec:
            train(model, optimizer, count=2)
        found = verdict(rec)
        assert [(v.step, v.rule, v.fqn, v.bytes) for v in found.violations if v.severity != "info"] == [
            (0, "optimizer-owns-temporary", "", ROOT), (1, "optimizer-owns-temporary", "", ROOT),
        ]  # fmt: skip
        v = found.of("optimizer-owns-temporary")[0]
        assert v.message == (
            f"SGD#1 holds a gathered copy of emb.weight (of the root) and not its shard (event {v.seq}): it was built, or "
            "given the parameter, while the unit was open. What it steps is overwritten at the next gather."
        )
        assert "model.reshard()" in v.hint

    @VALUES
    def test_a_parameter_group_added_while_open(self, fake_pg: Any, watch: Any) -> None:
        # The tower is unfrozen later: opened to look at it, and given to the optimizer meanwhile.
        model = layers(fake_pg(2), 2)
        optimizer = sgd(model[0])
        with watch(model) as rec:
            steps(model, 1, optimizer=optimizer)
            model[1].unshard()
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
            model[1].reshard()
            steps(model, 1, optimizer=optimizer)
        verdict(rec).reads("1 error optimizer-owns-temporary 1 256")

    @VALUES
    def test_built_between_forward_and_backward(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2, reshard_after_forward=False)
        with watch(model) as rec:
            loss = model(data()).sum()
            optimizer = sgd(model)
            loss.backward()
            optimizer.step()
        verdict(rec).reads("""
            0 error optimizer-owns-temporary 0 256
            0 error optimizer-owns-temporary 1 256
        """)

    def test_silent_for_an_average_of_the_weights(self, fake_pg: Any, watch: Any) -> None:
        # An optimizer over plain clones, and one over another model's shards.
        mesh = fake_pg(2)
        model, other = with_root(mesh), with_root(mesh)
        clones = [nn.Parameter(p.detach().to_local().clone()) for p in model.parameters()]
        optimizers = [sgd(model), torch.optim.SGD(clones, lr=0.1), sgd(other)]
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                model(ids()).square().mean().backward()
                other(ids()).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        verdict(rec).silent()

    def test_silent_when_resharded_first(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            evaluate(model)
            model.reshard()
            train(model, sgd(model), count=2)
        verdict(rec).silent()


# -- write-to-temporary ------------------------------------------------------------------------------------------------
class TestWriteToTemporary:
    @pytest.mark.parametrize("warm", [False, True])
    def test_frozen_after_an_eval_pass(self, fake_pg: Any, watch: Any, warm: bool) -> None:
        model = with_root(fake_pg(2))
        optimizer = sgd(model)
        with watch(model) as rec:
            if warm:
                evaluate(model)
            model.emb.weight.requires_grad_(False)
            train(model, optimizer, count=2)
        found = verdict(rec)
        if not warm:
            found.silent()
            return
        (v,) = [v for v in found.violations if v.severity != "info"]
        assert (v.step, v.rule, v.fqn) == (0, "write-to-temporary", "")
        opened, seen = v.evidence
        assert v.message == (
            f"emb.weight (of the root): requires_grad_(False) was called on its gathered copy while the unit was open (since "
            f"event {opened}; seen at event {seen}). The next gather makes the copy anew from the shard."
        )
        assert v.hint == "Call model.reshard() first and call requires_grad_(False) again then, while the unit is sharded."

    def test_initialised_while_open_by_hand(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model) as rec:
            model[1].unshard()
            nn.init.zeros_(model[1].weight)
            model[1].reshard()
            steps(model, 1)
        found = verdict(rec)
        found.reads("0 error write-to-temporary 1 256")
        assert "its gathered copy was written to" in found.only().message

    def test_a_codebook_that_its_forward_updates(self, fake_pg: Any, watch: Any) -> None:
        # Vector quantisation by moving averages: the forward writes to a frozen parameter, on the copy.
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.book.weight.lerp_(torch.ones(DIM, DIM), 0.1)
            return self.book(self.a(x))

        inner = Calls(run, a=linear(), book=linear())
        inner.book.weight.requires_grad_(False)
        model = nn.Sequential(linear(), inner)
        shard(model, list(model), fake_pg(2))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with watch(model) as rec:
            steps(model, 5, optimizer=optimizer)
        found = verdict(rec)
        # Looked at in the first three steps and then rarely; where the first version of a copy is not known, from the second.
        assert {v.step for v in found.violations} in ({0, 1, 2}, {1, 2})
        assert {(v.rule, v.fqn, v.bytes) for v in found.violations} == {("write-to-temporary", "1", 256)}
        assert "1.book.weight (of 1): its gathered copy was written to in a forward or backward" in found.violations[0].message

    def test_a_hook_on_a_copy(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        with watch(model) as rec:
            evaluate(model)
            model.emb.weight.register_hook(lambda grad: grad)
            model(ids()).square().mean().backward()
        found = verdict(rec)
        (v,) = [v for v in found.violations if v.severity != "info"]
        assert (v.rule, v.fqn) == ("write-to-temporary", "")
        assert "a hook was registered on its gathered copy" in v.message

    def test_a_gradient_set_on_a_copy(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model) as rec:
            steps(model, 1)
            model[0].unshard()
            model[0].weight.grad = torch.zeros(DIM, DIM)
            model[0].reshard()
        found = verdict(rec)
        assert [(v.rule, v.fqn) for v in found.violations] == [("write-to-temporary", "0")]
        assert "was set by hand" in found.only().message

    def test_silent_for_what_is_taken_back(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                evaluate(model)
                model.requires_grad_(False)
                evaluate(model)
                model.requires_grad_(True)
                train(model, optimizer)
        verdict(rec).silent()

    def test_silent_for_shards_that_are_frozen_and_written_while_sharded(self, fake_pg: Any, watch: Any) -> None:
        model = with_root(fake_pg(2))
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for flag in (False, True, False):
                model.emb.weight.requires_grad_(flag)
                train(model, optimizer)
                with torch.no_grad():
                    model.emb.weight.mul_(0.5)
        verdict(rec).silent()

    def test_silent_for_gradients_kept_without_sync(self, fake_pg: Any, watch: Any) -> None:
        # The accumulated gradients lie on the copies over an eval pass, which leaves the root open.
        model = with_root(fake_pg(2))
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                for last in (False, True):
                    model.set_requires_gradient_sync(last)
                    model(ids()).square().mean().backward()
                    evaluate(model)
                    model.reshard()
                optimizer.step()
                optimizer.zero_grad()
        verdict(rec).silent()


def test_writes_that_leave_no_trace(fake_pg: Any, watch: Any) -> None:
    """What the coverage of the file says is not seen is not; the same writes past no version counter are."""
    mesh = fake_pg(2)
    writes: dict[str, Callable[[list[Any]], Any]] = {
        "by hand": lambda shards: [shard.add_(1) for shard in shards],
        "on the local tensors": lambda shards: torch._foreach_add_([shard.to_local() for shard in shards], 1),
        ".data": lambda shards: [shard.data.add_(1) for shard in shards],
        "numpy": lambda shards: [shard.to_local().numpy().__iadd__(1) for shard in shards],
        "torch._foreach_": lambda shards: torch._foreach_add_(shards, 1),
    }
    seen = {}
    for name, write in writes.items():
        model = layers(mesh, 2, reshard_after_forward=False)
        shards = list(model.parameters())
        with watch(model) as rec, torch.no_grad():
            model(data())
            write(shards)
            model(data())
        seen[name] = sorted(v.fqn for v in rec.violations if v.rule == "stale-weights")
    assert seen == {
        "by hand": ["0", "1"], "on the local tensors": ["0", "1"], ".data": [], "numpy": [], "torch._foreach_": [],
    }  # fmt: skip
    rec.close()
    told = "\n".join(load(rec.path).coverage)
    assert "stale-weights: shards written through `.data`, through numpy, or by `torch._foreach_…` on DTensors" in told
    assert "write-to-temporary: gathered copies written through `.data` or through numpy" in told
