"""Names of parameters that only an optimizer shows us: looked for among all modules that live, once a rule is broken."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from fsdptrace.model_map import clean_name


def names_of(params: Iterable[nn.Parameter]) -> dict[int, str]:
    """Names by ``id``, in the largest module that holds the parameter; those under DistributedDataParallel are left out, and
    so are those that no module holds. Walks the garbage collector's objects: tens of milliseconds, and no more than that."""
    wanted = {id(param): "" for param in params}
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_modules" in thing.__dict__]
    children = {id(child) for module in modules for child in module.children()}
    reduced: set[int] = set()
    best = dict.fromkeys(wanted, 0)
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            reduced |= {id(param) for param in module.parameters()}
        if id(module) in children:
            continue
        size = sum(1 for _ in module.modules())
        for name, param in module.named_parameters():
            if id(param) in wanted and size > best[id(param)]:
                best[id(param)] = size
                wanted[id(param)] = clean_name(name)
    return {key: name for key, name in wanted.items() if name and key not in reduced}
