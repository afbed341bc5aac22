"""The wrappers around the four hooks of one param group: pre- and post-forward, pre- and post-backward."""

from __future__ import annotations

from typing import Any

import torch

from fsdptrace import events as ev
from fsdptrace.adapters.compat import last_reduce_scatter_input
from fsdptrace.adapters.context import (
    BACKWARD_SEQ,
    CONTEXT,
    ENTERED,
    FINAL,
    GROUP_UNIT,
    OUTER_GRAD,
    PARENT,
    TOP,
    WHICH,
    clock,
)  # fmt: skip
from fsdptrace.adapters.group import PRE_BACKWARD_STATE, UNSHARDED, GroupBase, Wrapper
from fsdptrace.adapters.look import (
    any_unsharded,
    count_gradients,
    dtype_number,
    flags_of,
    grad_of,
    gradients_there,
    is_none,
    leaves_of,
    reduce_op,
    switches_of,
    unhooked_inputs,
)  # fmt: skip

BACKWARD_FLAGS = 23  # all but reshard_after_forward
ANNOUNCED = 2  # sets of parameters with gradients per group that are put on disk before their reduction


class Passes(GroupBase):
    """pre_forward, post_forward, pre_backward, post_backward and the reductions in it."""

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
        params, leaves = group.fsdp_params, self.leaves
        entered = ev.POST_BACKWARD + GROUP_UNIT * gid
        flush, model = owner.before_collective, c.model
        trainable, world, plain = self.info.trainable, self.info.world, self.info.replicate_world == 1
        reduced = self.reduced
        timing = c.timing

        def post_backward(*unused: Any) -> Any:
            if not shared[BACKWARD_SEQ]:
                c.open_backward()
            t0 = clock()
            seq = next(ids)
            outer = shared[PARENT]
            shared[PARENT] = seq
            before = group._training_state._value_
            # The usual case first: every parameter has its gradient. What was accumulated elsewhere, and who has none, is
            # looked for only when one is missing.
            if not leaves or any(map(is_none, map(grad_of, leaves))):
                grads = count_gradients(params)
            else:
                grads = len(leaves)
            switches = switches_of(group)
            reduces = switches[0]
            if grads and reduces:
                shared[ENTERED] = entered
                if grads != trainable:
                    self._partial()
                if flush is not None:
                    flush(model)
            if timing is not None and timing.on:
                try:
                    timing.before_reduction()
                except Exception as error:
                    owner.fault(error)
            try:
                result = orig(group, *unused)
            except BaseException as error:
                shared[PARENT] = outer
                self._failed(error)
                shared[ENTERED] = shared[WHICH] = 0
                raise
            t1 = clock()
            shared[PARENT] = outer
            shared[ENTERED] = 0
            try:
                if switches != self.switches:  # those used here: not reshard_after_forward
                    self.switches = switches
                    flags = flags_of(group) & BACKWARD_FLAGS | self.flags & ~BACKWARD_FLAGS
                    if flags != self.flags:
                        self.flags_changed(flags, seq)
                context = shared[CONTEXT]
                number = all_reduce = 0
                if not reduces:
                    pass
                elif plain and grads == trainable and reduced and group.gradient_divide_factor is reduced[3]:
                    # All gradients were there, as when it was measured: the usual case, without a look at the buffer.
                    size, dtype, op, _ = reduced
                    number = next(ids)
                    append((10, number, t0, t1, gid, seq, context, size, world, dtype, grads, op))
                    scattered(number, gid, context, size, world, dtype, grads, op)
                elif grads or getattr(group, "reduce_scatter_unused_params", False):
                    number, all_reduce = self._reductions(seq, t0, t1, grads)
                if timing is not None and timing.on:
                    timing.after_reduction(group.comm_ctx, gid, number, all_reduce)
                    if timing.memory_on:
                        self.sample(seq)
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

    def _partial(self) -> None:
        """Some parameters have no gradient: which do decides the size of the reduction, and may be others on another rank. It
        is noted, and the first times put on disk before the collective, which then may abort the process from C++."""
        group, c = self.group, self.context
        if getattr(group, "reduce_scatter_unused_params", False):
            return  # filled with zeros: all take part
        try:
            c.shared[WHICH] = which = ev.pack_which(gradients_there(group.fsdp_params))
            if which not in self.announced and len(self.announced) < ANNOUNCED:
                self.announced.add(which)
                c.owner.announce(c.model)
        except Exception as error:
            if c.owner.stop_run(error):
                raise
            c.owner.fault(error)

    def _reductions(self, parent: int, t0: int, t1: int, grads: int) -> tuple[int, int]:
        """Records the reduce-scatter and the all-reduce that the post-backward ``parent`` issued; their ``seq``, or 0."""
        info, group, c = self.info, self.group, self.context
        buffer = last_reduce_scatter_input(group.comm_ctx)
        scatter = reduce = 0
        if buffer is None:
            return scatter, reduce
        # With reduce_scatter_unused_params and nothing ever gathered there is nothing to reduce either.
        if not grads and group._sharded_state._value_ != UNSHARDED and not any_unsharded(group.fsdp_params):
            return scatter, reduce
        size, dtype = buffer.numel() * buffer.element_size(), dtype_number(buffer.dtype)
        del buffer
        op = reduce_op(group, dtype, info) + ev.OP_UNIT * c.shared[WHICH]
        c.shared[WHICH] = 0
        if grads == info.trainable and info.world > 1 and hasattr(group, "gradient_divide_factor"):
            self.reduced[:] = size, dtype, op, group.gradient_divide_factor
            self.leaves[:] = leaves_of(group.fsdp_params)
        if info.world > 1:
            scatter = next(c.ids)
            c.emit(ev.REDUCE_SCATTER, scatter, t0, t1, self.id, parent, size, info.world, dtype, grads, op)
        if info.replicate_world > 1 and group.all_reduce_grads:
            state = group._all_reduce_state
            total = size // info.world
            if state is not None:
                total = state.all_reduce_input.numel() * state.all_reduce_input.element_size()
            reduce = next(c.ids)
            c.emit(ev.ALL_REDUCE, reduce, t0, t1, self.id, parent, total, info.replicate_world, dtype, grads, op)
        return scatter, reduce
