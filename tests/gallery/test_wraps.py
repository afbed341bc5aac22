"""What is wrong with a wrap before it trains, with what collectives carry, and with the order of units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdptrace
from gallery.models import DIM, data, layers, linear, sgd, shard, steps
from gallery.verdict import verdict
from support.models import Calls
from support.torches import since

TRAINABLE_ONLY = since(2, 11, "older ones want frozen parameters of the same dtype too")
MARKED = since(2, 13, "older ones keep no mark of a tie")


def ids() -> torch.Tensor:
    return torch.randint(0, 16, (2, 4))


def lm(mesh: Any, root: bool = True, tied: bool = False) -> Any:
    """Embedding (16 x 8), two blocks of 288 bytes and a head (16 x 8 and 16): 512, 512 and 64 bytes outside the blocks."""
    model = Calls(
        lambda self, i: self.head(self.blocks(self.emb(i))),
        emb=nn.Embedding(16, DIM), blocks=nn.Sequential(linear(True), linear(True)), head=nn.Linear(DIM, 16, bias=not tied),
    )  # fmt: skip
    if tied:
        model.head.weight = model.emb.weight
    return shard(model, list(model.blocks), mesh, root=root)


def train(model: Any, optimizer: Any = None, count: int = 1) -> None:
    steps(model, count, lambda: model(ids()).square().mean(), optimizer=optimizer)


# -- uncovered-parameter -----------------------------------------------------------------------------------------------
class TestUncoveredParameter:
    @pytest.mark.parametrize("root", [True, False])
    def test_root_left_unwrapped(self, fake_pg: Any, watch: Any, root: bool) -> None:
        model = lm(fake_pg(2), root)
        with watch(model) as rec:
            train(model, count=2)
        found = verdict(rec)
        if root:
            found.silent()
            return
        found.reads("0 error uncovered-parameter (model) 1088")  # once: 512 + 512 + 64 bytes
        v = found.only()
        assert v.message == (
            f"emb.weight, head.weight, head.bias (1,088 B) belong to no unit of fully_shard and got gradients (event {v.seq}). "
            "Nobody reduces their gradients, and they differ from rank to rank."
        )
        assert "fully_shard on the module that holds them" in v.hint

    def test_seen_from_the_optimizer(self, fake_pg: Any, watch: Any) -> None:
        # The blocks alone are recorded, as FSDPTRACE=1 does where the root is not wrapped.
        model = lm(fake_pg(2), root=False)
        with watch(list(model.blocks)) as rec:
            train(model, count=2)
        found = verdict(rec)
        found.reads("0 error uncovered-parameter (model) 1088")
        assert found.only().message.startswith(
            "emb.weight, head.weight, head.bias (1,088 B) belong to no unit of fully_shard and got gradients and were "
            "stepped by SGD#1 beside sharded parameters"
        )

    def test_adapters_added_after_the_wrap(self, fake_pg: Any, watch: Any) -> None:
        model = lm(fake_pg(2))
        model.adapter = nn.Linear(DIM, 16, bias=False)
        forward = model._run
        model._run = lambda self, i: forward(self, i) + self.adapter(torch.ones(2, 4, DIM))
        with watch(model) as rec:
            train(model)
        found = verdict(rec)
        found.reads("0 warning uncovered-parameter (model) 512")
        assert "adapter.weight (512 B) belongs to no unit of fully_shard" in found.only().message
        assert "given to ignored_params, or added after it" in found.only().message

    def test_ignored_and_trained(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        model = nn.Sequential(linear(), linear())
        fully_shard(model, mesh=mesh, ignored_params={model[1].weight})
        with watch(model) as rec:
            steps(model, 1)
        verdict(rec).reads("0 warning uncovered-parameter (model) 256")

    def test_silent_for_frozen_unused_and_hooked_ones(self, fake_pg: Any, watch: Any) -> None:
        model = lm(fake_pg(2), root=False)
        model.spare = linear()  # has no gradient
        model.emb.weight.requires_grad_(False)
        for param in model.head.parameters():  # reduced by hand
            param.register_hook(lambda grad: grad / 2)
        with watch(model, on_violation="raise") as rec:
            train(model, count=2)
        verdict(rec).silent()

    def test_silent_on_a_mesh_of_one(self, fake_pg: Any, watch: Any) -> None:
        model = lm(fake_pg(1), root=False)
        with watch(model, on_violation="raise") as rec:
            train(model, count=2)
        verdict(rec).silent()

    def test_silent_for_another_models_parameters(self, fake_pg: Any, watch: Any) -> None:
        # One optimizer for two recorded models, and one that holds nothing of ours.
        mesh = fake_pg(2)
        one, other, foreign = layers(mesh, 2), layers(mesh, 2), linear()
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        its = sgd(foreign)
        with watch([one, other], on_violation="raise") as rec:
            for _ in range(2):
                (one(data()).sum() + other(data()).sum() + foreign(data()).sum()).backward()
                optimizer.step()
                its.step()
        verdict(rec).silent()


# -- mixed-dtype-unit --------------------------------------------------------------------------------------------------
class TestMixedDtypeUnit:
    def adapted(self, mesh: Any, base_trainable: bool, policy: Any = None) -> Any:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            base = self.base.weight
            return (x.to(base.dtype) @ base.t()).to(x.dtype) + self.b(self.a(x.to(self.a.weight.dtype))).to(x.dtype)

        units = []
        for _ in range(2):
            unit = Calls(
                run, base=linear().to(torch.bfloat16), a=nn.Linear(DIM, 2, bias=False), b=nn.Linear(2, DIM, bias=False)
            )
            unit.base.weight.requires_grad_(base_trainable)
            units.append(unit)
        model = nn.Sequential(*units)
        return shard(model, units, mesh, **({"mp_policy": policy} if policy else {}))

    def test_said_before_the_assertion(self, fake_pg: Any, watch: Any) -> None:
        model = self.adapted(fake_pg(2), base_trainable=True)
        with watch(model) as rec, pytest.raises(AssertionError, match="uniform original parameter dtype"):
            model(data())
        found = verdict(rec)
        found.reads("""
            0 error mixed-dtype-unit 0 0
            0 error mixed-dtype-unit 1 0
        """)
        v = found.violations[0]
        assert v.message == (
            "the parameters of 0 that FSDP2 wants in one dtype have bfloat16, float32: 0.base.weight (bfloat16), 0.a.weight "
            f"(float32), 0.b.weight (float32) (event {v.seq}). The first forward fails with `FSDP expects uniform original "
            "parameter dtype`."
        )

    def test_raises_instead_of_the_assertion(self, fake_pg: Any, watch: Any) -> None:
        model = self.adapted(fake_pg(2), base_trainable=True)
        with pytest.raises(fsdptrace.InvariantViolation, match=r"mixed-dtype-unit.*0\.a\.weight \(float32\)"):  # noqa: SIM117
            with watch(model, on_violation="raise"):
                model(data())

    def test_a_norm_kept_in_fp32(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        block = nn.Sequential(linear().to(torch.bfloat16), nn.LayerNorm(DIM))
        model = shard(nn.Sequential(block), [block], mesh)
        with watch(model) as rec, pytest.raises(AssertionError):
            model(data())
        found = verdict(rec)
        found.reads("0 error mixed-dtype-unit 0 0")
        assert "0.1.bias (float32)" in found.only().message

    @TRAINABLE_ONLY
    @pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)])
    def test_silent_for_a_frozen_base(self, fake_pg: Any, watch: Any, policy: Any) -> None:
        model = self.adapted(fake_pg(2), base_trainable=False, policy=policy)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with watch(model, on_violation="raise") as rec:
            steps(model, 2, lambda: model(data()).float().square().mean(), optimizer=optimizer)
        verdict(rec).silent()

    def test_silent_for_units_of_their_own(self, fake_pg: Any, watch: Any) -> None:
        model = Calls(lambda self, x: self.b(self.a(x.bfloat16()).float()), a=linear().bfloat16(), b=linear())
        shard(model, [model.a, model.b], fake_pg(2))
        with watch(model, on_violation="raise") as rec:
            steps(model, 2)
        verdict(rec).silent()


# -- split-tie ---------------------------------------------------------------------------------------------------------
@MARKED
class TestSplitTie:
    def test_a_head_in_a_unit_of_its_own(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        model = lm(mesh, root=False, tied=True)
        fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with watch(model) as rec, pytest.raises(ValueError, match="shared with a parameter"):
            model(ids())
        found = verdict(rec)
        found.reads("0 error split-tie head 0")
        v = found.only()
        assert v.message == (
            "head.weight and emb.weight were one parameter before fully_shard and lie in two units now, head and (root) "
            f"(event {v.seq}): each has its own copy, and they will drift apart."
        )

    def test_two_blocks_that_share_a_layer(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        model = nn.Sequential(nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear()))
        model[1][0].weight = model[0][0].weight
        shard(model, list(model), mesh)
        with watch(model) as rec, pytest.raises(ValueError, match="shared with a parameter"):
            model(data())
        verdict(rec).reads("0 error split-tie 1 0")

    def test_silent_for_ties_inside_a_unit(self, fake_pg: Any, watch: Any) -> None:
        mesh = fake_pg(2)
        in_root = lm(mesh, tied=True)
        grouped = lm(mesh, root=False, tied=True)
        fully_shard([grouped.emb, grouped.head], mesh=mesh)
        fully_shard(grouped, mesh=mesh)
        with watch([in_root, grouped], on_violation="raise") as rec:
            train(in_root, count=2)
            train(grouped, count=2)
        verdict(rec).silent()


# -- inference-buffer --------------------------------------------------------------------------------------------------
class TestInferenceBuffer:
    @pytest.mark.parametrize("recorded", [True, False])
    def test_a_first_forward_under_inference_mode(self, fake_pg: Any, watch: Any, recorded: bool) -> None:
        model = layers(fake_pg(2), 2)

        def first() -> None:
            with torch.inference_mode():
                model(data())

        if not recorded:
            first()
        with watch(model) as rec:
            if recorded:
                first()
            with pytest.raises(RuntimeError, match=r"[iI]nference"):
                model(data()).sum().backward()
        found = verdict(rec)
        assert [(v.rule, v.fqn, v.severity) for v in found.violations if v.severity != "info"] == [
            ("inference-buffer", "0", "error"), ("inference-buffer", "1", "error"),
        ]  # fmt: skip
        v = found.of("inference-buffer")[0]
        assert "Run the model's first forward under torch.no_grad()" in v.hint

    def test_one_unit_that_ran_there_alone(self, fake_pg: Any, watch: Any) -> None:
        def run(self: Any, x: torch.Tensor, aux: bool = True) -> torch.Tensor:
            return self.aux(self.a(x)) if aux else self.a(x)

        model = Calls(run, a=linear(), aux=linear())
        shard(model, [model.a, model.aux], fake_pg(2))
        with watch(model) as rec:
            model(data(), False).sum().backward()
            with torch.inference_mode():
                model(data())
            with pytest.raises(RuntimeError, match=r"[iI]nference"):
                model(data()).sum().backward()
        assert [v.fqn for v in verdict(rec).of("inference-buffer")] == ["aux"]

    def test_silent_once_buffers_are_there(self, fake_pg: Any, watch: Any) -> None:
        model = lm(fake_pg(2))
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for _ in range(2):
                train(model, optimizer)
                with torch.inference_mode():
                    model(ids())
        verdict(rec).silent()

    def test_silent_where_only_inference_runs(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        with watch(model, on_violation="raise") as rec, torch.inference_mode():
            model(data())
            model(data())
        verdict(rec).silent()


# -- comm-dtype --------------------------------------------------------------------------------------------------------
class TestCommDtype:
    POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def test_cast_after_the_first_forward(self, fake_pg: Any, watch: Any) -> None:
        # A bf16 model under a bf16 policy, which FSDP2 then drops; made fp32 later, it gathers in fp32.
        mesh = fake_pg(2)
        model = nn.Sequential(linear(), linear()).bfloat16()
        shard(model, list(model), mesh, mp_policy=self.POLICY)
        with watch(model) as rec:
            steps(model, 1, lambda: model(data()).float().square().mean())
            model.float()
            with pytest.raises(RuntimeError):  # torch 2.13 refuses the copy-out into the old buffers
                model(data())
        found = verdict(rec)
        found.reads("1 error comm-dtype 0 0")
        v = found.only()
        assert v.message == f"0 was gathered in float32 at event {v.seq}, where its policy names param_dtype=bfloat16."

    def test_a_policy_set_afterwards(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2)
        model(data()).sum().backward()
        for layer in model:
            layer._get_fsdp_state()._mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        with watch(model) as rec:
            steps(model, 1, lambda: model(data()).float().square().mean())
        # Named, and not taken: gathers run in fp32.
        assert {(v.rule, v.fqn, v.cause) for v in verdict(rec).violations} == {
            ("comm-dtype", "0", "param_dtype"), ("comm-dtype", "1", "param_dtype"),
        }  # fmt: skip

    def test_a_reduction_in_another_dtype(self, fake_pg: Any, watch: Any) -> None:
        model = layers(fake_pg(2), 2, mp_policy=self.POLICY)
        with watch(model) as rec:
            steps(model, 1, lambda: model(data()).float().square().mean())
            for param in model[1]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params:
                param.reduce_dtype = None
            model[1]._get_fsdp_state()._fsdp_param_groups[0]._reduce_dtype = None
            model.to("cpu")  # whatever is known of sizes and dtypes is measured again
            steps(model, 1, lambda: model(data()).float().square().mean())
        found = verdict(rec)
        found.reads("1 error comm-dtype 1 0")
        assert "was reduced in bfloat16" in found.only().message

    @pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_silent_as_named(self, fake_pg: Any, watch: Any, dtype: torch.dtype, reduce_dtype: Any) -> None:
        model = nn.Sequential(linear(), linear()).to(dtype)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        shard(model, list(model), fake_pg(2), mp_policy=policy)
        with watch(model, on_violation="raise") as rec:
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(data()).float().square().mean().backward()
            steps(model, 2, lambda: model(data()).float().square().mean())
        verdict(rec).silent()

    def test_silent_for_integers_beside(self, fake_pg: Any, watch: Any) -> None:
        # A quantised base in int8 and an adapter: mixed dtypes travel as bytes.
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + x @ self.base.to(x.dtype).t()

        model = Calls(run, a=linear())
        model.base = nn.Parameter(torch.ones(DIM, DIM, dtype=torch.int8), requires_grad=False)
        outer = nn.Sequential(model)
        try:
            shard(outer, [model], fake_pg(2), mp_policy=self.POLICY)
            optimizer = torch.optim.SGD([p for p in outer.parameters() if p.requires_grad], lr=0.1)
            with watch(outer, on_violation="raise") as rec:
                steps(outer, 2, lambda: outer(data()).float().square().mean(), optimizer=optimizer)
        except AssertionError as error:
            pytest.skip(f"this torch: {error}")
        verdict(rec).silent()


# -- order-changed -----------------------------------------------------------------------------------------------------
class TestOrderChanged:
    def model(self, mesh: Any, order: Any) -> Any:
        """Three units that run in the order that ``order(step)`` says."""

        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            for name in order(self.step):
                x = getattr(self, name)(x)
            self.step += 1
            return x

        model = Calls(run, a=linear(), b=linear(), c=linear())
        model.step = 0
        return shard(model, [model.a, model.b, model.c], mesh)

    def test_two_units_change_places(self, fake_pg: Any, watch: Any) -> None:
        model = self.model(fake_pg(2), lambda step: "abc" if step < 5 else "acb")
        with watch(model) as rec:
            steps(model, 8)
        # Said once; from then on it is the order.
        found = verdict(rec)
        found.reads("5 warning order-changed c 0")
        assert "c ran before b; in the first steps it was the other way round" in found.only().message

    def test_a_unit_moves_to_the_front(self, fake_pg: Any, watch: Any) -> None:
        model = self.model(fake_pg(2), lambda step: "ab" if step < 3 else "abc" if step < 6 else "cab")
        with watch(model) as rec:
            steps(model, 8)
        verdict(rec).reads("6 warning order-changed c 0")

    def test_never_raises(self, fake_pg: Any, watch: Any) -> None:
        model = self.model(fake_pg(2), lambda step: "abc" if step < 4 else "cba")
        with watch(model, on_violation="raise") as rec:
            steps(model, 6)
        assert [v.rule for v in rec.violations] == ["order-changed"]

    @pytest.mark.parametrize(
        "order",
        [
            lambda step: "abc" if step % 2 else "ac",  # a layer that is dropped at times
            lambda step: "abc" if step < 5 else "abcab",  # units that run again
            lambda step: ("abc", "bca", "cab")[step % 3],  # an order that varies from the start
            lambda step: "bc" if step < 5 else "abc",  # one that joins later
        ],
    )
    def test_silent(self, fake_pg: Any, watch: Any, order: Any) -> None:
        model = self.model(fake_pg(2), order)
        with watch(model, on_violation="raise") as rec:
            steps(model, 9)
        verdict(rec).silent()

    def test_silent_for_evaluation_in_another_order(self, fake_pg: Any, watch: Any) -> None:
        model = self.model(fake_pg(2), lambda step: "abc" if step % 2 else "cab")
        optimizer = sgd(model)
        with watch(model, on_violation="raise") as rec:
            for _ in range(6):
                with torch.no_grad():
                    model(data())
                steps(model, 1, optimizer=optimizer)
        verdict(rec).silent()
