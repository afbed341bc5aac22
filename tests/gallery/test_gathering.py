"""Cases on gathering and freeing: what goes wrong, what must be found, and the healthy variant beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fsdptrace.adapters import legacy
from gallery.models import DIM, checkpointed_layers, data, layers, linear, sgd, shard, steps
from gallery.verdict import verdict
from support.models import Calls
from support.torches import RECOMPUTE, since


@pytest.fixture
def old_bookkeeping() -> Iterator[None]:
    """The post-forward of torch 2.9 and older: a recomputation too frees the unit and puts it in the order list."""
    with legacy.old_bookkeeping():
        yield


# -- nested_moe_checkpoint_leak ----------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Two weights of 32 x 8 floats: 2 * 256 * 4 = 2,048 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * DIM, DIM) * 0.1)
        self.down = nn.Parameter(torch.randn(DIM, 4 * DIM) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.up.T) @ self.down.T


def moe(mesh: Any, count: int = 6) -> nn.Module:
    """Checkpointed blocks that are units, with experts inside that are units of their own and not the last to run."""

    def layer() -> nn.Module:
        ffn = Calls(lambda self, x: self.experts(x) * self.router(x).sigmoid(), experts=Experts(), router=nn.Linear(DIM, 1))
        return Calls(lambda self, x: x + self.moe(x + self.attn(x)), attn=linear(), moe=ffn)

    def run(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.layers:
            x = block(x)
        return self.out(x)

    model = Calls(run, emb=nn.Embedding(20, DIM), layers=nn.ModuleList([layer() for _ in range(count)]), out=nn.Linear(DIM, 20))
    for i in range(count):
        fully_shard(model.layers[i].moe.experts, mesh=mesh)
        model.layers[i] = checkpoint_wrapper(model.layers[i])
        fully_shard(model.layers[i], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (2, 16))


def test_nested_moe_checkpoint_leak(fake_pg: Any, watch: Any, old_bookkeeping: None) -> None:
    model = moe(fake_pg(2))
    with watch(model) as rec:
        steps(model, 2, lambda: model(tokens()).square().mean())
    # The recomputation of layer 4 puts its experts last in the order list, behind those of layer 5, whose recomputation put
    # them there a moment before. Their pre-backward prefetches that neighbour, which is done; and so on down to layer 0.
    found = verdict(rec)
    found.reads("""
        0 error gather-after-backward layers.5.moe.experts 2048
        0 error gather-after-backward layers.4.moe.experts 2048
        0 error gather-after-backward layers.3.moe.experts 2048
        0 error gather-after-backward layers.2.moe.experts 2048
        0 error gather-after-backward layers.1.moe.experts 2048
        1 error gather-after-backward layers.5.moe.experts 2048
        1 error gather-after-backward layers.4.moe.experts 2048
        1 error gather-after-backward layers.3.moe.experts 2048
        1 error gather-after-backward layers.2.moe.experts 2048
        1 error gather-after-backward layers.1.moe.experts 2048
    """)
    for v in found.violations:
        n = int(v.fqn.split(".")[1])
        assert v.message.startswith(f"The implicit backward prefetch of layers.{n - 1}.moe.experts gathered {v.fqn} (2,048 B)")
        assert "set_modules_to_backward_prefetch" in v.hint
        assert "2.10" in v.hint


@RECOMPUTE
def test_nested_moe_as_installed(fake_pg: Any, watch: Any) -> None:
    model = moe(fake_pg(2))
    with watch(model, on_violation="raise") as rec:
        steps(model, 2, lambda: model(tokens()).square().mean())
    verdict(rec).reads("")


def nested_layers(
    mesh: Any, units: str, last: bool = True, regions: str = "block", inp: bool = True, **options: Any
) -> nn.Module:
    """Three checkpointed blocks ``x + tanh(b(relu(a(c(x)))))``, or without ``x + tanh()`` where not ``last``, so that they end
    in ``b``. Of ``a``, ``b`` and the block (``o``) those in ``units`` are wrapped; the first two hold 256 bytes. The
    checkpointed regions are the blocks, or one over ``all``. ``inp`` puts a unit in front."""

    def block() -> nn.Module:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = self.b(torch.relu(self.a(self.c(x))))
            return x + y.tanh() if last else y

        return Calls(run, a=linear(), b=linear(), c=linear())

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        if regions == "all":
            return checkpoint(self.blocks, x, use_reentrant=False)
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=regions == "reentrant")
        return x

    model = Calls(run, inp=linear() if inp else nn.Identity(), blocks=nn.Sequential(*[block() for _ in range(3)]))
    if inp:
        fully_shard(model.inp, mesh=mesh)
    for one in model.blocks:
        for unit in units:
            fully_shard(one if unit == "o" else getattr(one, unit), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


OLD_LEAKS: dict[str, tuple[dict[str, Any], str]] = {
    # What the old bookkeeping makes of other shapes. List after the forward: inp a0 b0 o0 a1 b1 o1 a2 b2 o2, index 0 to 9. The
    # recomputation of block 2 appends a2 b2 (10, 11), of block 1 a1 b1 (12, 13), of block 0 a0 b0 (14, 15). b2 at 11 prefetches
    # a2, a2 at 10 finds o2, open; o1 at 6 prefetches b1; a1 at 12 finds b2 at 11, which is over; a0 at 14 finds b1 at 13.
    "both inside": ({"units": "abo"}, "blocks.2.b 256 by blocks.1.a, blocks.1.b 256 by blocks.0.a"),
    # The same with nothing freed after the forward: what is over is closed, the others are open.
    "kept open": (
        {"units": "abo", "reshard_after_forward": False}, "blocks.2.b 256 by blocks.1.a, blocks.1.b 256 by blocks.0.a"
    ),
    "kept open, nothing in front": (
        {"units": "abo", "inp": False, "reshard_after_forward": False},
        "blocks.2.b 256 by blocks.1.a, blocks.1.b 256 by blocks.0.a",
    ),
    # inp b0 o0 b1 o1 b2 o2, then b2 (7), b1 (8), b0 (9): b2 finds o2, open; b1 finds b2; b0 finds b1.
    "the last one inside": ({"units": "bo"}, "blocks.2.b 256 by blocks.1.b, blocks.1.b 256 by blocks.0.b"),
    # The recomputation stops inside b, as soon as the last saved tensor is there: no post-forward, nothing appended.
    "nothing after it": ({"units": "bo", "last": False}, ""),
    # inp o0 o1 o2. o2's backward recomputes all: o0 (4), o1 (5), while o2 is in its backward and returns early. o1 finds o0 and
    # uses it up; o0 at 4 finds o2 at 3. Three weights: 768 bytes.
    "one region over all": ({"units": "o", "regions": "all"}, "blocks.2 768 by blocks.0"),
    # Every layer puts itself in once more: o2 (4) finds itself, o1 (5) finds o2, o0 (6) finds o1.
    "reentrant": ({"units": "o", "regions": "reentrant"}, "blocks.2 768 by blocks.1, blocks.1 768 by blocks.0"),
}  # fmt: skip


@pytest.mark.parametrize("shape", OLD_LEAKS)
def test_other_shapes_of_the_leak(fake_pg: Any, watch: Any, old_bookkeeping: None, shape: str) -> None:
    how, expected = OLD_LEAKS[shape]
    model = nested_layers(fake_pg(2), **how)
    with watch(model) as rec:
        steps(model, 1)
    found = verdict(rec)
    assert {(v.rule, v.severity, v.step) for v in found.violations} <= {("gather-after-backward", "error", 0)}
    issuers = [re.search(r"backward prefetch of (\S+) gathered", v.message)[1] for v in found.violations]
    assert ", ".join(f"{v.fqn} {v.bytes} by {by}" for v, by in zip(found.violations, issuers, strict=True)) == expected


@RECOMPUTE
@pytest.mark.parametrize("shape", OLD_LEAKS)
def test_other_shapes_as_installed(fake_pg: Any, watch: Any, shape: str) -> None:
    model = nested_layers(fake_pg(2), **OLD_LEAKS[shape][0])
    with watch(model, on_violation="raise") as rec:
        steps(model, 2)
    verdict(rec).reads("")


# -- reentrant_ac_leak -------------------------------------------------------------------------------------------------
def test_reentrant_checkpointing_leak(fake_pg: Any, watch: Any, old_bookkeeping: None) -> None:
    model = checkpointed_layers(fake_pg(2), use_reentrant=True)
    with watch(model) as rec:
        steps(model, 2)
    # The same bookkeeping with reentrant checkpointing: the neighbour of layer 3's second entry is layer 3 itself, which is
    # open; that of layer 2's is layer 3; that of layer 1's is layer 2; that of layer 0's is layer 1.
    found = verdict(rec)
    found.reads("""
        0 error gather-after-backward layers.3 256
        0 error gather-after-backward layers.2 256
        0 error gather-after-backward layers.1 256
        1 error gather-after-backward layers.3 256
        1 error gather-after-backward layers.2 256
        1 error gather-after-backward layers.1 256
    """)
    assert [v.message.split(" gathered")[0] for v in found.violations[:3]] == [
        "The implicit backward prefetch of layers.2", "The implicit backward prefetch of layers.1",
        "The implicit backward prefetch of layers.0",
    ]  # fmt: skip


@RECOMPUTE
@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_as_installed(fake_pg: Any, watch: Any, reentrant: bool) -> None:
    model = checkpointed_layers(fake_pg(2), use_reentrant=reentrant)
    with watch(model, on_violation="raise") as rec:
        steps(model, 2)
    verdict(rec).reads("")


# -- pending_forward_prefetch ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefetch", [False, True])
def test_pending_forward_prefetch(fake_pg: Any, watch: Any, prefetch: bool) -> None:
    def run(self: Any, x: torch.Tensor, aux: bool = True) -> torch.Tensor:
        return self.aux(self.trunk(x)) if aux else self.trunk(x)

    model = Calls(run, trunk=linear(), aux=linear())
    shard(model, [model.trunk, model.aux], fake_pg(2))
    if prefetch:
        model.trunk.set_modules_to_forward_prefetch([model.aux])
    optimizer = sgd(model)
    with watch(model) as rec:
        model(data()).sum().backward()
        with torch.no_grad():
            model(data(), aux=False)
        optimizer.step()
        with torch.no_grad():
            model(data())
    found = verdict(rec)
    if not prefetch:
        found.reads("")
        return
    found.reads("0 error pending-gather aux 256")
    v = found.only()
    opened, changed = v.evidence
    assert v.message == (
        f"a gather of aux (256 B) was pending when its parameters changed (event {changed}): the explicit forward prefetch of "
        f"trunk issued it at event {opened}, in this step, and nobody waited for it. The next use will compute with the "
        "parameters of before the change."
    )
    assert "trunk.set_modules_to_forward_prefetch" in v.hint


# -- mistargeted_backward_prefetch -------------------------------------------------------------------------------------
def heads(mesh: Any) -> nn.Module:
    def run(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]

    model = Calls(run, trunk=linear(), heads=nn.ModuleList([linear() for _ in range(4)]))
    return shard(model, [model.trunk, *model.heads], mesh)


def test_mistargeted_backward_prefetch(fake_pg: Any, watch: Any) -> None:
    model = heads(fake_pg(2))
    with watch(model) as rec:
        for keep in ([0, 1, 2, 3], [1, 3]):
            outputs = model(data())
            sum(outputs[i].sum() for i in keep).backward()
            rec.step()
    # Head 3's pre-backward prefetches its neighbour, head 2, and head 1's head 0; neither has a backward. The final callback
    # throws them away unit by unit, in the order of the modules. All heads: nothing.
    found = verdict(rec)
    found.reads("""
        1 warning unused-gather heads.0 256
        1 warning unused-gather heads.2 256
    """)
    first, second = found.violations
    assert "the implicit backward prefetch of heads.1" in first.message
    assert "the implicit backward prefetch of heads.3" in second.message


# -- chunked_loss_head -------------------------------------------------------------------------------------------------
def language_model(mesh: Any) -> nn.Module:
    """A trunk of 256 bytes and a head of 32 x 8 floats, 1,024 bytes, that the forward does not call."""
    model = Calls(lambda self, x: self.trunk(x), trunk=linear(), head=nn.Linear(DIM, 4 * DIM, bias=False))
    return shard(model, [model.trunk, model.head], mesh)


def chunked_step(model: nn.Module, flags: bool) -> None:
    hidden = model(data(8))
    leaf = hidden.detach().requires_grad_()
    if flags:
        model.head.set_requires_gradient_sync(False)
        model.head.set_reshard_after_backward(False)
        model.head.set_reshard_after_forward(False)
    chunks = leaf.chunk(4)
    for i, chunk in enumerate(chunks):
        if flags and i == len(chunks) - 1:
            model.head.set_requires_gradient_sync(True)
            model.head.set_reshard_after_backward(True)
        model.head(chunk).square().sum().backward()
    hidden.backward(leaf.grad)


def test_chunked_loss_plain(fake_pg: Any, watch: Any) -> None:
    model = language_model(fake_pg(2))
    optimizer = sgd(model)
    with watch(model) as rec:
        for _ in range(2):
            chunked_step(model, flags=False)
            optimizer.step()
            optimizer.zero_grad()
    # Four chunks, each gathered for its forward and again for its backward: 8, of which 7 are for nothing: 7 * 1,024 bytes,
    # half of them (one of two ranks) over the wire.
    found = verdict(rec)
    found.reads("""
        0 warning repeated-gather head 7168
        1 warning repeated-gather head 7168
    """)
    assert "gathered 8 times in 4 calls" in found.violations[0].message
    assert "7,168 B again, 3,584 B" in found.violations[0].message
    assert "head.set_reshard_after_backward(False)" in found.violations[0].hint


@since(2, 8, "set_reshard_after_forward is new in it")
def test_chunked_loss_with_the_flags(fake_pg: Any, watch: Any) -> None:
    model = language_model(fake_pg(2))
    optimizer = sgd(model)
    with watch(model, on_violation="raise") as rec:
        for _ in range(2):
            chunked_step(model, flags=True)
            optimizer.step()
            optimizer.zero_grad()
    verdict(rec).reads("")


@pytest.mark.parametrize("kept_open", [False, pytest.param(True, marks=since(2, 8, "set_reshard_after_forward is new in it"))])
def test_chunked_loss_flags_left_on(fake_pg: Any, watch: Any, kept_open: bool) -> None:
    model = language_model(fake_pg(2))
    model.head.set_requires_gradient_sync(False)
    model.head.set_reshard_after_backward(False)
    if kept_open:
        model.head.set_reshard_after_forward(False)
    optimizer = sgd(model)
    with watch(model) as rec:
        for _ in range(2):
            model.head(model(data())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # The head keeps its gradient to itself and its copy over the step: two switches, said at each step. It is open because it
    # was told to be, so that no pairing is broken.
    found = verdict(rec)
    found.reads("""
        0 error missing-reduction head 0
        0 warning flags-at-step head 0
        0 warning flags-at-step head 0
        1 error stale-weights head 1024
        1 error missing-reduction head 0
        1 warning flags-at-step head 0
        1 warning flags-at-step head 0
    """)
    switches = found.of("flags-at-step")
    assert "head.set_requires_gradient_sync(True)" in switches[0].hint
    assert "head.set_reshard_after_backward(True)" in switches[1].hint


# -- forward_prefetch_in_recompute -------------------------------------------------------------------------------------
@RECOMPUTE
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
def test_forward_prefetch_in_recompute(fake_pg: Any, watch: Any, mode: str, prefetch: bool) -> None:
    how = {} if mode == "none" else {"use_reentrant": mode == "reentrant"}
    model = checkpointed_layers(fake_pg(2), **how)
    if prefetch:
        for one, following in zip(model.layers, model.layers[1:], strict=False):
            one.set_modules_to_forward_prefetch([following])
    with watch(model) as rec:
        steps(model, 3)
    found = verdict(rec)
    if not (prefetch and mode == "reentrant"):
        found.reads("")
        return
    # The recomputation of layers 2, 1 and 0 repeats their prefetch of layers 3, 2 and 1, whose backward is over.
    found.reads(
        "\n".join(f"{step} error gather-after-backward layers.{i} 256" for step in range(3) for i in (3, 2, 1))
    )  # fmt: skip
    for v in found.violations:
        issuer = f"layers.{int(v.fqn[-1]) - 1}"
        assert v.message.startswith(f"The explicit forward prefetch of {issuer} gathered {v.fqn}")
        assert "use_reentrant=False" in v.hint


# -- checkpoint_right_after_eval ---------------------------------------------------------------------------------------
def root_with_parameters(mesh: Any) -> nn.Sequential:
    """Three layers of 256 bytes, of which the last belongs to the root."""
    model = nn.Sequential(linear(), linear(), linear())
    return shard(model, list(model)[:2], mesh)


@since(2, 8, "the default policy of a root")
def test_checkpoint_right_after_eval(fake_pg: Any, watch: Any) -> None:
    model = root_with_parameters(fake_pg(2))
    optimizer = sgd(model)
    with watch(model, on_violation="raise") as rec:
        steps(model, 1, optimizer=optimizer)
        with torch.no_grad():
            model(data())
        names = {id(p): name for name, p in model.named_parameters()}
        assert [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]] == ["0.weight", "1.weight", None]
    found = verdict(rec)
    found.reads("0 info unpaired-unshard (root) 256")
    assert "the root's default policy, and legal" in found.only().message
    assert "model.reshard()" in found.only().hint


@since(2, 8, "the default policy of a root")
def test_checkpoint_after_every_eval_is_said_once(fake_pg: Any, watch: Any) -> None:
    model = root_with_parameters(fake_pg(2))
    with watch(model, on_violation="raise") as rec:
        for _ in range(3):
            with torch.no_grad():
                model(data())
            rec.step()
    verdict(rec).reads("0 info unpaired-unshard (root) 256")


def test_checkpoint_while_sharded(fake_pg: Any, watch: Any) -> None:
    model = root_with_parameters(fake_pg(2))
    with watch(model, on_violation="raise") as rec:
        steps(model, 1)
        model.state_dict()
        with torch.no_grad():
            model(data())
        model.reshard()
        model.state_dict()
        out = model(data())
        model.state_dict()  # between forward and backward: closes the root, which is gathered again
        out.sum().backward()
    verdict(rec).silent()
    assert not [v for v in rec.violations if v.rule == "unpaired-unshard"]


# -- accumulation_flags_left_on ----------------------------------------------------------------------------------------
def micro_batches(model: nn.Module, setup: Any) -> None:
    """Two steps of three micro-batches; ``setup(model, last)`` before each."""
    optimizer = sgd(model)
    for _ in range(2):
        for i in range(3):
            setup(model, i == 2)
            model(data()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_last_backward_left_false(fake_pg: Any, watch: Any) -> None:
    model = layers(fake_pg(2))

    def setup(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(False)

    with watch(model) as rec:
        micro_batches(model, setup)
    # The order list is never cleared. From the second micro-batch on, layer 0 finds layer 2 of the one before in front of
    # itself and prefetches it: legal in itself (info, once a step). Nobody clears it, and the optimizer steps.
    found = verdict(rec)
    found.reads("""
        0 info gather-after-backward 2 256
        0 error pending-gather 2 256
        0 warning flags-at-step (model) 0
        1 info gather-after-backward 2 256
        1 error pending-gather 2 256
        1 warning flags-at-step (model) 0
    """)
    v = found.of("pending-gather")[0]
    assert "the implicit backward prefetch of 0" in v.message
    assert "set_is_last_backward(True)" in v.hint


@pytest.mark.parametrize("how", ["correct", "never", "root only"])
def test_gradient_sync_left_off(fake_pg: Any, watch: Any, how: str) -> None:
    model = layers(fake_pg(2))

    def setup(model: Any, last: bool) -> None:
        if how == "correct":
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        else:
            model.set_requires_gradient_sync(how == "root only" and last, recurse=how == "never" or not last)

    with watch(model) as rec:
        micro_batches(model, setup)
    # One violation for the three layers, named after the first; back on for the root alone is not back on. Done correctly, the
    # first micro-batches leave their order in the list, which costs a gather: info.
    found = verdict(rec)
    if how == "correct":
        found.reads("""
            0 info gather-after-backward 2 256
            1 info gather-after-backward 2 256
        """)
        return
    found.reads("""
        0 error missing-reduction 0 0
        0 warning flags-at-step 0 0
        1 error missing-reduction 0 0
        1 warning flags-at-step 0 0
    """)
    assert "3 units (0, 1, 2) were still under set_requires_gradient_sync(False)" in found.of("flags-at-step")[0].message
    v = found.violations[0]
    assert v.message == (
        f"the optimizer stepped (event {v.seq}) without gradients of 3 units (0, 1, 2): they were not reduced, since the last "
        f"backward that made any ran under set_requires_gradient_sync(False) (event {v.evidence[-2]})."
    )
    assert "before the last backward of the step, not after it" in v.hint


# -- stale_weights --------------------------------------------------------------------------------------------------
def test_opened_by_hand_across_the_step(fake_pg: Any, watch: Any) -> None:
    model = layers(fake_pg(2), 2)

    def export() -> None:
        model[0].unshard()
        model[1].unshard()

    with watch(model) as rec:
        steps(model, 3, before_step=export)
    found = verdict(rec)
    # The copies of step 0 serve the forwards of steps 1 and 2.
    found.reads("""
        0 error unpaired-unshard 0 256
        0 error unpaired-unshard 1 256
        1 error stale-weights 0 256
        1 error stale-weights 1 256
        1 error unpaired-unshard 0 256
        1 error unpaired-unshard 1 256
        2 error stale-weights 0 256
        2 error stale-weights 1 256
        2 error unpaired-unshard 0 256
        2 error unpaired-unshard 1 256
    """)
    stale = found.of("stale-weights")[0]
    gathered, changed, used = stale.evidence
    assert stale.message == (
        f"the forward of 0 (event {used}) computes with a copy of old parameters (256 B): gathered at event {gathered}, 1 "
        f"step ago, and an optimizer stepped at event {changed}. A call of unshard() opened it and no reshard() came before "
        "the change."
    )
    v = found.violations[0]
    opened, _ = v.evidence
    assert v.message == (
        f"0 was still open when the optimizer stepped (256 B, 1 parameters): opened at event {opened}, a call of unshard() "
        "opened it and no reshard() followed. The next forward will compute with this copy of the old parameters."
    )
    assert "0.reshard()" in v.hint


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_eval_between_backward_and_step(fake_pg: Any, watch: Any, reshard_after_forward: bool) -> None:
    model = layers(fake_pg(2), 2, reshard_after_forward=reshard_after_forward)

    def evaluate() -> None:
        with torch.no_grad():
            model(data())

    with watch(model) as rec:
        steps(model, 3, before_step=evaluate)
    # With False the units stay open as told: no pairing is broken, but the copies are stale. The eval pass leaves its order
    # behind, which costs the next backward one gather: info.
    stale = "" if reshard_after_forward else "{0} error stale-weights 0 256\n{0} error stale-weights 1 256\n"
    verdict(rec).reads(
        f"{stale.format(1)}1 info unclean-start (model) 0\n1 info gather-after-backward 1 256\n"
        f"{stale.format(2)}2 info gather-after-backward 1 256"
    )


def test_kept_open_over_steps_as_told(fake_pg: Any, watch: Any) -> None:
    model = layers(fake_pg(2), 2, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    with watch(model) as rec:
        steps(model, 3)
    # Both units under one switch: said once a step, named after the first.
    verdict(rec).reads("""
        0 warning flags-at-step 0 0
        1 error stale-weights 0 256
        1 error stale-weights 1 256
        1 warning flags-at-step 0 0
        2 error stale-weights 0 256
        2 error stale-weights 1 256
        2 warning flags-at-step 0 0
    """)


def test_shards_written_while_open(fake_pg: Any, watch: Any) -> None:
    model = layers(fake_pg(2), 2)
    shards = list(model.parameters())
    with watch(model) as rec, torch.no_grad():
        model[0].unshard()
        model[1].unshard()
        for param in shards:
            param.zero_()
        model(data())
    found = verdict(rec)
    found.reads("""
        0 error stale-weights 0 256
        0 error stale-weights 1 256
    """)
    assert "its shards were written at event" in found.violations[0].message
