"""Optimizer steps, through PyTorch's global optimizer-step hooks: which parameters of which groups an optimizer holds.

Presence and identity of parameters only; no value is read. The hooks are global but inert for optimizers that hold no
parameter of a recorded model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdptrace import events as ev
from fsdptrace.adapters.context import BUSY, CONTEXT, STEPPED, clock
from fsdptrace.adapters.facts import some, tell
from fsdptrace.adapters.fsdp import InstalledModel
from fsdptrace.adapters.hooks import GroupHooks
from fsdptrace.adapters.look import count_gradients
from fsdptrace.adapters.names import names_of
from fsdptrace.adapters.wrap import alone, params_of

_COPY, _OUTSIDE, _ORIGINAL, _OLD_SHARD = (
    ev.PARAM_FACTS.index(name + "_in_optimizer") for name in ("copy", "outside", "original", "old_shard")
)
_shard_of = attrgetter("sharded_param")


@dataclass(slots=True)
class Holding:
    """What one optimizer holds of one model: parameters per group, gathered copies (group, position in it), and others.
    ``lost`` has names and bytes of those of them that the model had once: before ``fully_shard``, or as shards.

    ``hooked`` are the groups of which a shard has a post-accumulate-grad hook, looked at in the first steps and rarely after.
    """

    key: tuple[int, ...]
    groups: dict[int, int]
    copies: list[tuple[int, int]]
    foreign: int
    name: int
    title: str
    lost: dict[int, list[tuple[str, int]]]
    hooked: set[int] = field(default_factory=set)
    steps: int = 0

    def taken(self, hooks: GroupHooks) -> int:
        """Parameters of the group without a gradient that have such a hook, which may have taken it."""
        if hooks.id not in self.hooked:
            return 0
        shards = [param.sharded_param for param in hooks.group.fsdp_params]
        return sum(shard.grad is None and _hooked(shard) for shard in shards)


class OptimizerSteps:
    """Watches all optimizers of the process for steps that change ``models``, which are held weakly."""

    def __init__(self, models: Iterable[InstalledModel]) -> None:
        self._models: weakref.WeakSet[InstalledModel] = weakref.WeakSet()
        # What each shard was of that there ever was, by id: a weak reference would keep Module.to() from exchanging it.
        self._shards: dict[int, tuple[int, Any, str, int]] = {}
        self._known: weakref.WeakKeyDictionary[Optimizer, dict[int, Holding]] = weakref.WeakKeyDictionary()
        self._outsiders: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], list[tuple[int, int]]]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = 0
        self._t0 = 0
        self._handles: list[Any] = []
        for model in models:
            self.add(model)

    def install(self) -> None:
        """Registers the global hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def add(self, model: InstalledModel) -> None:
        """Watches for steps that change ``model`` too."""
        self._models.add(model)
        self._remember(model)

    def _remember(self, model: InstalledModel) -> None:
        # Whenever a recording begins, for every parameter: no bytecode of ours for each.
        params = chain.from_iterable(hooks.group.fsdp_params for hooks in model.groups)
        self._shards.update(zip(map(id, map(_shard_of, params)), model.shards_of, strict=True))

    def remove(self) -> None:
        """Takes them away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._t0 = clock()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        t1 = clock()
        holding: Holding | None = None
        for model in sorted(self._models, key=_number):
            if not model.installed:
                continue
            context = model.context
            try:
                its = self._record(optimizer, model, t1)
                if its is not None and its.groups and its.foreign and holding is None:
                    holding = its
                    self._look_outside(optimizer, model, its)
            except Exception as error:
                if context.owner.stop_run(error):
                    raise
                context.owner.fault(error)

    def _look_outside(self, optimizer: Optimizer, model: InstalledModel, holding: Holding) -> None:
        """Parameters beside the model's that are of no recorded model and got a gradient: nobody reduces it."""
        if all(hooks.info.world * hooks.info.replicate_world == 1 for hooks in model.groups):
            return
        known = self._outsiders.get(optimizer)
        if known is None or known[0] != holding.key:
            known = self._outsiders[optimizer] = holding.key, self._find_outside(optimizer)
        key, places = known
        if not places:
            return
        params = [(place, optimizer.param_groups[place[0]]["params"][place[1]]) for place in places]
        got = [(place, param) for place, param in params if param.grad is not None]
        if not got:
            return
        found = {place for place, _ in got}
        self._outsiders[optimizer] = key, [place for place in places if place not in found]
        names = names_of(param for _, param in got)
        ours = [param for _, param in got if id(param) in names]
        if ours:
            text = some([names[id(param)] for param in ours])
            size = sum(param.numel() * param.element_size() for param in ours)
            tell(model.context, _OUTSIDE, ev.NONE, text, detail=f"{len(ours)} {holding.title}", size=size)

    def _find_outside(self, optimizer: Optimizer) -> list[tuple[int, int]]:
        """Positions of the plain trainable parameters that belong to no recorded model and to no part of one."""
        ours: set[int] = set()
        for model in self._models:
            if model.installed:
                ours.update(id(param) for hooks in model.groups for param in params_of(hooks.group))
                ours |= model.facts.named
        return [
            (i, j)
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
            if id(param) not in ours and alone(param)
        ]

    def _record(self, optimizer: Optimizer, model: InstalledModel, t1: int) -> Holding | None:
        holding = self._holding(optimizer, model)
        if not holding.groups and not holding.copies and not holding.lost:
            return None
        holding.steps += 1
        if holding.steps < 4 or not holding.steps % 128:
            owned = [model.groups[group] for group in holding.groups]
            holding.hooked = {hooks.id for hooks in owned if any(_hooked(p.sharded_param) for p in hooks.group.fsdp_params)}
        context, groups = model.context, model.groups
        unsharded = type(groups[0].group._sharded_state).UNSHARDED
        shared = context.shared
        shared[BUSY] = 1
        model.poll_flags(holding.groups)
        seq = next(context.ids)
        # Changes first: what reads the step wants to know what it changed.
        packed, changed = shared[CONTEXT], context.on[ev.PARAM_CHANGE]
        kind, append, ids, t0, hooked = ev.PARAM_CHANGE, context.append, context.ids, self._t0, holding.hooked
        for group, tensors in holding.groups.items():
            number = next(ids)
            hooks = groups[group]
            unreduced = 0
            if hooks.group._sharded_state is unsharded:
                unreduced = count_gradients(hooks.group.fsdp_params)
            if hooks.left is not None:
                model.between.stepped(hooks)
            taken = holding.taken(hooks) if hooked else 0
            append((kind, number, t0, t1, group, seq, packed, 0, tensors, unreduced, taken, 0))
            changed(number, group, packed, 0, tensors, unreduced, taken, 0)
        for fact, lost in holding.lost.items() if holding.steps == 1 else ():
            size = sum(size for _, size in lost)
            tell(context, fact, ev.NONE, some([name for name, _ in lost]), detail=f"{len(lost)} {holding.title}", size=size)
        for group, index in holding.copies:
            model.between.tell(groups[group], _COPY, index, holding.title, seq)
        context.emit(
            ev.OPTIMIZER_STEP, seq, self._t0, t1, ev.NONE, context.parent(),
            holding.name, sum(holding.groups.values()), len(holding.groups), len(holding.copies), holding.foreign,
        )  # fmt: skip
        # In a backward too (a post-accumulate hook): the step goes on until the next outermost forward all the same.
        shared[STEPPED] = 1
        return holding

    def _holding(self, optimizer: Optimizer, model: InstalledModel) -> Holding:
        lists = [group["params"] for group in optimizer.param_groups]
        ends = (part for own in lists for part in (len(own), id(own[0]) if own else 0, id(own[-1]) if own else 0))
        key = (model.between.loads, *ends)
        known = self._known.setdefault(optimizer, {})
        holding = known.get(id(model))
        if holding is not None and holding.key == key:
            return holding
        shards: dict[int, int] = {}
        copies: dict[int, tuple[int, int]] = {}
        for hooks in model.groups:
            for index, param in enumerate(hooks.group.fsdp_params):
                shards[id(param.sharded_param)] = hooks.id
                unsharded = param.__dict__.get("_unsharded_param")
                if unsharded is not None:
                    copies[id(unsharded)] = hooks.id, index
        params = [param for own in lists for param in own]
        groups: dict[int, int] = {}
        held: list[tuple[int, int]] = []
        foreign = 0
        lost: dict[int, list[tuple[str, int]]] = {}
        originals = self._originals(model)
        for param in params:
            group = shards.get(id(param))
            if group is not None:
                groups[group] = groups.get(group, 0) + 1
            elif id(param) in copies:
                held.append(copies[id(param)])
            else:
                foreign += 1
                mark = getattr(param, "_fsdp_orig_uid", None)
                was = self._shards.get(id(param))
                if mark in originals and param.grad is None:  # one with a gradient is used elsewhere
                    lost.setdefault(_ORIGINAL, []).append(originals[mark])
                elif (
                    was is not None
                    and was[:2] == (id(model), param.shape)
                    and isinstance(param, DTensor)
                    and param.grad is None
                ):
                    lost.setdefault(_OLD_SHARD, []).append(was[2:])
        # An optimizer has one number, whatever models it holds; one that holds nothing of them needs none.
        name = next((other.name for other in known.values() if other.name), 0)
        title = next((other.title for other in known.values() if other.title), "")
        if not name and (groups or held or lost):
            self._numbers += 1
            title = f"{type(optimizer).__name__}#{self._numbers}"
            name = model.context.owner.text(title)
        made = known[id(model)] = Holding(key, groups, held, foreign, name, title, lost)
        self._remember(model)
        return made

    def _originals(self, model: InstalledModel) -> dict[Any, tuple[str, int]]:
        """Names and bytes by the mark that ``fully_shard`` leaves on the parameter that it replaces (torch 2.13)."""
        found: dict[Any, tuple[str, int]] = {}
        for hooks in model.groups:
            for param, info in zip(hooks.group.fsdp_params, hooks.info.params, strict=True):
                mark = getattr(param, "_orig_param_uid", None)
                if mark is not None:
                    found[mark] = info.name, info.bytes
        return found


def _hooked(shard: Any) -> bool:
    return bool(getattr(shard, "_post_accumulate_grad_hooks", None))


def _number(model: InstalledModel) -> int:
    return model.context.model
