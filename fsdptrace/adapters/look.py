"""What the hooks look at on PyTorch's objects beside the events themselves: presence and attributes, never values."""

from __future__ import annotations

from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch

from fsdptrace import events as ev
from fsdptrace.adapters.describe import dtype_name
from fsdptrace.model_map import GroupInfo

# Functions of the C library of Python where the hot path looks at many objects: a look is then no bytecode of ours.
switches_of = attrgetter("reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward")
"""The switches that a backward uses, as a tuple."""
all_switches_of = attrgetter(
    "reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info", "unshard_in_backward"
)
held_of = attrgetter("_sharded_state", "_all_gather_result")
"""Whether something gathered is there: see :func:`fsdptrace.adapters.between.is_held`."""
grad_of = attrgetter("grad")
is_none = partial(is_, None)


def dtype_number(dtype: torch.dtype) -> int:
    """The number that records carry for ``dtype``; 0 when it is none of :data:`~fsdptrace.events.DTYPES`."""
    return ev.DTYPE_NUMBER.get(dtype_name(dtype), 0)


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


def gradients_there(params: Any) -> list[bool]:
    """Which parameters have an unsharded gradient, in the group's order (see :func:`count_gradients`)."""
    return [p._unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None for p in params]


def leaves_of(params: Any) -> list[Any]:
    """The unsharded parameters, whose ``.grad`` says at once that all gradients are there; none when some are frozen, which
    never have one. PyTorch makes them at the first gather and keeps them (``init_unsharded_param``, _fsdp_param.py, 2.13)."""
    if not all(param.sharded_param.requires_grad for param in params):
        return []
    return [param._unsharded_param for param in params]


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
