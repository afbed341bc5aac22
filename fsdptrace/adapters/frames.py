"""What an exception says of its cause: its text, and the frames that it passed through. Read only when one is raised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from fsdptrace.adapters.describe import Unit
from fsdptrace.events import NONE
from fsdptrace.model_map import clean_name

FREED, STATE_DICT = 1, 2  # positions in events.ABOUT

# What PyTorch says when parameters are computed with that are not gathered: storage that FSDP2 freed, and the sharded
# DTensor beside a plain tensor (torch/distributed/tensor/_dispatch.py; in C++ since 2.12).
_FREED = ("storage of size 0", "got mixed torch.Tensor and DTensor", "data is not allocated")

_TENSORS = (torch.Tensor, nn.Parameter)
_MODULE_FILE = sys.modules[nn.Module.__module__].__file__
_OPTIMIZER_FILE = sys.modules[Optimizer.__module__].__file__
_CALLS = ("_call_impl", "_wrapped_call_impl", "_slow_forward", "inner", "__call__")  # of nn.Module: they only pass a call on
_STATE_DICT_CALLS = (
    "state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict", "load",
)  # fmt: skip
_CHECKPOINT = ("torch/distributed/checkpoint/", "torch/distributed/_state_dict_utils.py")


@dataclass(frozen=True, slots=True)
class Used:
    """Parameters of closed group ``group`` were used outside a forward of its unit, through ``method`` of ``module``."""

    group: int
    module: str
    method: str


def says_freed(error: BaseException) -> bool:
    """Whether the text of ``error`` is that of a use of parameters that are not gathered."""
    text = str(error)
    return any(part in text for part in _FREED)


def from_state_dict_code(error: BaseException, units: list[Unit]) -> bool:
    """Whether ``error`` came out of PyTorch's code for state dicts and checkpoints, working on the model of ``units`` or on
    none that can be told."""
    found = False
    models: list[nn.Module] = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if _is_state_dict(frame):
            found = True
            models += [own for name in ("model", "self") if isinstance(own := frame.f_locals.get(name), nn.Module)]
        trace = trace.tb_next
    return found and (not models or any(shares(model, units) for model in models))


def shares(model: nn.Module, units: list[Unit]) -> bool:
    """Whether ``model`` has a module of ``units``, or is a part of one."""
    inside = {id(module) for module in model.modules()}
    return any(id(own) in inside or any(part is model for part in own.modules()) for unit in units for own in unit.modules)


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames that ``error`` was raised in, innermost first, up to the outermost caller that still runs."""
    trace = error.__traceback__
    if trace is None:
        return
    outer = trace.tb_frame.f_back
    inner = []
    while trace is not None:
        inner.append(trace.tb_frame)
        trace = trace.tb_next
    yield from reversed(inner)
    while outer is not None:
        yield outer
        outer = outer.f_back


def is_running(units: list[Unit]) -> bool:
    """Whether a call of a module of ``units`` is under way on this thread."""
    own = {id(module) for unit in units for module in unit.modules}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_locals.get("self")) in own:
            return True
        frame = frame.f_back
    return False


def module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method ``frame`` runs, if it is one's."""
    own = frame.f_locals.get("self")
    return own if isinstance(own, nn.Module) else None


def modules_in(error: BaseException) -> list[nn.Module]:
    """The modules whose methods ``error`` came through, innermost first, where it :func:`says_freed`; else none."""
    return [module for frame in frames_of(error) if (module := module_of(frame)) is not None] if says_freed(error) else []


def closed_use(error: BaseException, units: list[Unit]) -> Used | None:
    """Whose parameters ``error``, which :func:`says_freed`, is about; ``None`` where that was in a forward of their own unit
    (other rules look at those), in state-dict code or an optimizer, or in code of no module of the model.

    Args:
        units: the model's, with PyTorch's own objects, outer ones first.
    """
    parts = _Parts(units)
    frames = frames_of(error)
    for frame in frames:
        if isinstance(frame.f_locals.get("self"), Optimizer) or _is_state_dict(frame):
            return None
        module = module_of(frame)
        if module is None or _passes_on(frame) or id(module) not in parts.names:
            continue
        used = parts.used(module, frame)
        unit = parts.unit[id(module)]
        closed = _closed(unit) if parts.holds(module) else []
        if closed:
            return _through(replace(used, group=closed[0]), unit, frames, parts)
        read = parts.read_below(module, frame)
        if read is None:
            read = parts.kept_copy(module, frame)
        if read is not None or parts.holds(module):
            return None if read is None else replace(used, group=read)
    return None


def _through(used: Used, unit: Unit, frames: Iterator[FrameType], parts: _Parts) -> Used | None:
    """Follows ``used``, in ``unit``, outwards: to the unit's own method, or to the outermost part of it that ran; ``None``
    where that is the unit's own forward."""
    own = {id(module) for module in unit.modules}
    exact = used.module in unit.info.modules
    inside = True
    for frame in frames:
        module = module_of(frame)
        if module is None:
            continue
        inside = inside and parts.unit.get(id(module)) is unit
        if id(module) in own and frame.f_code.co_name == "_call_impl":
            return None
        if not exact and not _passes_on(frame) and (inside or id(module) in own):
            used = replace(parts.used(module, frame), group=used.group)
            exact = id(module) in own
    return used


class _Parts:
    """All modules of a model: ``names`` and, of each, the nearest ``unit`` around it, by id."""

    def __init__(self, units: list[Unit]) -> None:
        self.names: dict[int, str] = {}
        self.unit: dict[int, Unit] = {}
        for unit in units:
            for name, module in zip(unit.info.modules, unit.modules, strict=True):
                for below, part in module.named_modules():
                    self.names.setdefault(id(part), clean_name(".".join(filter(None, (name, below)))))
                    self.unit[id(part)] = unit
        self._units = units
        self._holders = {id(part) for unit in units for group in unit.groups for part in holders(group)}

    def used(self, module: nn.Module, frame: FrameType) -> Used:
        """What ``frame`` runs, of ``module``."""
        return Used(NONE, self.names[id(module)], frame.f_code.co_name)

    def holds(self, module: nn.Module) -> bool:
        """Whether ``module`` is the model's and holds parameters of its unit, itself or in modules below it."""
        unit = self.unit.get(id(module))
        return unit is not None and any(
            id(part) in self._holders and self.unit[id(part)] is unit for part in module.modules() if id(part) in self.unit
        )

    def read_below(self, module: nn.Module, frame: FrameType) -> int | None:
        """The closed group, of a unit below ``module``, whose parameter the code of ``frame`` names (``self.emb.weight``);
        ``None`` where there is none, or more than one."""
        named = {*frame.f_code.co_names, *frame.f_code.co_varnames}
        prefix = f"{self.names[id(module)]}." if self.names[id(module)] else ""
        found = set()
        for unit in self._units:
            for number in _closed(unit):
                group = unit.groups[unit.info.groups.index(number)]
                for param in group.fsdp_params:
                    info = param._module_info
                    path = f"{self.names.get(id(info.module), '')}.{info.param_name}"
                    steps = path.removeprefix(prefix).split(".")
                    if path.startswith(prefix) and named.issuperset(step for step in steps if step and not step.isdigit()):
                        found.add(number)
        return found.pop() if len(found) == 1 else None

    def kept_copy(self, module: nn.Module, frame: FrameType) -> int | None:
        """The closed group of whose gathered copy a local variable of ``frame``, or an attribute of ``module``, is a part: by
        storage, so that there is no doubt. ``None`` where there is none, or more than one."""
        kept = {_storage(value) for value in (*frame.f_locals.values(), *vars(module).values()) if type(value) in _TENSORS}
        found = set()
        for unit in self._units:
            for number in _closed(unit) if kept else ():
                for param in unit.groups[unit.info.groups.index(number)].fsdp_params:
                    copy = param.__dict__.get("_unsharded_param")
                    if copy is not None and _storage(copy) in kept:
                        found.add(number)
        return found.pop() if len(found) == 1 else None


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _closed(unit: Unit) -> list[int]:
    return [number for number, group in zip(unit.info.groups, unit.groups, strict=True) if not _open(group)]


def holders(group: Any) -> list[nn.Module]:
    """The modules that hold the parameters of an FSDPParamGroup themselves, tied ones included."""
    found: dict[int, nn.Module] = {}
    for param in group.fsdp_params:
        info = param._module_info
        for module in (info.module, *info.shared_modules):
            found[id(module)] = module
    return list(found.values())


def _open(group: Any) -> bool:
    return bool(group._sharded_state.name == "UNSHARDED")


def _passes_on(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == _MODULE_FILE and code.co_name in _CALLS


def _is_state_dict(frame: FrameType) -> bool:
    code = frame.f_code
    if any(part in code.co_filename for part in _CHECKPOINT):
        return True
    return code.co_filename in (_MODULE_FILE, _OPTIMIZER_FILE) and code.co_name in _STATE_DICT_CALLS
