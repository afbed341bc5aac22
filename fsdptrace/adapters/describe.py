"""Builds the :class:`~fsdptrace.model_map.ModelMap` of a model by reading FSDP2's own objects.

Reads attributes only: no tensor is made, no collective started, nothing is initialised. Names come from the recorded
model handle; FSDP2's own names (``_module_fqn``, ``_param_fqn``) are empty until the first forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fsdptrace.adapters.compat import groups_of
from fsdptrace.adapters.store import group_label
from fsdptrace.model_map import GroupInfo, ModelMap, ParamInfo, UnitInfo, clean_name


@dataclass(slots=True)
class Unit:
    """A unit with PyTorch's own objects: ``state`` is its FSDPState (``None`` where the module was not wrapped)."""

    info: UnitInfo
    state: Any
    modules: list[nn.Module]
    groups: list[Any]


@dataclass(slots=True)
class Described:
    """A model map beside the objects that it describes: ``groups[i]`` is the FSDPParamGroup of group ``i``."""

    map: ModelMap
    units: list[Unit]
    groups: list[Any]


def dtype_name(dtype: Any) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def describe(model: nn.Module, number: int) -> Described:
    """The units and groups of ``model``, in the order of ``named_modules``; ``model`` itself is unit 0."""
    names: dict[int, str] = {}
    states: dict[int, tuple[Any, list[nn.Module]]] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), clean_name(name))
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states.setdefault(id(state), (state, []))[1].append(cast(nn.Module, module))
    units: list[Unit] = []
    groups: list[Any] = []
    infos: list[GroupInfo] = []
    param_names = _parameter_names(model)
    if not isinstance(model, FSDPModule):
        units.append(Unit(UnitInfo(0, "", ("",), (), False), None, [model], []))
    for state, modules in states.values():
        # A unit's own order of modules decides its name: it is the order given to fully_shard.
        ordered = [module for module in state._modules if id(module) in names] or modules
        fqns = tuple(names[id(module)] for module in ordered)
        own = groups_of(state)
        ids = tuple(range(len(groups), len(groups) + len(own)))
        for index, group in enumerate(own):
            fqn = fqns[0] if index == 0 else f"{fqns[0]}#{index}"
            infos.append(_group_info(ids[index], fqn, len(units), fqns, state, group, param_names))
        groups += own
        units.append(Unit(UnitInfo(len(units), fqns[0], fqns, ids, True), state, ordered, own))
    covered = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
    covered |= {id(u) for group in groups for p in group.fsdp_params if (u := p.__dict__.get("_unsharded_param")) is not None}
    uncovered = tuple(clean_name(name) for name, p in model.named_parameters() if id(p) not in covered)
    # Before lazy init a group may still hold parameters that the user has replaced since; they are then looked up by
    # module and name in _param_name below, and are covered all the same.
    named = {param.name for info in infos for param in info.params}
    uncovered = tuple(name for name in uncovered if name not in named)
    model_map = ModelMap(number, class_name(model), tuple(u.info for u in units), tuple(infos), uncovered)
    return Described(model_map, units, groups)


def groups_in(model: nn.Module) -> list[Any]:
    """The param groups of all units in ``model``."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for state in {id(state): state for state in states}.values() for group in groups_of(state)]


def class_name(module: nn.Module) -> str:
    """The user's class: ``fully_shard`` puts a subclass ``FSDP<Name>`` in its place (``_fully_shard.py``)."""
    cls = type(module)
    if isinstance(module, FSDPModule):
        return cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)].__name__
    return cls.__name__


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Names of modules by id, for parameters are named after the module that owns them."""
    return {id(module): clean_name(name) for name, module in model.named_modules(remove_duplicate=False)}


def _param_name(param: Any, module_names: dict[int, str]) -> str:
    info = param._module_info
    prefix = module_names.get(id(info.module), "")
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


def _group_info(
    group_id: int, fqn: str, unit: int, modules: tuple[str, ...], state: Any, group: Any, names: dict[int, str]
) -> GroupInfo:
    policy = state._mp_policy
    mesh_info = group.mesh_info
    world = int(getattr(mesh_info, "shard_mesh_size", 1))
    params = []
    dtypes = set()
    for param in group.fsdp_params:
        sharded = param.sharded_param
        gathered = policy.param_dtype if policy.param_dtype and sharded.dtype.is_floating_point else sharded.dtype
        dtypes.add(gathered)
        numel = _numel(param.padded_sharded_param_size) * world
        params.append(
            ParamInfo(
                _param_name(param, names), tuple(param._orig_size), dtype_name(sharded.dtype),
                bool(sharded.requires_grad), numel * gathered.itemsize,
            )
        )  # fmt: skip
    post = group.post_forward_mesh_info
    post_world = 1 if post is None else int(getattr(post, "shard_mesh_size", 1))
    keeps: bool | int = post is not None if post is None or post is mesh_info else post_world
    if keeps == world:
        keeps = True
    extended = any(hasattr(p.sharded_param._local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params)
    grads = {
        policy.reduce_dtype or policy.param_dtype or p.sharded_param.dtype
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    }
    return GroupInfo(
        id=group_id, fqn=fqn, unit=unit, modules=modules, params=tuple(params), tensors=len(params),
        bytes=sum(p.bytes for p in params),
        sharded_bytes=sum(_numel(p.sharded_size) * p.sharded_param.dtype.itemsize for p in group.fsdp_params),
        dtype=dtype_name(dtypes.pop()) if len(dtypes) == 1 else "uint8",
        reduce_dtype=dtype_name(grads.pop()) if len(grads) == 1 else "unknown",
        world=world, post_forward_world=post_world, replicate_world=int(getattr(mesh_info, "replicate_mesh_size", 1)),
        mesh=_mesh(mesh_info), reshard_after_forward=keeps,
        auto_policy=_auto_policy(state, post),
        trainable=sum(p.trainable for p in params), offload=any(p.offload_to_cpu for p in group.fsdp_params),
        named_dtype=dtype_name(policy.param_dtype) if policy.param_dtype and not extended else "",
        named_reduce_dtype=dtype_name(policy.reduce_dtype) if policy.reduce_dtype else "",
        shard_group=group_label(getattr(mesh_info, "shard_process_group", None)),
        replicate_group=group_label(getattr(mesh_info, "replicate_process_group", None)),
    )  # fmt: skip


def _auto_policy(state: Any, post: Any) -> bool | None:
    """Whether ``reshard_after_forward`` was left to FSDP2. Torch 2.7 and older do not keep that: a root's is set to False
    when it is initialised, always (2.7.1 _fsdp_state.py, _lazy_init); any other False is the user's."""
    known = getattr(state, "_auto_reshard_after_forward", None)
    if known is None and post is None and not state._is_root:
        return False
    return None if known is None else bool(known)


def _numel(size: torch.Size) -> int:
    total = 1
    for dim in size:
        total *= int(dim)
    return total


def _mesh(mesh_info: Any) -> dict[str, int]:
    mesh = mesh_info.mesh
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    return {name: int(mesh.size(dim)) for dim, name in enumerate(names)}
