"""The wrappers around one param group's methods. Each is a closure with the wrapped method's exact signature.

Laws that hold here (docs/design.md): no dispatcher operator, no tensor held, nothing synchronised; the wrapped method
gets its arguments untouched and its result is returned as it is; a fault of ours never reaches training. The training
thread pays for every line, so that constants live in the closure and an event is one ``append`` of a tuple of integers.
"""

from __future__ import annotations

import sys
import weakref
from _thread import get_ident
from collections.abc import Callable
from types import CellType, TracebackType
from typing import Any

import torch

from fsdptrace import events as ev
from fsdptrace.adapters.compat import last_reduce_scatter_input
from fsdptrace.adapters.context import (
    BACKWARD_SEQ,
    BASE,
    BUSY,
    FINAL,
    HOW,
    IMPLICIT,
    ISSUER,
    OPEN_GROUP,
    OPEN_KIND,
    OUTER_GRAD,
    PARENT,
    PASS,
    SOURCE,
    TOP,
    Context,
    clock,
)  # fmt: skip
from fsdptrace.adapters.describe import dtype_name
from fsdptrace.model_map import GroupInfo

Wrapper = Callable[..., Any]
MANUAL = ev.pack_how(mode=ev.MODES.index("manual"))
FORWARD_PREFETCH = ev.pack_how(direction=1)
BACKWARD_PREFETCH = ev.pack_how(direction=2)
IMPLICIT_MODE = ev.pack_how(mode=1)
EXPLICIT_MODE = ev.pack_how(mode=2)
OPEN, PENDING, DISABLED = 1, 2, 3
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
        self.flags = flags_of(group)
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

    # -- keeping no model alive ----------------------------------------------------------------------------------------
    def _strong_cells(self) -> list[tuple[CellType, str]]:
        """Closure cells that hold the group, one of its methods or its parameters, and what to put there again."""
        group = self.group
        found = []
        for name, wrapper in self.wrappers.items():
            for variable, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True):
                if cell.cell_contents is group:
                    found.append((cell, ""))
                elif variable == "orig":
                    found.append((cell, name))
                elif variable == "params":
                    found.append((cell, "fsdp_params"))
        return found

    def let_go(self) -> None:
        """Drops every strong reference to the group: while no recording is active nothing of ours keeps a model alive."""
        self.group = None
        for cell, _name in self._cells:
            cell.cell_contents = None

    def take_hold(self) -> bool:
        """The inverse of :meth:`let_go`, with the methods as they are now. False when the group is gone."""
        group = self._reference()
        if group is None:
            return False
        self.group = group
        for cell, name in self._cells:
            cell.cell_contents = getattr(group, name) if name else group
        return True

    # -- gathering and freeing -----------------------------------------------------------------------------------------
    def _unshard(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.UNSHARD]
        orig = group.unshard
        numbers: dict[torch.dtype, int] = {}
        post_world, world_of = self.info.post_forward_world, self.info.world
        usual_dtype = ev.DTYPE_NUMBER.get(self.info.dtype, 0)

        def unshard(async_op: bool = False) -> Any:
            t0 = clock()
            seq = next(ids)
            cell = cells[get_ident()]
            parent = cell[PARENT]
            cell[PARENT] = seq
            state = group._sharded_state._value_
            training = group._training_state._value_
            noop = PENDING if group._all_gather_result is not None else OPEN if state == UNSHARDED else 0
            if not noop:
                shared[OPEN_KIND] = ev.UNSHARD
                shared[OPEN_GROUP] = gid
                if owner.before_collective is not None:
                    owner.before_collective(c.model)
            try:
                result = orig(async_op)
            except BaseException as error:
                cell[PARENT] = parent
                self._failed(error)
                raise
            t1 = clock()
            cell[PARENT] = parent
            shared[OPEN_KIND] = 0
            try:
                how = cell[HOW]
                issuer = ev.NONE
                if how:
                    issuer = cell[ISSUER]
                elif training >= IDLE_OR_POST:
                    how = MANUAL
                size = 0
                dtype = usual_dtype
                world = post_world if state == POST_FORWARD_STATE else world_of
                if not noop:
                    gathered = group._all_gather_result
                    if gathered is None:
                        noop = DISABLED
                    elif gathered.all_gather_input_split_sizes:
                        output = gathered.all_gather_output
                        size = self.bytes = output.numel() * output.element_size()
                        dtype = numbers.get(output.dtype) or numbers.setdefault(output.dtype, dtype_number(output.dtype))
                    else:  # a world of one since torch 2.9: nothing travels, the copy is made all the same
                        size = self.bytes = self.info.bytes
                how += noop
                context = cell[BASE] + shared[PASS]
                parent = parent or shared[TOP]
                shared[BUSY] = 1
                append((ev.UNSHARD, seq, t0, t1, gid, parent, context, size, world, dtype, issuer, how))
                handler(seq, gid, context, size, world, dtype, issuer, how)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return unshard

    def _wait(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.WAIT]
        orig = group.wait_for_unshard

        def wait_for_unshard() -> Any:
            if group._all_gather_result is None:
                return orig()
            t0 = clock()
            seq = next(ids)
            try:
                result = orig()
            except BaseException as error:
                self._failed(error)
                raise
            t1 = clock()
            try:
                cell = cells[get_ident()]
                context = cell[BASE] + shared[PASS]
                size = self.bytes
                append((ev.WAIT, seq, t0, t1, gid, cell[PARENT] or shared[TOP], context, size, 0, 0, 0, 0))
                handler(seq, gid, context, size, 0, 0, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return wait_for_unshard

    def _to_sharded(self, name: str, to: int) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.RESHARD]
        orig = getattr(group, name)
        nothing_to_do = to + 1

        def to_sharded() -> Any:
            before = group._sharded_state._value_
            if before == nothing_to_do:
                return orig()
            t0 = clock()
            seq = next(ids)
            result = orig()
            t1 = clock()
            try:
                caller = sys._getframe(1).f_code.co_name
                if caller == "reshard":
                    # In a hook the training state is FORWARD or POST_BACKWARD; a call of the user's finds it idle.
                    cause = 0 if group._training_state._value_ != 4 or shared[FINAL] else 1
                else:
                    cause = 2 if caller == "to_sharded_hook" else 3 if caller == "_reset_iter_state" else 1
                cell = cells[get_ident()]
                context = cell[BASE] + shared[PASS]
                size = self.bytes if before == UNSHARDED else 0
                shared[BUSY] = 1
                append((ev.RESHARD, seq, t0, t1, gid, cell[PARENT] or shared[TOP], context, size, to, cause, 0, 0))
                handler(seq, gid, context, size, to, cause, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return to_sharded

    # -- prefetching ---------------------------------------------------------------------------------------------------
    def _use_training_state(self) -> Wrapper:
        orig = self.group.use_training_state

        def use_training_state(training_state: Any) -> _Prefetch:
            # The only caller is _prefetch_unshard (2.6 to 2.15): "a prefetch targets this group".
            return _Prefetch(self, orig(training_state), training_state._value_)

        return use_training_state

    def _backward_prefetch(self) -> Wrapper:
        cells, gid = self.context.cells, self.id
        orig = self.group._backward_prefetch

        def _backward_prefetch() -> Any:
            cell = cells[get_ident()]
            cell[IMPLICIT] = gid + 1
            try:
                return orig()
            finally:
                cell[IMPLICIT] = 0

        return _backward_prefetch

    # -- forward -------------------------------------------------------------------------------------------------------
    def _pre_forward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.PRE_FORWARD]
        orig = group.pre_forward
        grad_enabled = torch.is_grad_enabled

        def pre_forward(module: Any, args: Any, kwargs: Any) -> Any:
            t0 = clock()
            seq = next(ids)
            cell = cells[get_ident()]
            parent = cell[PARENT]
            cell[PARENT] = seq
            before = group._training_state._value_
            try:
                result = orig(module, args, kwargs)
            except BaseException as error:
                cell[PARENT] = parent
                self._failed(error)
                raise
            t1 = clock()
            cell[PARENT] = parent
            try:
                grad = 1 if grad_enabled() else 2 if shared[OUTER_GRAD] else 0
                if result[0] is not args or result[1] is not kwargs:
                    input_grad = 1  # _register_post_backward_hook gives new containers when it hooked a tensor
                elif before == 1:
                    input_grad = 3  # a further module of a grouped unit: the first one was asked
                else:
                    input_grad = 2 if grad == 1 and hidden_grad(args, kwargs) else 0
                context = cell[BASE] + shared[PASS]
                after = group._training_state._value_
                append(
                    (
                        ev.PRE_FORWARD,
                        seq,
                        t0,
                        t1,
                        gid,
                        parent or shared[TOP],
                        context,
                        before,
                        after,
                        input_grad,
                        grad,
                        0,
                    )
                )
                handler(seq, gid, context, before, after, input_grad, grad, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return pre_forward

    def _post_forward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.POST_FORWARD]
        orig = group.post_forward

        def post_forward(module: Any, input: Any, output: Any) -> Any:
            t0 = clock()
            seq = next(ids)
            cell = cells[get_ident()]
            parent = cell[PARENT]
            cell[PARENT] = seq
            before = group._training_state._value_
            try:
                result = orig(module, input, output)
            finally:
                cell[PARENT] = parent
            t1 = clock()
            try:
                context = cell[BASE] + shared[PASS]
                after = group._training_state._value_
                append((ev.POST_FORWARD, seq, t0, t1, gid, parent or shared[TOP], context, before, after, 0, 0, 0))
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
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.PRE_BACKWARD]
        orig = group.pre_backward

        def pre_backward(default_prefetch: bool, *unused: Any) -> Any:
            before = group._training_state._value_
            if before == PRE_BACKWARD_STATE:  # a further output of the unit: PyTorch returns at once
                return orig(default_prefetch, *unused)
            if not shared[BACKWARD_SEQ]:
                c.open_backward()
            t0 = clock()
            seq = next(ids)
            cell = cells[get_ident()]
            parent = cell[PARENT]
            cell[PARENT] = seq
            try:
                result = orig(default_prefetch, *unused)
            except BaseException as error:
                cell[PARENT] = parent
                self._failed(error)
                raise
            t1 = clock()
            cell[PARENT] = parent
            try:
                context = cell[BASE] + shared[PASS]
                after = group._training_state._value_
                append((ev.PRE_BACKWARD, seq, t0, t1, gid, parent or shared[TOP], context, before, after, 0, 0, 0))
                handler(seq, gid, context, before, after, 0, 0, 0)
            except Exception as error:
                if owner.stop_run(error):
                    raise
                owner.fault(error)
            return result

        return pre_backward

    def _post_backward(self) -> Wrapper:
        c, group, gid = self.context, self.group, self.id
        append, ids, cells, shared, owner = c.append, c.ids, c.cells, c.shared, c.owner
        handler = c.on[ev.POST_BACKWARD]
        orig = group.post_backward
        params = group.fsdp_params

        def post_backward(*unused: Any) -> Any:
            if not shared[BACKWARD_SEQ]:
                c.open_backward()
            t0 = clock()
            seq = next(ids)
            cell = cells[get_ident()]
            parent = cell[PARENT]
            cell[PARENT] = seq
            before = group._training_state._value_
            grads = count_gradients(params)
            if grads and group.reduce_grads:
                shared[OPEN_KIND] = ev.POST_BACKWARD
                shared[OPEN_GROUP] = gid
                if owner.before_collective is not None:
                    owner.before_collective(c.model)
            try:
                result = orig(*unused)
            except BaseException as error:
                cell[PARENT] = parent
                self._failed(error)
                raise
            t1 = clock()
            cell[PARENT] = parent
            shared[OPEN_KIND] = 0
            try:
                flags = flags_of(group)
                if flags != self.flags:
                    self.flags_changed(flags)
                if flags & 1 and (grads or getattr(group, "reduce_scatter_unused_params", False)):
                    self._reductions(seq, t0, t1, grads, flags)
                context = cell[BASE] + shared[PASS]
                after = group._training_state._value_
                by = 1 if shared[FINAL] else 0 if shared[BACKWARD_SEQ] else 2
                append((ev.POST_BACKWARD, seq, t0, t1, gid, parent or shared[TOP], context, before, after, by, grads, 0))
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
        if buffer is None or not (grads or info.world * info.replicate_world > 1):
            return
        size = buffer.numel() * buffer.element_size()
        dtype = dtype_number(buffer.dtype)
        del buffer
        op = reduce_op(group, dtype, info)
        # With reduce_scatter_unused_params and nothing gathered there is nothing to reduce either.
        if not grads and group._sharded_state._value_ != UNSHARDED and not any_unsharded(group.fsdp_params):
            return
        if info.world > 1:
            c.emit(ev.REDUCE_SCATTER, next(c.ids), t0, t1, self.id, parent, size, info.world, dtype, grads, op)
        if info.replicate_world > 1 and flags & 2:
            state = group._all_reduce_state
            reduced = size // info.world
            if state is not None:
                reduced = state.all_reduce_input.numel() * state.all_reduce_input.element_size()
            c.emit(ev.ALL_REDUCE, next(c.ids), t0, t1, self.id, parent, reduced, info.replicate_world, dtype, grads, op)

    def _finalize_backward(self) -> Wrapper:
        c, group = self.context, self.group
        orig = group.finalize_backward

        def finalize_backward() -> Any:
            if group._all_gather_result is None:
                return orig()
            t0 = clock()
            seq = next(c.ids)
            result = orig()
            self._discarded(seq, t0)
            return result

        return finalize_backward

    def _reset_iter_state(self) -> Wrapper:
        c, group = self.context, self.group
        orig = group._reset_iter_state

        def _reset_iter_state() -> Any:
            pending = group._all_gather_result is not None
            t0 = clock()
            seq = next(c.ids)
            result = orig()
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
            c.emit(ev.DISCARD, seq, t0, clock(), self.id, c.cells[get_ident()][PARENT] or c.shared[TOP], self.bytes)
        except Exception as error:
            if c.owner.stop_run(error):
                raise
            c.owner.fault(error)

    def flags_changed(self, flags: int) -> None:
        """Records each switch that differs from what was last seen."""
        c = self.context
        now = clock()
        changed, self.flags = flags ^ self.flags, flags
        for bit in range(len(ev.FLAGS) - 1):
            if changed >> bit & 1:
                c.emit(ev.FLAG, next(c.ids), now, now, self.id, c.shared[TOP], bit, flags >> bit & 1)

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

    __slots__ = ("_cell", "_hooks", "_inner", "_outer", "_seq", "_state", "_t0")

    def __init__(self, hooks: GroupHooks, inner: Any, state: int) -> None:
        self._hooks = hooks
        self._inner = inner
        self._state = state

    def __enter__(self) -> Any:
        result = self._inner.__enter__()
        context = self._hooks.context
        self._t0 = clock()
        self._seq = next(context.ids)
        cell = self._cell = context.cells[get_ident()]
        self._outer = cell[PARENT]
        cell[PARENT] = self._seq
        how = FORWARD_PREFETCH if self._state == 1 else BACKWARD_PREFETCH
        if cell[IMPLICIT]:
            cell[HOW] = how + IMPLICIT_MODE
            cell[ISSUER] = cell[IMPLICIT] - 1
        else:
            cell[HOW] = how + EXPLICIT_MODE
            cell[ISSUER] = context.shared[SOURCE]
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Any:
        cell = self._cell
        how, source = cell[HOW], cell[ISSUER]
        cell[PARENT] = self._outer
        cell[HOW] = 0
        result = self._inner.__exit__(kind, error, trace)
        if error is None:
            context = self._hooks.context
            try:
                context.emit(
                    ev.PREFETCH, self._seq, self._t0, clock(), source, self._outer or context.shared[TOP],
                    self._hooks.id, how,
                )  # fmt: skip
            except Exception as fault:
                if context.owner.stop_run(fault):
                    raise
                context.owner.fault(fault)
        return result


def count_gradients(params: Any) -> int:
    """Parameters with an unsharded gradient, accumulated ones included. Looks at presence only, never at values."""
    found = 0
    for param in params:
        unsharded = param.__dict__.get("_unsharded_param")
        if unsharded is not None and (unsharded.grad is not None or param.unsharded_accumulated_grad is not None):
            found += 1
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


_PLAIN = (int, float, str, bytes, bool, type(None), torch.Tensor, torch.dtype, torch.device)


def hidden_grad(args: Any, kwargs: Any) -> bool:
    """Whether a tensor that needs grad lies in an object that FSDP2 does not look into. One level deep."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (*_PLAIN, tuple, list, dict)):
            continue
        inner = getattr(value, "__dict__", None)
        if isinstance(value, (set, frozenset)):
            inner = dict.fromkeys(range(len(value)))
            inner.update(enumerate(value))
        if isinstance(inner, dict) and not isinstance(value, torch.nn.Module):
            for item in tuple(inner.values()):
                if isinstance(item, torch.Tensor) and item.requires_grad:
                    return True
    return False
