"""What recording may touch, as it is now: to be compared with how it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.modules import module as module_globals
from torch.optim import optimizer as optimizer_globals

from fsdptrace.adapters.compat import groups_of


def objects_of(models: Iterable[nn.Module]) -> dict[str, Any]:
    """Every object of FSDP2's and every module of ``models``, by a name to show."""
    found: dict[str, Any] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            found[f"{number}:{name}"] = module
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                found[f"{number}:{name}.state"] = state
                for index, group in enumerate(groups_of(state)):
                    found[f"{number}:{name}.group{index}"] = group
                    found[f"{number}:{name}.group{index}.comm_ctx"] = group.comm_ctx
    return found


def snapshot(models: Iterable[nn.Module], values: bool = True) -> dict[str, Any]:
    """Namespaces and hook lists of all objects and globals. Without ``values``, what training itself changes is left out."""
    out: dict[str, Any] = {}
    for name, thing in objects_of(models).items():
        for key, value in vars(thing).items():
            if issubclass(type(value), OrderedDict) or "hooks" in key:
                out[f"{name}.{key}"] = list(value.items()) if isinstance(value, dict) else value
            elif values or callable(value):
                out[f"{name}.{key}"] = id(value)
            else:
                out[f"{name}.{key}"] = "there"
    for cls in (FSDPParamGroup, FSDPState, FSDPModule, nn.Module, torch.optim.Optimizer):
        out[cls.__name__] = dict(vars(cls))
    for place in (module_globals, optimizer_globals, torch.utils.checkpoint, torch.distributed, torch.autograd):
        for key, value in vars(place).items():
            if issubclass(type(value), OrderedDict):
                out[f"{place.__name__}.{key}"] = list(value.items())
            elif not key.startswith("__"):
                out[f"{place.__name__}.{key}"] = id(value)
    return out


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not as it was."""
    names = sorted({*before, *after})
    missing = object()
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]
