"""Legal training that may surprise: as in test_silence.py, no rule says more than `info`, and nothing stops the run."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from gallery.models import DIM, data, linear, sgd, shard
from gallery.test_silence import Program, blocks, evaluating, every, ids, trained, with_root
from gallery.verdict import verdict
from support.models import Block, Calls
from support.torches import HSDP, since

SURPRISING: list[Program] = []


def legal(*marks: Any, shape: tuple[int, ...] = (4,), names: tuple[str, ...] | None = None) -> Any:
    def add(build: Any) -> Any:
        SURPRISING.append(Program(build, shape, names, marks))
        return build

    return add


def units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# -- methods, hooks, functional calls ----------------------------------------------------------------------------------
@legal()
def generate_registered(mesh: Any) -> Any:
    # generate() calls the module itself, a token at a time, as a forward method: post-forwards inside of a pass.
    model = with_root(mesh)

    def generate(prompt: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            prompt = torch.cat([prompt, model(prompt)[:, -1:].argmax(-1)], 1)
        return prompt

    model.generate = generate
    register_fsdp_forward_method(model, "generate")

    def loss() -> None:
        model(ids()).square().mean().backward()
        with evaluating(model):
            model.generate(ids())

    return trained(model, loss)


@legal()
def loss_as_a_registered_method(mesh: Any) -> Any:
    model = with_root(mesh)
    model.loss = lambda tokens: model(tokens).square().mean()
    register_fsdp_forward_method(model, "loss")
    return trained(model, lambda: model.loss(ids()).backward())


@legal()
def functional_call_with_buffers(mesh: Any) -> Any:
    model = nn.Sequential(*[Calls(lambda self, x: self.lin(x) * self.scale, lin=linear()) for _ in range(3)])
    for block in model:
        block.register_buffer("scale", torch.ones(()))
    shard(model, list(model), mesh)

    def loss() -> None:
        given = {f"{number}.scale": torch.tensor(0.5) for number in range(3)}
        torch.func.functional_call(model, given, (data(),)).square().mean().backward()

    return trained(model, loss)


@legal()
def activations_by_hook(mesh: Any) -> Any:
    # An auxiliary loss on what a forward hook saw of every unit's output.
    model = blocks(mesh)
    seen: list[torch.Tensor] = []
    for block in model:
        block.register_forward_hook(lambda module, args, out: seen.append(out))

    def loss() -> None:
        seen.clear()
        out = model(data())
        (out.square().mean() + sum(x.mean() for x in seen)).backward()

    return trained(model, loss)


@legal()
def backward_hooks_of_modules(mesh: Any) -> Any:
    model = blocks(mesh)
    for block in model:
        block.register_full_backward_hook(lambda module, inputs, outputs: None)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def gradient_by_the_input_alone(mesh: Any) -> Any:
    # A force field: in evaluation the gradient of an energy by its input, training is on the energy.
    model = blocks(mesh)

    def loss() -> None:
        x = data(grad=True)
        torch.autograd.grad(model(x).sum(), x)
        model(data()).square().mean().backward()

    return trained(model, loss)


@legal()
def gradient_inside_the_forward(mesh: Any) -> Any:
    # The same, taken by a module around the energy, in its own forward.
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        energy = self.energy(x)
        if self.training:
            return energy
        return torch.autograd.grad(energy.sum(), x)[0]

    model = Calls(run, energy=shard(nn.Sequential(linear(), linear()), [], mesh))
    shard(model, [], mesh)

    def loss() -> None:
        model.eval()
        model(data(grad=True))
        model.train()
        model(data()).square().mean().backward()

    return trained(model, loss)


# -- frozen, unfrozen, tied --------------------------------------------------------------------------------------------
@legal()
def unfrozen_step_by_step(mesh: Any) -> Any:
    # A unit more is trained in every step, from the head down; optimizers are made anew.
    model = blocks(mesh)
    model.requires_grad_(False)
    waiting = list(model)

    def run() -> None:
        if waiting:
            waiting.pop().requires_grad_(True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        model(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return [model], run


@legal()
def biases_frozen_now_and_then(mesh: Any) -> Any:
    model = blocks(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        for name, param in model.named_parameters():
            param.requires_grad_("bias" not in name or step % 2 == 0)
        model(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return [model], run


@legal()
def alternating_halves(mesh: Any) -> Any:
    # As in GAN training, one half frozen by requires_grad_ while the other learns, both in every step.
    model = blocks(mesh, 4)
    halves = [nn.ModuleList(model[:2]), nn.ModuleList(model[2:])]
    optimizers = [sgd(half) for half in halves]

    def run() -> None:
        for half, optimizer in zip(halves, optimizers, strict=True):
            model.requires_grad_(False)
            half.requires_grad_(True)
            model(data()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.requires_grad_(True)

    return [model], run


@legal(since(2, 7, "grouped units with a tie"))
def tied_in_a_grouped_unit(mesh: Any) -> Any:
    def run(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(tokens)))

    model: Any = Calls(run, emb=nn.Embedding(20, DIM), block=Block(DIM), head=nn.Linear(DIM, 20, bias=False))
    model.head.weight = model.emb.weight
    fully_shard([model.emb, model.head], mesh=mesh)
    shard(model, [model.block], mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def one_block_many_times(mesh: Any) -> Any:
    # One unit for all layers, each call of it checkpointed.
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for _ in range(4):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x

    model = Calls(run, inp=linear(), block=Block(DIM))
    return trained(shard(model, [model.inp, model.block], mesh), lambda: model(data()).square().mean().backward())


@legal()
def weight_norm_in_a_unit(mesh: Any) -> Any:
    model = nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])
    return trained(shard(model, list(model), mesh), lambda: model(data()).square().mean().backward())


# -- evaluation in odd places ------------------------------------------------------------------------------------------
@legal()
def eval_called_between_forward_and_backward(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        out = model(ids())
        model.eval()
        out.square().mean().backward()
        model.train()

    return trained(model, loss)


@legal()
def all_units_opened_for_generation(mesh: Any) -> Any:
    # As FSDP1's summon_full_params: everything gathered by hand, many forwards, everything freed.
    model = with_root(mesh)

    def loss() -> None:
        for unit in units(model):
            unit.unshard()
        with evaluating(model):
            for _ in range(3):
                model(ids())
        for unit in units(model):
            unit.reshard()
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal(since(2, 8, "set_reshard_after_forward is new in it"))
def all_units_kept_open_for_generation(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        model.set_reshard_after_forward(False)
        with evaluating(model):
            for _ in range(3):
                model(ids())
        for unit in units(model):
            unit.reshard()
        model.set_reshard_after_forward(True)
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def a_teacher_of_its_own(mesh: Any) -> Any:
    # Targets from the model itself, without grad, between the forward and its backward.
    model = with_root(mesh)

    def loss() -> None:
        tokens = ids()
        out = model(tokens)
        with torch.no_grad():
            target = model(tokens)
        (out - target).square().mean().backward()

    return trained(model, loss)


# -- parameters and optimizers -----------------------------------------------------------------------------------------
@legal()
def sharpness_aware(mesh: Any) -> Any:
    # SAM: a step up by the gradient, a second forward and backward there, back, then the optimizer's step.
    model = with_root(mesh)

    def loss() -> None:
        tokens = ids()
        model(tokens).square().mean().backward()
        steps = [(p, p.grad.detach() * 0.05) for p in model.parameters()]
        with torch.no_grad():
            for param, up in steps:
                param.add_(up)
        model.zero_grad()
        model(tokens).square().mean().backward()
        with torch.no_grad():
            for param, up in steps:
                param.sub_(up)

    return trained(model, loss)


@legal()
def steps_skipped(mesh: Any) -> Any:
    # As a gradient scaler does it where it finds infinities.
    model = with_root(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        model(ids()).square().mean().backward()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return [model], run


@legal()
def gradients_thrown_away(mesh: Any) -> Any:
    # A batch that is dropped after its backward, gradients and all; another takes its place.
    model = blocks(mesh)

    def loss() -> None:
        for keep in (False, True):
            model(data()).square().mean().backward()
            if not keep:
                model.zero_grad()

    return trained(model, loss)


@legal()
def divided_otherwise(mesh: Any) -> Any:
    model = with_root(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    step = 0

    def loss() -> None:
        nonlocal step
        step += 1
        for unit in units(model):
            for name in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
                if hasattr(unit, name):
                    getattr(unit, name)(float(step))
                    break
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def casts_of_its_own(mesh: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)
    model = shard(nn.Sequential(*[linear() for _ in range(3)]), [], mesh, mp_policy=policy)
    return trained(model, lambda: model(data().bfloat16()).square().mean().backward())


@legal(HSDP, shape=(2, 2), names=("replicate", "shard"))
def hsdp_offloaded_in_bf16(mesh: Any) -> Any:
    # All at once: replicas, mixed precision, offload, checkpointing, accumulation without sync, clipping, two optimizers.
    options = {
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)

    model = Calls(run, layers=nn.ModuleList([Block(DIM) for _ in range(3)]), head=linear())
    shard(model, list(model.layers), mesh, **options)
    optimizers = [torch.optim.AdamW(model.layers.parameters(), lr=0.01), sgd(model.head)]

    def step() -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model(data()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return [model], step


@legal()
def gradient_with_a_graph_of_its_own(mesh: Any) -> Any:
    # The gradient by the input weighs the loss. (A backward through it fails in FSDP2 itself.)
    model = blocks(mesh, reshard_after_forward=False)

    def loss() -> None:
        x = data(grad=True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + gradient.detach().square().mean()).backward()

    return trained(model, loss)


@legal(since(2, 10, "share_comm_ctx is new in it"))
def two_roots_with_one_stream(mesh: Any) -> Any:
    from torch.distributed.fsdp import share_comm_ctx

    one, two = blocks(mesh), blocks(mesh)
    share_comm_ctx([one, two])

    def loss() -> None:
        two(one(data())).square().mean().backward()

    return trained(nn.ModuleList([one, two]), loss)


@legal()
def summed_and_not_averaged(mesh: Any) -> Any:
    model = with_root(mesh)
    for unit in units(model):
        if hasattr(unit, "set_force_sum_reduction_for_comms"):
            unit.set_force_sum_reduction_for_comms(True)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def autocast_around_checkpoints(mesh: Any) -> Any:
    model = Calls(lambda self, x: checkpoint(self.b, self.a(x), use_reentrant=False), a=linear(), b=Block(DIM))
    shard(model, [model.a, model.b], mesh)

    def loss() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data())
        out.float().square().mean().backward()

    return trained(model, loss)


@legal()
def a_teacher_called_inside(mesh: Any) -> Any:
    # Another root, frozen, that the student calls in its own forward.
    teacher = blocks(mesh)
    teacher.requires_grad_(False)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return self.b(self.a(x)) - target

    student = Calls(run, a=linear(), b=linear())
    shard(student, [student.a, student.b], mesh)
    return trained(student, lambda: student(data()).square().mean().backward(), teacher)


@legal()
def parameters_added_to_the_optimizer(mesh: Any) -> Any:
    model = blocks(mesh)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    waiting = [model[0], model[1]]

    def run() -> None:
        if waiting:
            optimizer.add_param_group({"params": list(waiting.pop().parameters())})
        model(data()).square().mean().backward()
        optimizer.step()
        model.zero_grad()

    return [model], run


@legal()
def a_part_runs_in_evaluation_alone(mesh: Any) -> Any:
    # A head that only evaluation uses, and the units in another order there.
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.b(self.a(x))
        return self.probe(self.a(self.b(x)))

    model = Calls(run, a=linear(), b=linear(), probe=linear())
    shard(model, [model.a, model.b, model.probe], mesh)
    model.probe.requires_grad_(False)

    def loss() -> None:
        with evaluating(model):
            model(data())
        model(data()).square().mean().backward()

    return trained(model, loss)


# -- copies and checkpoints --------------------------------------------------------------------------------------------
@legal()
def copied_while_recorded(mesh: Any) -> Any:
    # A wrapped module refuses to be copied; its parts and its state dict do not.
    model = with_root(mesh)

    def loss() -> None:
        model(ids()).square().mean().backward()
        with contextlib.suppress(AssertionError, NotImplementedError):
            copy.deepcopy(model)
        weights = copy.deepcopy(get_model_state_dict(model))
        set_model_state_dict(model, weights)

    return trained(model, loss)


@legal(shape=(1,))
def saved_in_the_background(mesh: Any) -> Any:
    # Staged in the step, written while the next one runs.
    model = with_root(mesh)
    folder = tempfile.TemporaryDirectory()
    saving: list[Any] = []

    def loss() -> None:
        model(ids()).square().mean().backward()
        state = {"model": get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))}
        for earlier in saving:
            earlier.result()
        saving[:] = [dcp.async_save(state, checkpoint_id=f"{folder.name}/{len(saving)}")]

    models, run = trained(model, loss)

    def last() -> None:
        run()
        saving[0].result()

    return models, last


@legal()
def recorded_before_it_has_memory(mesh: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)])
    shard(model, list(model), mesh)
    made: list[Callable[[], None]] = []

    def run() -> None:
        if not made:
            model.to_empty(device="cpu")
            for module in model:
                module.reset_parameters()
            made.append(trained(model, lambda: model(data()).square().mean().backward())[1])
        made[0]()

    return [model], run


@every(SURPRISING)
def test_legal(fake_pg: Any, watch: Any, program: Program) -> None:
    models, run = program.build(fake_pg(*program.shape, names=program.names))
    with watch(models, on_violation="raise") as rec:
        for _ in range(3):
            run()
    verdict(rec).silent()


@every(SURPRISING)
def test_legal_step_by_step(fake_pg: Any, watch: Any, program: Program) -> None:
    """A recording around each iteration, with all fingerprints, which must find nothing either."""
    models, run = program.build(fake_pg(*program.shape, names=program.names))
    for _ in range(3):
        with watch(models, on_violation="raise", fingerprint="all") as rec:
            run()
            rec.step()
    verdict(rec).silent()
