"""The wrappers around gathering, freeing and prefetching of one param group."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from fsdptrace import events as ev
from fsdptrace.adapters.context import (
    BUSY,
    CONTEXT,
    ENTERED,
    GROUP_UNIT,
    HOW,
    ISSUER,
    PARENT,
    REPAIR,
    SOURCE,
    TOP,
    clock,
    implicit,
)  # fmt: skip
from fsdptrace.adapters.group import (
    BACKWARD_PREFETCH,
    DISABLED,
    EXPLICIT_MODE,
    FORWARD_PREFETCH,
    IDLE_OR_POST,
    IMPLICIT_MODE,
    MANUAL,
    OPEN,
    PENDING,
    POST_FORWARD_STATE,
    GroupBase,
    Wrapper,
)  # fmt: skip
from fsdptrace.adapters.look import dtype_number


class Gathering(GroupBase):
    """unshard, wait, reshard, prefetch, discard."""

    # -- gathering and freeing -----------------------------------------------------------------------------------------
    def _unshard(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler = c.on[ev.UNSHARD]
        orig = self.method("unshard")
        entered = ev.UNSHARD + GROUP_UNIT * gid
        flush, model = owner.before_collective, c.model
        post_world, world_of = self.info.post_forward_world, self.info.world
        smaller_mesh = post_world not in (1, world_of)
        usual_dtype = ev.DTYPE_NUMBER.get(self.info.dtype, 0)
        unsharded = type(group._sharded_state).UNSHARDED
        known = self.known  # bytes and dtype of a gather, once measured
        timing = c.timing

        def unshard(async_op: bool = False) -> Any:
            t0 = clock()
            seq = next(ids)
            state = group._sharded_state
            noop = PENDING if group._all_gather_result is not None else OPEN if state is unsharded else 0
            if not noop:
                shared[ENTERED] = entered
                if flush is not None:
                    flush(model)
                elif not known:  # its first gather: where ranks do not agree on the model, the process aborts in it
                    owner.announce(model)
            try:
                result = orig(group, async_op)
            except BaseException as error:
                self._failed(error)
                shared[ENTERED] = 0
                raise
            t1 = clock()
            shared[ENTERED] = 0
            try:
                how = shared[HOW]
                issuer = shared[ISSUER] if how else -1
                parent = shared[PARENT]
                if not parent:  # in no hook of the group's: the user, or FSDPState's repair in a recomputation
                    parent = shared[TOP]
                    shared[BUSY] = 1
                    if group._training_state._value_ >= IDLE_OR_POST and not shared[REPAIR]:
                        how = MANUAL
                        if not noop:
                            c.between.opened_by_hand(self)
                size = 0
                dtype = usual_dtype
                world = post_world if smaller_mesh and state._value_ == POST_FORWARD_STATE else world_of
                if noop:
                    how += noop
                elif group._all_gather_result is None:
                    how += DISABLED
                else:
                    size, dtype = known or self.measure(group._all_gather_result)
                    if timing is not None and timing.on:
                        timing.gather(seq, gid, shared[CONTEXT] % 4, group, async_op)
                context = shared[CONTEXT]
                append((1, seq, t0, t1, gid, parent, context, size, world, dtype, issuer, how))
                handler(seq, gid, context, size, world, dtype, issuer, how)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return unshard

    def measure(self, gathered: Any) -> tuple[int, int]:
        """Bytes and dtype of a gather as PyTorch made it. They do not vary while the hooks are on, so that once is enough."""
        if gathered.all_gather_input_split_sizes:
            output = gathered.all_gather_output
            self.known[:] = output.numel() * output.element_size(), dtype_number(output.dtype)
        else:  # a world of one since torch 2.9: nothing travels, the copy is made all the same
            self.known[:] = self.info.bytes, ev.DTYPE_NUMBER.get(self.info.dtype, 0)
        self.bytes = self.known[0]
        return self.bytes, self.known[1]

    def _wait(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler = c.on[ev.WAIT]
        entered = ev.WAIT + GROUP_UNIT * gid
        orig = self.method("wait_for_unshard")
        timing = c.timing

        def wait_for_unshard() -> Any:
            if group._all_gather_result is None:
                return orig(group)
            t0 = clock()
            seq = next(ids)
            shared[ENTERED] = entered
            if timing is not None and timing.on:
                try:
                    timing.wait(seq, gid, shared[CONTEXT] % 4)
                except Exception as error:
                    owner.fault(error)
            try:
                result = orig(group)
            except BaseException as error:
                self._failed(error)
                shared[ENTERED] = 0
                raise
            t1 = clock()
            shared[ENTERED] = 0
            try:
                if timing is not None and timing.memory_on:
                    self.sample(seq)
                context = shared[CONTEXT]
                size = self.bytes
                append((2, seq, t0, t1, gid, shared[PARENT] or shared[TOP], context, size, 0, 0, 0, 0))
                if self.left is not None:
                    c.between.waited(self)
                handler(seq, gid, context, size, 0, 0, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return wait_for_unshard

    def _to_sharded(self, name: str, to: int) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler = c.on[ev.RESHARD]
        orig = self.method(name)
        states = type(group._sharded_state)
        nothing_to_do = states.SHARDED_POST_FORWARD if to else states.SHARDED
        unsharded = states.UNSHARDED

        def to_sharded() -> Any:
            before = group._sharded_state
            if before is nothing_to_do:
                result = orig(group)
                if shared[PARENT]:
                    return result
                self.known.clear()  # a model that is moved or cast is freed first (FSDPModule._apply)
                self.reduced.clear()
                if (frame := sys._getframe(1)).f_code.co_name == "to_sharded_hook":
                    self.state_dict_hook(frame)
                return result
            t0 = clock()
            seq = next(ids)
            result = orig(group)
            t1 = clock()
            try:
                parent = shared[PARENT]
                cause = 0
                if not parent:  # in no hook of the group's
                    parent = shared[TOP]
                    shared[BUSY] = 1
                    frame = sys._getframe(1)
                    caller = frame.f_code.co_name
                    cause = 2 if caller == "to_sharded_hook" else 3 if caller == "_reset_iter_state" else 1
                context = shared[CONTEXT]
                size = self.bytes if before is unsharded else 0
                append((3, seq, t0, t1, gid, parent, context, size, to, cause, 0, 0))
                handler(seq, gid, context, size, to, cause, 0, 0)
                if self.left is not None:
                    c.between.closed(self, self.left, seq)
                if cause == 2:
                    self.state_dict_hook(frame)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return to_sharded

    # -- prefetching ---------------------------------------------------------------------------------------------------
    def _use_training_state(self) -> Wrapper:
        group, shared = self.group, self.context.shared
        orig = self.method("use_training_state")

        def use_training_state(training_state: Any) -> Any:
            # The only caller is _prefetch_unshard (2.6 to 2.15): "a prefetch targets this group".
            if shared[HOW]:  # whose wrapper below records it
                return orig(group, training_state)
            return _Prefetch(self, orig(group, training_state), training_state._value_)

        return use_training_state

    def _prefetch_unshard(self) -> Wrapper:
        """Implicit backward prefetches: ``_backward_prefetch`` calls it on the group, all others on the class (2.6 to 2.15)."""
        c, gid = self.context, self.id
        append, ids, shared, owner, own = c.append, c.ids, c.shared, c.owner, c.numbers
        handler = c.on[ev.PREFETCH]
        name = "_prefetch_unshard"
        function, others = getattr(type(self.group), name), self.others
        how = BACKWARD_PREFETCH + IMPLICIT_MODE

        def _prefetch_unshard(target: Any, pass_type: str) -> Any:
            orig = others.get(name, function)
            number = own.get(id(target))
            if number is None:  # a group of another root, whose own hooks record it
                implicit[:] = gid + 1, c
                try:
                    return orig(target, pass_type)
                finally:
                    implicit[:] = 0, None
            t0 = clock()
            seq = next(ids)
            outer = shared[PARENT]
            shared[PARENT] = seq
            shared[HOW] = how
            shared[ISSUER] = gid
            try:
                result = orig(target, pass_type)
            finally:
                shared[PARENT] = outer
                shared[HOW] = 0
            try:
                context = shared[CONTEXT]
                append((5, seq, t0, clock(), gid, outer or shared[TOP], context, number, how, 0, 0, 0))
                handler(seq, gid, context, number, how, 0, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return _prefetch_unshard

    def _finalize_backward(self) -> Wrapper:
        c, group = self.context, self.group
        orig = self.method("finalize_backward")

        def finalize_backward() -> Any:
            if group._all_gather_result is None:
                return orig(group)
            t0 = clock()
            seq = next(c.ids)
            result = orig(group)
            self._discarded(seq, t0)
            return result

        return finalize_backward

    def _reset_iter_state(self) -> Wrapper:
        c, group = self.context, self.group
        orig = self.method("_reset_iter_state")

        def _reset_iter_state() -> Any:
            pending = group._all_gather_result is not None
            t0 = clock()
            seq = next(c.ids)
            result = orig(group)
            if pending:
                self._discarded(seq, t0)
            try:
                self.snapshot()
            except Exception as error:
                if c.owner.stop_run(error):
                    raise
                c.owner.fault(error)
            return result

        return _reset_iter_state


class _Prefetch:
    """Stands in for the context manager of ``use_training_state`` and records the prefetch when it ends."""

    __slots__ = ("_hooks", "_inner", "_outer", "_seq", "_state", "_t0")

    def __init__(self, hooks: GroupBase, inner: Any, state: int) -> None:
        self._hooks = hooks
        self._inner = inner
        self._state = state

    def __enter__(self) -> Any:
        result = self._inner.__enter__()
        context = self._hooks.context
        shared = context.shared
        self._t0 = clock()
        self._seq = next(context.ids)
        self._outer = shared[PARENT]
        shared[PARENT] = self._seq
        how = FORWARD_PREFETCH if self._state == 1 else BACKWARD_PREFETCH
        source, owner = implicit
        if source:
            shared[HOW] = how + IMPLICIT_MODE
            shared[ISSUER] = source - 1 if owner is context else ev.NONE
        else:
            shared[HOW] = how + EXPLICIT_MODE
            shared[ISSUER] = shared[SOURCE]
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Any:
        hooks = self._hooks
        context = hooks.context
        shared = context.shared
        how, source, outer = shared[HOW], shared[ISSUER], self._outer
        shared[PARENT] = outer
        shared[HOW] = 0
        result = self._inner.__exit__(kind, error, trace)
        if error is None:
            try:
                packed = shared[CONTEXT]
                parent = outer or shared[TOP]
                context.append((5, self._seq, self._t0, clock(), source, parent, packed, hooks.id, how, 0, 0, 0))
                context.on[ev.PREFETCH](self._seq, source, packed, hooks.id, how, 0, 0, 0)
            except Exception as fault:
                if context.owner.stop_run(fault):
                    raise
                context.owner.fault(fault)
        return result
