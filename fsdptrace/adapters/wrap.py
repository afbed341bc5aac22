"""What can be said of a wrap before it runs: parameters in no unit, units of mixed dtypes, ties that a wrap has cut.

Attributes only. PyTorch asserts some of it in the first forward (``_init_mp_dtypes``, ``_validate_no_duplicate_params``),
without names or with the wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdptrace.adapters.describe import Described, dtype_name
from fsdptrace.model_map import clean_name


@dataclass(frozen=True, slots=True)
class Outside:
    """A trainable parameter that no unit shards.

    ``ignored``: it lies in a module that ``fully_shard`` wrapped, so that it was given to ``ignored_params`` or came later.
    """

    name: str
    param: nn.Parameter
    ignored: bool


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that was one before sharding and lies in two groups: ``name`` in ``group``, ``other_name`` in ``other``."""

    group: int
    name: str
    other: int
    other_name: str


def outside(model: nn.Module, described: Described) -> list[Outside]:
    """Trainable plain parameters of ``model`` in no group. Parameters that are DTensors belong to another parallelism, those
    under DistributedDataParallel and those with gradient hooks are reduced by somebody else."""
    covered = {id(param) for group in described.groups for param in params_of(group)}
    inside = {id(param) for wrapped in _wrapped(model) for param in wrapped.parameters()}
    theirs = {
        id(param) for module in model.modules() if isinstance(module, DistributedDataParallel) for param in module.parameters()
    }
    return [
        Outside(clean_name(name), param, id(param) in inside)
        for name, param in model.named_parameters()
        if id(param) not in covered and id(param) not in theirs and alone(param)
    ]


def alone(param: nn.Parameter) -> bool:
    """Whether nobody is known to look after ``param``: trainable, no DTensor, no gradient hook."""
    hooked = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
    return param.requires_grad and not isinstance(param, DTensor) and not hooked


def params_of(group: Any) -> Iterator[Any]:
    """The shards of a group and the gathered copies that there are."""
    for param in group.fsdp_params:
        yield param.sharded_param
        copy = param.__dict__.get("_unsharded_param")
        if copy is not None:
            yield copy


def _wrapped(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def mixed_dtypes(described: Described) -> list[tuple[int, list[tuple[str, str]]]]:
    """Groups whose parameters PyTorch will refuse for their dtypes, with names and dtypes."""
    found = []
    for info, group in zip(described.map.groups, described.groups, strict=True):
        every = _asserted(type(group))
        if every is None:
            continue
        named = [
            (param.name, dtype_name(own.sharded_param.dtype))
            for param, own in zip(info.params, group.fsdp_params, strict=True)
            if every or own.sharded_param.requires_grad
        ]
        if len({dtype for _, dtype in named}) > 1:
            found.append((info.id, named))
    return found


def _asserted(cls: type) -> bool | None:
    """What FSDPParamGroup asserts in this release: one dtype for all parameters (True), for the trainable ones (False), or
    nothing (None). Read off the compiled function, since releases differ: 2.6 asks all, 2.13 the trainable ones."""
    function = getattr(cls, "_init_mp_dtypes", None)
    if function is None:
        return None
    text = "FSDP expects uniform original parameter dtype"
    if not any(isinstance(const, str) and const.startswith(text) for const in function.__code__.co_consts):
        return None
    return "requires_grad" not in _names(function.__code__)


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def cut_ties(described: Described) -> list[Tie]:
    """Parameters that were one before sharding and lie in two groups; none where PyTorch keeps no mark of it (before 2.13)."""
    first: dict[int, tuple[int, str]] = {}
    found = []
    for info, group in zip(described.map.groups, described.groups, strict=True):
        for param, own in zip(info.params, group.fsdp_params, strict=True):
            mark = getattr(own, "_orig_param_uid", None)
            if mark is None:
                continue
            other = first.setdefault(mark, (info.id, param.name))
            if other[0] != info.id:
                found.append(Tie(info.id, param.name, *other))
    return found
