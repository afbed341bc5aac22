"""The wrappers around one param group's methods. Each is a closure with the wrapped method's exact signature.

Laws that hold here (docs/design.md): no dispatcher operator, no tensor held, nothing synchronised; the wrapped method
gets its arguments untouched and its result is returned as it is; a fault of ours never reaches training. The training
thread pays for every line, so that constants live in the closure and an event is one ``append`` of a tuple of integers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CellType, TracebackType
from typing import Any

import torch

from fsdptrace import events as ev
from fsdptrace.adapters.compat import last_reduce_scatter_input
from fsdptrace.adapters.context import (
    BACKWARD_SEQ,
    BUSY,
    CONTEXT,
    ENTERED,
    FINAL,
    GROUP_UNIT,
    HOW,
    IMPLICIT,
    ISSUER,
    OUTER_GRAD,
    PARENT,
    REPAIR,
    SOURCE,
    TOP,
    Context,
    clock,
)  # fmt: skip
from fsdptrace.adapters.describe import dtype_name
from fsdptrace.model_map import GroupInfo, usual_flags

Wrapper = Callable[..., Any]
MANUAL = ev.pack_how(mode=ev.MODES.index("manual"))
FORWARD_PREFETCH = ev.pack_how(direction=1)
BACKWARD_PREFETCH = ev.pack_how(direction=2)
IMPLICIT_MODE = ev.pack_how(mode=1)
EXPLICIT_MODE = ev.pack_how(mode=2)
OPEN, PENDING, DISABLED = 1, 2, 3  # positions in NOOPS
UNSHARDED = 3
POST_FORWARD_STATE = 2
PRE_BACKWARD_STATE = 2
IDLE_OR_POST = 3  # training states from here on: not in a forward or a pre-backward


def dtype_number(dtype: torch.dtype) -> int:
    """The number that records carry for ``dtype``; 0 when it is none of :data:`~fsdptrace.events.DTYPES`."""
    return ev.DTYPE_NUMBER.get(dtype_name(dtype), 0)


class GroupHooks:
    """Wrappers of one FSDPParamGroup, by method name, and what they remember."""

    def __init__(self, context: Context, group: Any, info: GroupInfo) -> None:
        self.context = context
        self.group = group
        self.info = info
        self.id = info.id
        self.bytes = info.bytes
        self.flags = usual_flags(info)
        self.known: list[int] = []
        self.reduced: list[Any] = []
        self.shared_with_others = False
        self.others: dict[str, Any] = {}
        self.wrappers: dict[str, Wrapper] = {
            "unshard": self._unshard(),
            "wait_for_unshard": self._wait(),
            "_to_sharded": self._to_sharded("_to_sharded", 0),
            "_to_sharded_post_forward": self._to_sharded("_to_sharded_post_forward", 1),
            "use_training_state": self._use_training_state(),
            "_backward_prefetch": self._backward_prefetch(),
            "pre_forward": self._pre_forward(),
            "post_forward": self._post_forward(),
            "pre_backward": self._pre_backward(),
            "post_backward": self._post_backward(),
            "finalize_backward": self._finalize_backward(),
        }
        if hasattr(group, "_reset_iter_state"):
            self.wrappers["_reset_iter_state"] = self._reset_iter_state()
        self._reference = weakref.ref(group)
        self._cells = self._strong_cells()

    def method(self, name: str) -> Callable[..., Any]:
        """The method to call with the group as first argument: the class's function, which keeps no group alive, or what
        somebody else put on the instance before us."""
        function: Callable[..., Any] = getattr(type(self.group), name)
        if name not in self.group.__dict__:
            return function
        self.shared_with_others = True
        others = self.others

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            own = others.get(name)
            return function(group, *args, **kwargs) if own is None else own(*args, **kwargs)

        return method

    # -- keeping no model alive ----------------------------------------------------------------------------------------
    def _strong_cells(self) -> tuple[list[CellType], list[CellType]]:
        """Closure cells that hold the group, and those that hold its list of parameters."""
        groups, params = [], []
        for wrapper in self.wrappers.values():
            for cell in wrapper.__closure__ or ():
                if cell.cell_contents is self.group:
                    groups.append(cell)
                elif cell.cell_contents is self.group.fsdp_params:
                    params.append(cell)
        return groups, params

    def let_go(self) -> None:
        """Drops every strong reference to the group: while no recording is active nothing of ours keeps a model alive."""
        self.group = None
        self.others.clear()
        groups, params = self._cells
        for cell in groups:
            cell.cell_contents = None
        for cell in params:
            cell.cell_contents = None

    def take_hold(self) -> bool:
        """The inverse of :meth:`let_go`. False when the group is gone or somebody else's methods are on it."""
        group = self._reference()
        if group is None or self.shared_with_others or not self.wrappers.keys().isdisjoint(group.__dict__):
            return False
        self.group = group
        self.known.clear()
        self.reduced.clear()
        groups, params = self._cells
        for cell in groups:
            cell.cell_contents = group
        for cell in params:
            cell.cell_contents = group.fsdp_params
        return True

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

        def unshard(async_op: bool = False) -> Any:
            t0 = clock()
            seq = next(ids)
            state = group._sharded_state
            noop = PENDING if group._all_gather_result is not None else OPEN if state is unsharded else 0
            if not noop:
                shared[ENTERED] = entered
                if flush is not None:
                    flush(model)
            try:
                result = orig(group, async_op)
            except BaseException as error:
                self._failed(error)
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
                size = 0
                dtype = usual_dtype
                world = post_world if smaller_mesh and state._value_ == POST_FORWARD_STATE else world_of
                if noop:
                    how += noop
                elif group._all_gather_result is None:
                    how += DISABLED
                else:
                    size, dtype = known or self.measure(group._all_gather_result)
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
        orig = self.method("wait_for_unshard")

        def wait_for_unshard() -> Any:
            if group._all_gather_result is None:
                return orig(group)
            t0 = clock()
            seq = next(ids)
            try:
                result = orig(group)
            except BaseException as error:
                self._failed(error)
                raise
            t1 = clock()
            try:
                context = shared[CONTEXT]
                size = self.bytes
                append((2, seq, t0, t1, gid, shared[PARENT] or shared[TOP], context, size, 0, 0, 0, 0))
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
                return orig(group)
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
                    caller = sys._getframe(1).f_code.co_name
                    cause = 2 if caller == "to_sharded_hook" else 3 if caller == "_reset_iter_state" else 1
                context = shared[CONTEXT]
                size = self.bytes if before is unsharded else 0
                append((3, seq, t0, t1, gid, parent, context, size, to, cause, 0, 0))
                handler(seq, gid, context, size, to, cause, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return to_sharded

    # -- prefetching ---------------------------------------------------------------------------------------------------
    def _use_training_state(self) -> Wrapper:
        group = self.group
        orig = self.method("use_training_state")

        def use_training_state(training_state: Any) -> _Prefetch:
            # The only caller is _prefetch_unshard (2.6 to 2.15): "a prefetch targets this group".
            return _Prefetch(self, orig(group, training_state), training_state._value_)

        return use_training_state

    def _backward_prefetch(self) -> Wrapper:
        shared, group, gid = self.context.shared, self.group, self.id
        orig = self.method("_backward_prefetch")

        def _backward_prefetch() -> Any:
            shared[IMPLICIT] = gid + 1
            try:
                return orig(group)
            finally:
                shared[IMPLICIT] = 0

        return _backward_prefetch

    # -- forward -------------------------------------------------------------------------------------------------------
    def _pre_forward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler = c.on[ev.PRE_FORWARD]
        orig = self.method("pre_forward")
        grad_enabled = torch.is_grad_enabled

        def pre_forward(module: Any, args: Any, kwargs: Any) -> Any:
            t0 = clock()
            seq = next(ids)
            outer = shared[PARENT]
            shared[PARENT] = seq
            before = group._training_state._value_
            try:
                result = orig(group, module, args, kwargs)
            except BaseException as error:
                shared[PARENT] = outer
                self._failed(error)
                raise
            t1 = clock()
            shared[PARENT] = outer
            try:
                grad = input_grad = 1
                if result[0] is args and result[1] is kwargs:
                    # _register_post_backward_hook gives new containers when it hooked a tensor; here it did not.
                    grad = 1 if grad_enabled() else 2 if shared[OUTER_GRAD] else 0
                    if before == 1:
                        input_grad = 3  # a further module of a grouped unit: the first one was asked
                    else:
                        input_grad = unhooked_inputs(args, kwargs) if grad == 1 else 0
                context = shared[CONTEXT]
                after = group._training_state._value_
                append((6, seq, t0, t1, gid, outer or shared[TOP], context, before, after, input_grad, grad, 0))
                handler(seq, gid, context, before, after, input_grad, grad, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return pre_forward

    def _post_forward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler = c.on[ev.POST_FORWARD]
        orig = self.method("post_forward")

        def post_forward(module: Any, input: Any, output: Any) -> Any:
            t0 = clock()
            seq = next(ids)
            outer = shared[PARENT]
            shared[PARENT] = seq
            before = group._training_state._value_
            try:
                result = orig(group, module, input, output)
            finally:
                shared[PARENT] = outer
            t1 = clock()
            try:
                if (group.post_forward_mesh_info is not None) != bool(self.flags & 8):  # used here: reshard_after_forward
                    self.flags_changed(flags_of(group), seq)
                context = shared[CONTEXT]
                after = group._training_state._value_
                append((7, seq, t0, t1, gid, outer or shared[TOP], context, before, after, 0, 0, 0))
                handler(seq, gid, context, before, after, 0, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return post_forward

    # -- backward ------------------------------------------------------------------------------------------------------
    def _pre_backward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler = c.on[ev.PRE_BACKWARD]
        orig = self.method("pre_backward")

        def pre_backward(default_prefetch: bool, *unused: Any) -> Any:
            before = group._training_state._value_
            if before == PRE_BACKWARD_STATE:  # a further output of the unit: PyTorch returns at once
                return orig(group, default_prefetch, *unused)
            if not shared[BACKWARD_SEQ]:
                c.open_backward()
            t0 = clock()
            seq = next(ids)
            outer = shared[PARENT]
            shared[PARENT] = seq
            try:
                result = orig(group, default_prefetch, *unused)
            except BaseException as error:
                shared[PARENT] = outer
                self._failed(error)
                raise
            t1 = clock()
            shared[PARENT] = outer
            try:
                context = shared[CONTEXT]
                after = group._training_state._value_
                append((8, seq, t0, t1, gid, outer or shared[TOP], context, before, after, 0, 0, 0))
                handler(seq, gid, context, before, after, 0, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return pre_backward

    def _post_backward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, shared, owner = c.append, c.ids, c.shared, c.owner
        handler, scattered = c.on[ev.POST_BACKWARD], c.on[ev.REDUCE_SCATTER]
        orig = self.method("post_backward")
        params = group.fsdp_params
        entered = ev.POST_BACKWARD + GROUP_UNIT * gid
        flush, model = owner.before_collective, c.model
        trainable, world, plain = self.info.trainable, self.info.world, self.info.replicate_world == 1
        reduced = self.reduced

        def post_backward(*unused: Any) -> Any:
            if not shared[BACKWARD_SEQ]:
                c.open_backward()
            t0 = clock()
            seq = next(ids)
            outer = shared[PARENT]
            shared[PARENT] = seq
            before = group._training_state._value_
            grads = count_gradients(params)
            reduces = group.reduce_grads
            if grads and reduces:
                shared[ENTERED] = entered
                if flush is not None:
                    flush(model)
            try:
                result = orig(group, *unused)
            except BaseException as error:
                shared[PARENT] = outer
                self._failed(error)
                raise
            t1 = clock()
            shared[PARENT] = outer
            shared[ENTERED] = 0
            try:
                flags = flags_of(group)
                if flags != self.flags:
                    self.flags_changed(flags, seq)
                context = shared[CONTEXT]
                if not reduces:
                    pass
                elif plain and grads == trainable and reduced and group.gradient_divide_factor is reduced[3]:
                    # All gradients were there, as when it was measured: the usual case, without a look at the buffer.
                    size, dtype, op, _ = reduced
                    number = next(ids)
                    append((10, number, t0, t1, gid, seq, context, size, world, dtype, grads, op))
                    scattered(number, gid, context, size, world, dtype, grads, op)
                elif grads or getattr(group, "reduce_scatter_unused_params", False):
                    self._reductions(seq, t0, t1, grads, flags)
                after = group._training_state._value_
                by = 1 if shared[FINAL] else 0 if shared[BACKWARD_SEQ] else 2
                append((9, seq, t0, t1, gid, outer or shared[TOP], context, before, after, by, grads, 0))
                handler(seq, gid, context, before, after, by, grads, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return post_backward

    def _reductions(self, parent: int, t0: int, t1: int, grads: int, flags: int) -> None:
        """Records the reduce-scatter and the all-reduce that the post-backward ``parent`` issued."""
        info, group, c = self.info, self.group, self.context
        buffer = last_reduce_scatter_input(group.comm_ctx)
        if buffer is None:
            return
        # With reduce_scatter_unused_params and nothing ever gathered there is nothing to reduce either.
        if not grads and group._sharded_state._value_ != UNSHARDED and not any_unsharded(group.fsdp_params):
            return
        size, dtype = buffer.numel() * buffer.element_size(), dtype_number(buffer.dtype)
        del buffer
        op = reduce_op(group, dtype, info)
        if grads == info.trainable and info.world > 1 and hasattr(group, "gradient_divide_factor"):
            self.reduced[:] = size, dtype, op, group.gradient_divide_factor
        if info.world > 1:
            c.emit(ev.REDUCE_SCATTER, next(c.ids), t0, t1, self.id, parent, size, info.world, dtype, grads, op)
        if info.replicate_world > 1 and flags & 2:
            state = group._all_reduce_state
            total = size // info.world
            if state is not None:
                total = state.all_reduce_input.numel() * state.all_reduce_input.element_size()
            c.emit(ev.ALL_REDUCE, next(c.ids), t0, t1, self.id, parent, total, info.replicate_world, dtype, grads, op)

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

    # -- rare ----------------------------------------------------------------------------------------------------------
    def _discarded(self, seq: int, t0: int) -> None:
        c = self.context
        try:
            c.emit(ev.DISCARD, seq, t0, clock(), self.id, c.parent(), self.bytes)
        except Exception as error:
            if c.owner.stop_run(error):
                raise
            c.owner.fault(error)

    def flags_changed(self, flags: int, parent: int = 0) -> None:
        """Records each switch that differs from what was last seen, under the event ``parent`` in which it was used."""
        c = self.context
        now = clock()
        changed, self.flags = flags ^ self.flags, flags
        for bit in range(len(ev.FLAGS) - 1):
            if changed >> bit & 1:
                c.emit(ev.FLAG, next(c.ids), now, now, self.id, parent or c.shared[TOP], bit, flags >> bit & 1)

    def snapshot(self, unless: tuple[bool, bool, int] | None = None) -> None:
        """Records the group's state as PyTorch has it now, unless it is ``(open, pending, training state)`` already."""
        c, group = self.context, self.group
        now = clock()
        sharded = group._sharded_state._value_
        pending = group._all_gather_result is not None
        if unless == (sharded == UNSHARDED, pending, group._training_state._value_):
            return
        size = self.bytes if pending or sharded == UNSHARDED else 0
        order = len(getattr(group.comm_ctx, "post_forward_order", ()))
        c.emit(
            ev.STATE, next(c.ids), now, now, self.id, 0,
            sharded, int(pending), group._training_state._value_, order, size,
        )  # fmt: skip

    def _failed(self, error: BaseException) -> None:
        c = self.context
        try:
            c.note_exception(error, self.id, self.info.unit)
        except Exception as fault:
            if not c.owner.stop_run(fault):
                c.owner.fault(fault)


class _Prefetch:
    """Stands in for the context manager of ``use_training_state`` and records the prefetch when it ends."""

    __slots__ = ("_hooks", "_inner", "_outer", "_seq", "_state", "_t0")

    def __init__(self, hooks: GroupHooks, inner: Any, state: int) -> None:
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
        implicit = shared[IMPLICIT]
        if implicit:
            shared[HOW] = how + IMPLICIT_MODE
            shared[ISSUER] = implicit - 1
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


def count_gradients(params: Any) -> int:
    """Parameters with an unsharded gradient, accumulated ones included. Looks at presence only, never at values."""
    found = 0
    try:
        for param in params:
            if param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None:
                found += 1
    except AttributeError:  # a group that was never gathered has no unsharded parameters yet
        return 0
    return found


def any_unsharded(params: Any) -> bool:
    """Whether a trainable parameter of the group was ever gathered (what a filled-in gradient needs)."""
    return any((p := param.__dict__.get("_unsharded_param")) is not None and p.requires_grad for param in params)


def flags_of(group: Any) -> int:
    """The group's switches as bits, in the order of :data:`~fsdptrace.events.FLAGS`."""
    return (
        (1 if group.reduce_grads else 0)
        | (2 if group.all_reduce_grads else 0)
        | (4 if group.reshard_after_backward else 0)
        | (8 if group.post_forward_mesh_info is not None else 0)
        | (16 if group.unshard_in_backward else 0)
    )


def reduce_op(group: Any, dtype: int, info: GroupInfo) -> int:
    """Position in :data:`~fsdptrace.events.OPS` of the operator of a reduction.

    After ``_get_gradient_divide_factors`` (_fsdp_collectives.py, 2.13): fp32 and bf16 are averaged by the collective,
    other dtypes and ``force_sum_reduction_for_comms`` are divided beside a sum.
    """
    factor = getattr(group, "gradient_divide_factor", None)
    if getattr(group, "force_sum_reduction_for_comms", False) or ev.DTYPES[dtype] not in ("float32", "bfloat16"):
        return 1
    if factor is not None and factor != info.world:
        return 2
    return 0 if info.world * info.replicate_world > 1 else 1


_PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)


def unhooked_inputs(args: Any, kwargs: Any) -> int:
    """What went in where FSDP2 hooked nothing, as a position in :data:`~fsdptrace.events.INPUT_GRAD`: a tensor that needs
    grad hidden in an object that FSDP2 does not look into (one level deep), integer tensors only, or neither."""
    integer = floating = False
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                floating = True
            else:
                integer = True
        elif not isinstance(value, (*_PLAIN, tuple, list, dict, torch.nn.Module)):
            inner = tuple(value) if isinstance(value, (set, frozenset)) else tuple(getattr(value, "__dict__", {}).values())
            if any(isinstance(item, torch.Tensor) and item.requires_grad for item in inner):
                return 2
    return 4 if integer and not floating else 0
