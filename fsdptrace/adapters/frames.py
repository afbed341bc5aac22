"""What an exception says of its cause: its text, and the frames that it passed through. Read only when one is raised."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdptrace.adapters.describe import Unit
from fsdptrace.adapters.reads import called_in, is_a, line_of, tensors_of, variables
from fsdptrace.events import NONE
from fsdptrace.model_map import clean_name

FREED, STATE_DICT = 1, 2  # positions in events.ABOUT

# What PyTorch says when parameters are computed with that are not gathered: storage that FSDP2 freed, and the sharded
# DTensor beside a plain tensor (torch/distributed/tensor/_dispatch.py; in C++ since 2.12).
_MIXED = "got mixed torch.Tensor and DTensor"
_FREED = ("storage of size 0", _MIXED, "data is not allocated")
_ON_SHARDS = (  # may be about any DTensor: only where the operands are known
    "does not have a sharding strategy", "Sharding propagation failed", "not supported for tensor subclasses",
    "as_strided not supported with DTensor", "in-place operations that require placement changes are not supported",
)  # fmt: skip
# The local part of a shard where the whole was meant: only where it is an operand of the very operator that failed.
_SHAPES = ("must match the size of tensor", "shapes cannot be multiplied", "size mismatch", "Sizes of tensors must match",
           "Expected size for first two dimensions")  # fmt: skip

_TORCH = os.path.dirname(torch.__file__) + os.sep
_RECOMPUTATION = os.path.join(_TORCH, "utils", "checkpoint.py")
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py")

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11
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
    """Parameters of closed group ``group`` were used outside a forward of its unit, through ``method`` of ``module``; or, with
    ``where``, through a function of no module: its file and line, and whether it is a hook of ``module``."""

    group: int
    module: str
    method: str
    where: str = ""
    hook: bool = False

    def text(self) -> str:
        """As the event has it: ``module:method``, ``module|hook|name at file`` or ``|function|name at file``."""
        if not self.where:
            return f"{self.module}:{self.method}"
        return f"{self.module if self.hook else ''}|{'hook' if self.hook else 'function'}|{self.method} at {self.where}"


def text_of(error: BaseException) -> str:
    """What ``error`` says; nothing where an exception of the program cannot say it."""
    try:
        return str(error)
    except Exception:
        return ""


def has_notes(error: BaseException) -> bool:
    """Whether notes were added to ``error``."""
    try:
        return hasattr(error, "__notes__")
    except Exception:  # an exception class of the user's may refuse any attribute
        return False


def behind(error: BaseException) -> Iterator[BaseException]:
    """``error``, then what it was raised from or while handling (not past ``from None``), and what a group holds."""
    waiting, seen = [error], set[int]()
    while waiting:
        at = waiting.pop(0)
        if id(at) in seen:
            continue
        seen.add(id(at))
        yield at
        before = at.__cause__ if at.__cause__ is not None or at.__suppress_context__ else at.__context__
        held = at.exceptions if is_a(at, _GROUPS) else ()  # type: ignore[attr-defined]
        waiting += [*([] if before is None else [before]), *held]


def source_of(error: BaseException) -> BaseException | None:
    """The one of ``error`` and those :func:`behind` it whose text is that of a use of parameters that are not gathered."""
    return next((one for one in behind(error) if any(part in text_of(one) for part in (*_FREED, *_ON_SHARDS, *_SHAPES))), None)


def says_freed(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, may be about parameters that are not gathered."""
    return source_of(error) is not None


def for_certain(error: BaseException, in_backward: bool) -> bool:
    """Whether the text of ``error``, which :func:`says_freed`, is about parameters that are not gathered without knowing whose:
    tensors that a graph saved are plain, so that a DTensor in a backward was read by Python code, from wherever."""
    source = source_of(error)
    text = "" if source is None else text_of(source)
    if source is None or not any(part in text for part in _FREED):
        return False
    return not in_backward or _MIXED not in text or _recomputes(source)


def _recomputes(error: BaseException) -> bool:
    return any(frame.f_code.co_filename == _RECOMPUTATION for frame, _ in frames_of(error))


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
            found_here = variables(frame)
            models += [found_here[name] for name in ("model", "self") if is_a(found_here.get(name), nn.Module)]
        trace = trace.tb_next
    return found and (not models or any(shares(model, units) for model in models))


def shares(model: nn.Module, units: list[Unit]) -> bool:
    """Whether ``model`` has a module of ``units``, or is a part of one."""
    inside = {id(module) for module in model.modules()}
    return any(id(own) in inside or any(part is model for part in own.modules()) for unit in units for own in unit.modules)


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that ``error`` was raised in, innermost first, up to the outermost caller that still runs; and the instruction
    that each was at."""
    trace = error.__traceback__
    if trace is None:
        return
    outer = trace.tb_frame.f_back
    inner = []
    while trace is not None:
        inner.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    yield from reversed(inner)
    while outer is not None:
        yield outer, outer.f_lasti
        outer = outer.f_back


def is_running(units: list[Unit]) -> bool:
    """Whether a call of a module of ``units`` is under way on this thread."""
    own = {id(module) for unit in units for module in unit.modules}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(_self_of(frame)) in own:
            return True
        frame = frame.f_back
    return False


def _self_of(frame: FrameType) -> Any:
    return variables(frame).get("self") if "self" in _names(frame.f_code) else None


def _names(code: CodeType) -> tuple[str, ...]:
    return (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method ``frame`` runs, if it is one's: not a function that closes over a module's ``self``."""
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount]
    if not arguments:
        return None
    own = variables(frame).get("self" if "self" in arguments else arguments[0])
    if not is_a(own, nn.Module):
        return None
    if "self" in arguments:
        return own
    methods = (vars(kind).get(code.co_name) for kind in type(own).__mro__)
    return own if any(getattr(method, "__code__", None) is code for method in methods) else None


def modules_in(error: BaseException) -> list[nn.Module]:
    """The modules whose methods ``error`` came through, innermost first, where it :func:`says_freed`; else none."""
    source = source_of(error)
    if source is None or any(part in text_of(source) for part in _SHAPES):
        return []
    return [own for frame, _ in frames_of(source) if (own := module_of(frame)) is not None]


def look_at(error: BaseException, units: list[Unit], in_backward: bool) -> tuple[int, Used | None]:
    """What ``error`` is about (a position in :data:`~fsdptrace.events.ABOUT`), and whose parameters were used."""
    if says_freed(error):
        used = closed_use(error, units, in_backward)
        if used is not None or (for_certain(error, in_backward) and (in_backward or _in_a_pass(error, units))):
            return FREED, used
    return (STATE_DICT if from_state_dict_code(error, units) else 0), None


def _in_a_pass(error: BaseException, units: list[Unit]) -> bool:
    """Whether ``error`` came through a backward or a module of ``units``, and not out of the program's own code beside them."""
    names, source = _Parts(units).names, source_of(error) or error
    return any(frame.f_code.co_filename == _ENGINE or id(module_of(frame)) in names for frame, _ in frames_of(source))


def closed_use(error: BaseException, units: list[Unit], in_backward: bool = False) -> Used | None:
    """Whose parameters ``error``, which :func:`says_freed`, is about; ``None`` where that was in a forward of their own unit
    (other rules look at those), in state-dict code or an optimizer, or in code that no module of the model calls.

    Args:
        units: the model's, with PyTorch's own objects, outer ones first.
        in_backward: whether a backward is under way. A recomputation in it is for other rules.
    """
    source = source_of(error)
    if source is None or (in_backward and _recomputes(source)):
        return None
    parts = _Parts(units)
    certain = for_certain(error, in_backward)
    parts.shapes = any(part in text_of(source) for part in _SHAPES)
    frames = frames_of(source)
    for frame, lasti in frames:
        if is_a(_self_of(frame), Optimizer) or _is_state_dict(frame):
            return None
        module = module_of(frame)
        if _passes_on(frame):
            continue
        from_torch = frame.f_code.co_filename.startswith(_TORCH)
        if module is None or id(module) not in parts.names:
            group = None if from_torch else parts.read(frame, lasti, None)
            if group is not None:
                return _outside(group, frame, lasti, frames, parts, in_backward)
            if module is not None and _is_sharded_too(module, parts):
                return None
        else:
            used = parts.used(module, frame)
            unit = parts.unit[id(module)]
            closed = _closed(unit) if certain and parts.holds(module) else []
            if closed:
                return _through(replace(used, group=closed[0]), unit, frames, parts)
            read = parts.read(frame, lasti, module)
            if read is not None or parts.holds(module):
                return None if read is None else replace(used, group=read)
        if parts.shapes and not from_torch:  # an outer expression is not what failed
            return None
    return None


def _is_sharded_too(module: nn.Module, parts: _Parts) -> bool:
    """Whether ``module``, which is not the model's nor around it, has parameters of its own that may be what was used."""
    inside = list(module.modules())
    return any(is_a(part, FSDPModule) for part in inside) and not any(id(part) in parts.names for part in inside)


def _outside(
    group: int, frame: FrameType, lasti: int, frames: Iterator[tuple[FrameType, int]], parts: _Parts, in_backward: bool
) -> Used | None:
    """A function of no module of the model, run by ``frame``, read parameters of ``group``: a hook, the backward of something,
    or a function that a method of the model called."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
    used = Used(group, "", name, f"{os.path.basename(code.co_filename)}, line {line_of(frame, lasti)}")
    for outer, at in frames:
        if outer.f_code.co_filename == _ENGINE:
            return used
        passes_on = _passes_on(outer)
        module = _self_of(outer) if passes_on else module_of(outer)
        if module is None or id(module) not in parts.names:
            continue
        if passes_on and called_in(outer, at) == "hook":
            return replace(used, module=parts.names[id(module)], hook=True)
        unit = parts.unit[id(module)]
        if group in unit.info.groups:
            return None if passes_on else _through(replace(parts.used(module, outer), group=group), unit, frames, parts)
        return replace(parts.used(module, outer), group=group, method="forward" if passes_on else outer.f_code.co_name)
    return used if in_backward else None


def _through(used: Used, unit: Unit, frames: Iterator[tuple[FrameType, int]], parts: _Parts) -> Used | None:
    """Follows ``used``, in ``unit``, outwards: to the unit's own method, or to the outermost part of it that ran; ``None``
    where that is the unit's own forward."""
    own = {id(module) for module in unit.modules}
    exact = used.module in unit.info.modules
    inside = True
    for frame, _ in frames:
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
        self.shapes = False  # whether the error is about shapes alone
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

    def read(self, frame: FrameType, lasti: int, module: nn.Module | None) -> int | None:
        """The closed group whose shard is an operand of the expression that ``frame`` was at; else of whose gathered copy a
        local variable, or an attribute of ``module``, is a part: by storage, so that there is no doubt. ``None`` where there
        is none, or more than one."""
        tensors = tensors_of(frame, lasti, exact=self.shapes)
        operands = {_storage(value) for value in tensors if not self.shapes or not is_a(value, DTensor)}
        kept = [*variables(frame).values(), *(vars(module).values() if module is not None else ())]
        copies = operands | {_storage(value) for value in kept if type(value) in _TENSORS and not self.shapes}
        found = set()
        for unit in self._units:
            for number in _closed(unit) if copies else ():
                for param in unit.groups[unit.info.groups.index(number)].fsdp_params:
                    copy = param.__dict__.get("_unsharded_param")
                    if _storage(param.sharded_param) in operands or (copy is not None and _storage(copy) in copies):
                        found.add(number)
        return found.pop() if len(found) == 1 else None


def _storage(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor") if is_a(tensor, DTensor) else tensor  # noqa: B009  a DTensor has no storage of its own
    try:
        with torch._C.DisableTorchFunction():
            return int(local.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse ones, and those of torch.func
        return -1


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
