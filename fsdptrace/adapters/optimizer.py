"""Optimizer steps, through PyTorch's global optimizer-step hooks: which parameters of which groups an optimizer holds.

Presence and identity of parameters only; no value is read. The hooks are global but inert for optimizers that hold no
parameter of a recorded model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdptrace import events as ev
from fsdptrace.adapters.context import BUSY, CONTEXT, STEPPED, clock
from fsdptrace.adapters.fsdp import InstalledModel


@dataclass(slots=True)
class Holding:
    """What one optimizer holds of one model: parameters per group, gathered copies, and others."""

    key: tuple[int, ...]
    groups: dict[int, int]
    temporary: int
    foreign: int
    name: int


class OptimizerSteps:
    """Watches all optimizers of the process for steps that change ``models``, which are held weakly."""

    def __init__(self, models: Iterable[InstalledModel]) -> None:
        self._models: weakref.WeakSet[InstalledModel] = weakref.WeakSet(models)
        self._known: weakref.WeakKeyDictionary[Optimizer, dict[int, Holding]] = weakref.WeakKeyDictionary()
        self._numbers = 0
        self._t0 = 0
        self._handles: list[Any] = []

    def install(self) -> None:
        """Registers the global hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def add(self, model: InstalledModel) -> None:
        """Watches for steps that change ``model`` too."""
        self._models.add(model)

    def remove(self) -> None:
        """Takes them away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._t0 = clock()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        t1 = clock()
        for model in sorted(self._models, key=_number):
            if not model.installed:
                continue
            context = model.context
            try:
                self._record(optimizer, model, t1)
            except Exception as error:
                if context.owner.stop_run(error):
                    raise
                context.owner.fault(error)

    def _record(self, optimizer: Optimizer, model: InstalledModel, t1: int) -> None:
        holding = self._holding(optimizer, model)
        if not holding.groups and not holding.temporary:
            return
        context = model.context
        shared = context.shared
        shared[BUSY] = 1
        model.poll_flags(holding.groups)
        seq = next(context.ids)
        # Changes first: what reads the step wants to know what it changed.
        packed, changed = shared[CONTEXT], context.on[ev.PARAM_CHANGE]
        for group, tensors in holding.groups.items():
            number = next(context.ids)
            context.append((ev.PARAM_CHANGE, number, self._t0, t1, group, seq, packed, 0, tensors, 0, 0, 0))
            changed(number, group, packed, 0, tensors, 0, 0, 0)
        context.emit(
            ev.OPTIMIZER_STEP, seq, self._t0, t1, ev.NONE, context.parent(),
            holding.name, sum(holding.groups.values()), len(holding.groups), holding.temporary, holding.foreign,
        )  # fmt: skip
        # In a backward too (a post-accumulate hook): the step goes on until the next outermost forward all the same.
        shared[STEPPED] = 1

    def _holding(self, optimizer: Optimizer, model: InstalledModel) -> Holding:
        lists = [group["params"] for group in optimizer.param_groups]
        key = tuple(part for own in lists for part in (len(own), id(own[0]) if own else 0, id(own[-1]) if own else 0))
        known = self._known.setdefault(optimizer, {})
        holding = known.get(id(model))
        if holding is not None and holding.key == key:
            return holding
        shards: dict[int, int] = {}
        copies: set[int] = set()
        for hooks in model.groups:
            for param in hooks.group.fsdp_params:
                shards[id(param.sharded_param)] = hooks.id
                unsharded = param.__dict__.get("_unsharded_param")
                if unsharded is not None:
                    copies.add(id(unsharded))
        params = [param for own in lists for param in own]
        groups: dict[int, int] = {}
        temporary = foreign = 0
        for param in params:
            group = shards.get(id(param))
            if group is not None:
                groups[group] = groups.get(group, 0) + 1
            elif id(param) in copies:
                temporary += 1
            else:
                foreign += 1
        # An optimizer has one number, whatever models it holds; one that holds nothing of them needs none.
        name = next((other.name for other in known.values() if other.name), 0)
        if not name and (groups or temporary):
            self._numbers += 1
            name = model.context.owner.text(f"{type(optimizer).__name__}#{self._numbers}")
        made = known[id(model)] = Holding(key, groups, temporary, foreign, name)
        return made


def _number(model: InstalledModel) -> int:
    return model.context.model
