"""Puts the hooks on one model's own objects and takes them off again, leaving every ``__dict__`` and hook list as it was.

Per param group: instance attributes that shadow the methods (looked up at each call in 2.6 to 2.15). Per unit: a forward
pre-hook before FSDP2's own and a forward hook after it that runs on exceptions too. Per FSDPState: ``_pre_backward``
(registered on outputs, so that it counts from the next forward on) and ``_root_post_backward_final_callback``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters.between import Between
from fsdptrace.adapters.compat import GROUP_METHODS
from fsdptrace.adapters.compiler import not_compiled
from fsdptrace.adapters.context import (
    BACKWARD_SEQ,
    CONTEXT,
    DEPTH,
    FINAL,
    RECOMPUTE_DEPTH,
    REPAIR,
    SOURCE,
    Context,
    clock,
    graph_task_id,
)  # fmt: skip
from fsdptrace.adapters.describe import Described, Unit
from fsdptrace.adapters.facts import Facts
from fsdptrace.adapters.group import PRE_BACKWARD_STATE
from fsdptrace.adapters.hooks import GroupHooks
from fsdptrace.adapters.look import all_switches_of, flags_of
from fsdptrace.adapters.parts import PartHooks
from fsdptrace.adapters.units import Original, UnitHooks, leaves, put_over, take_back
from fsdptrace.model_map import ModelMap


class InstalledModel:
    """The hooks of one model: made once, put on and taken off as often as recording starts and ends.

    Args:
        context: what the hooks share.
        described: the model map and PyTorch's own objects.
    """

    def __init__(self, context: Context, described: Described) -> None:
        self.context = context
        self.map: ModelMap = described.map
        self.units = described.units
        self.groups = [
            GroupHooks(context, group, info) for group, info in zip(described.groups, described.map.groups, strict=True)
        ]
        self.between = context.between = Between(context, self.groups)
        self.facts = context.facts = Facts(context, self.groups, self._described)
        self.installed = False
        # What each parameter's shard is of: this model, the parameter's shape, name and bytes. In the order of the groups.
        self.shards_of = [
            (id(self), param._orig_size, info.name, info.bytes)
            for hooks in self.groups
            for param, info in zip(hooks.group.fsdp_params, hooks.info.params, strict=True)
        ]
        self._units = [self._prepare(unit) for unit in self.units]
        self._parts = PartHooks(((unit.modules, unit.groups) for unit in self.units), self.part_failed)
        self._classes = {type(hooks.group) for hooks in self.groups}
        self._methods = self._class_methods()

    def _described(self) -> Described:
        return Described(self.map, self.units, [hooks.group for hooks in self.groups])

    def _class_methods(self) -> list[Any]:
        """The functions that the wrappers call, which somebody may patch between two recordings."""
        return [getattr(cls, name, None) for cls in self._classes for name in (*GROUP_METHODS, "_reset_iter_state")]

    # -- install and remove --------------------------------------------------------------------------------------------
    def install(self, known: Callable[[int], tuple[bool, bool, int] | None]) -> None:
        """Puts the hooks on and records a snapshot of every group that is not as ``known(group)`` says it was left, as
        ``(open, pending, training state)``. No-op when they are on."""
        if self.installed:
            return
        self.context.reset()
        self.context.numbers.update((id(hooks.group), hooks.id) for hooks in self.groups)
        self.between.objects = [hooks.group for hooks in self.groups]
        self.context.polled = None
        for hooks in self.groups:
            put_over(hooks.group.__dict__, hooks.wrappers, hooks.others)
        for unit in self._units:
            unit.put_on()
        self._parts.put_on()
        self.context.units, self.context.watch_parts = self.units, self._parts.watch
        self._parts.watch(True)
        self.installed = True
        for hooks in self.groups:
            hooks.snapshot(known(hooks.id))
        self.poll_flags()

    def remove(self) -> None:
        """Takes the hooks off. Safe from inside a hook; no-op when they are off."""
        if not self.installed:
            return
        self.installed = False
        for hooks in self.groups:
            take_back(hooks.group.__dict__, hooks.wrappers, hooks.others)
        for unit in self._units:
            unit.take_off()
        self._parts.take_off()
        self.context.units = []

    def let_go(self) -> None:
        """Drops every strong reference to the model; :meth:`take_hold` gets them back as long as it lives."""
        self.remove()
        self.context.roots = []
        self.between.objects = []
        self.context.numbers.clear()
        for hooks in self.groups:
            hooks.let_go()
        for unit in self._units:
            unit.let_go()

    def take_hold(self) -> bool:
        """Gets the references back. False when the model is gone or was wrapped anew, so that it must be described again."""
        if self._methods != self._class_methods() or not all(unit.take_hold() for unit in self._units):
            return False
        if not all(hooks.take_hold() for hooks in self.groups):
            return False
        # Once the root is initialised its wrap can no longer change; before, fully_shard may have been called since.
        return any(unit.unit.state is not None and unit.unit.state._is_root for unit in self._units)

    def begin_inside(self, module: nn.Module, args: Any) -> None:
        """What the hook before ``module``'s forward does, for hooks that were put on inside that very call: PyTorch had
        collected the pre-hooks to run before."""
        for hooks in self._units:
            if any(module is own for own in hooks.unit.modules):
                hooks.begin(module, args)

    def has(self, part: nn.Module) -> bool:
        """Whether ``part`` is a module of the model."""
        return any(part is module for unit in self.units for own in unit.modules for module in own.modules())

    def part_failed(self, part: nn.Module, error: BaseException) -> None:
        """``error``, which says that parameters are not gathered, leaves a part of a unit outside forwards and backwards."""
        c = self.context
        if c.shared[BACKWARD_SEQ]:  # the hooks stay on in a backward that runs no forward
            return
        try:
            unit = next(unit for unit in reversed(self.units) if any(part is m for own in unit.modules for m in own.modules()))
            c.note_exception(error, unit.info.groups[0] if unit.info.groups else ev.NONE, unit.info.id)
        except Exception as fault:
            c.owner.fault(fault)

    def poll_flags(self, groups: Iterable[int] | None = None) -> None:
        """Records switches of ``groups`` (of all, if not given) that were changed since they were last seen; called when an
        optimizer steps and at a step."""
        now = list(map(all_switches_of, self.between.objects))
        if now == self.context.polled:
            return
        for hooks in self.groups if groups is None else [self.groups[group] for group in groups]:
            flags = flags_of(hooks.group)
            if flags != hooks.flags:
                hooks.flags_changed(flags)
        if groups is None:
            self.context.polled = now

    # -- making the hooks ----------------------------------------------------------------------------------------------
    def _prepare(self, unit: Unit) -> UnitHooks:
        methods: dict[str, Callable[..., Any]] = {}
        others: dict[str, Any] = {}
        if unit.state is not None:
            methods["_pre_backward"] = self._state_pre_backward(unit, Original(unit.state, "_pre_backward", others))
            # Hooks hold these two bound methods; only methods of register_fsdp_forward_method look them up at each call.
            begins, ends = Original(unit.state, "_pre_forward", others), Original(unit.state, "_post_forward", others)
            methods["_pre_forward"] = not_compiled(self._method_begins(unit, begins))
            methods["_post_forward"] = not_compiled(self._method_ends(unit, ends))
            final = Original(unit.state, "_root_post_backward_final_callback", others)
            methods["_root_post_backward_final_callback"] = self._final_callback(unit, final)
        return UnitHooks(unit, self._begin(unit), self._ready(unit), self._end(unit), methods, others)

    def _begin(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        c = self.context
        shared, owner = c.shared, c.owner
        source = unit.info.groups[0] if unit.info.groups else ev.NONE
        unit_id = unit.info.id

        def begin(module: nn.Module, args: Any) -> None:
            try:
                shared[SOURCE] = source
                if graph_task_id() != -1:
                    if not shared[BACKWARD_SEQ]:
                        c.open_backward()
                    c.watch_parts(False)
                    shared[RECOMPUTE_DEPTH] += 1
                    shared[CONTEXT] |= ev.PASS_RECOMPUTE
                    shared[REPAIR] = 1
                    return
                if shared[BACKWARD_SEQ]:
                    c.close_backward()
                if unit.state is not None and unit.state._training_state._value_ == PRE_BACKWARD_STATE:
                    shared[REPAIR] = 1  # left so by a backward that failed: FSDPState gathers what is closed, not the user
                if not shared[DEPTH]:
                    c.open_forward(unit_id, clock(), unit.state)
                shared[DEPTH] += 1
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)

        return begin

    def _method_begins(self, unit: Unit, orig: Original) -> Callable[..., Any]:
        """A forward method of the user's begins: what the forward hooks see of a forward, without hooks."""
        begin, ready = self._begin(unit), self._ready(unit)

        def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.installed:
                return orig.later(module, args, kwargs)
            begin(module, args)
            try:
                result = orig(module, args, kwargs)
            except BaseException:
                self.context.abandon_forward()
                raise
            ready(module, args)
            return result

        return _pre_forward

    def _method_ends(self, unit: Unit, orig: Original) -> Callable[..., Any]:
        end = self._end(unit)

        def _post_forward(module: nn.Module, input: Any, output: Any) -> Any:
            if not self.installed:
                return orig.later(module, input, output)
            result = orig(module, input, output)
            end(module, input, result)
            return result

        return _post_forward

    def _ready(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        """The hook after FSDP2's own: in a recomputation it records the pre-forward that FSDPState returned early from,
        when what it may have repaired (torch 2.11 and newer gather what is closed) is done."""
        c = self.context
        shared, owner = c.shared, c.owner
        early = self._early_return(unit, ev.PRE_FORWARD)
        unit_id = unit.info.id

        def ready(module: nn.Module, args: Any) -> None:
            shared[REPAIR] = 0
            if c.collect is not None or shared[RECOMPUTE_DEPTH]:
                try:
                    if c.collect is not None:
                        c.collect(unit_id, args)
                    if shared[RECOMPUTE_DEPTH]:
                        early()
                except Exception as error:
                    if owner.stop_run(error):
                        raise
                    owner.fault(error)

        return ready

    def _end(self, unit: Unit) -> Callable[[nn.Module, Any, Any], None]:
        c = self.context
        shared, owner = c.shared, c.owner
        early = self._early_return(unit, ev.POST_FORWARD)
        unit_id = unit.info.id
        group = unit.info.groups[0] if unit.info.groups else ev.NONE
        exc_info = sys.exc_info

        def end(module: nn.Module, args: Any, output: Any) -> None:
            try:
                if output is None and (error := exc_info()[1]) is not None and leaves(error, module):
                    if type(error).__name__ != "_StopRecomputationError":
                        c.note_exception(error, group, unit_id)
                elif shared[CONTEXT] % 4 == ev.PASS_RECOMPUTE:
                    early()
                if shared[BACKWARD_SEQ] and shared[RECOMPUTE_DEPTH]:
                    shared[REPAIR] = 0
                    shared[RECOMPUTE_DEPTH] -= 1
                    if not shared[RECOMPUTE_DEPTH]:
                        shared[CONTEXT] -= ev.PASS_RECOMPUTE - ev.PASS_BACKWARD
                    return
                depth = shared[DEPTH]
                if depth == 1:
                    c.close_forward(clock())
                elif depth:
                    shared[DEPTH] = depth - 1
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)

        return end

    def _early_return(self, unit: Unit, kind: int) -> Callable[[], None]:
        """Records the hook that FSDPState skips in a recomputation: it returns early in state PRE_BACKWARD."""
        c = self.context
        shared = c.shared
        mine = [hooks for hooks in self.groups if hooks.info.unit == unit.info.id]
        handler = c.on[kind]

        def early() -> None:
            state = unit.state
            if state is None or state._training_state._value_ != PRE_BACKWARD_STATE:
                return
            for hooks in mine:
                now = clock()
                gid = hooks.id
                before = hooks.group._training_state._value_
                context = shared[CONTEXT]
                grad = 1 if torch.is_grad_enabled() else 0
                data = (before, before, 3, grad, 0) if kind == ev.PRE_FORWARD else (before, before, 0, 0, 0)
                seq = next(c.ids)
                c.append((kind, seq, now, now, gid, c.parent(), context, *data))
                handler(seq, gid, context, *data)

        return early

    def _state_pre_backward(self, unit: Unit, orig: Original) -> Callable[[Any], Any]:
        c = self.context
        shared = c.shared
        source = unit.info.groups[0] if unit.info.groups else ev.NONE

        def _pre_backward(grad: Any) -> Any:
            if not self.installed:  # a tensor of a recording that has ended
                return orig.later(grad)
            if not shared[BACKWARD_SEQ]:
                c.open_backward()
            shared[SOURCE] = source
            return orig(grad)

        return _pre_backward

    def _final_callback(self, unit: Unit, orig: Original) -> Callable[[], Any]:
        c = self.context
        shared, owner = c.shared, c.owner

        def _root_post_backward_final_callback() -> Any:
            if not self.installed:
                return orig.later()
            shared[FINAL] = 1
            timing = c.timing if c.timing is not None and c.timing.on else None
            try:
                if timing is not None:
                    timing.before_final()
            except Exception as error:
                owner.fault(error)
            try:
                result = orig()
            finally:
                shared[FINAL] = 0
            try:
                if timing is not None:
                    timing.after_final(unit.state._comm_ctx)
                if shared[BACKWARD_SEQ]:
                    if len(c.roots) != 1:
                        c.roots = self._roots()
                    c.final_callback_done(bool(unit.state._state_ctx.is_last_backward))
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return _root_post_backward_final_callback

    def _roots(self) -> list[Any]:
        """The distinct iteration contexts of the model's states: one per root once they are initialised."""
        contexts = {id(unit.state._state_ctx): unit.state._state_ctx for unit in self.units if unit.state}
        return list(contexts.values())
