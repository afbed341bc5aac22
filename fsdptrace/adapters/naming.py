"""What a checkpointed function is called: the module that it belongs to, by its name in the recorded model."""

from __future__ import annotations

import functools
import weakref
from types import FunctionType, MethodType
from typing import Any

import torch.nn as nn

from fsdptrace.model_map import ModelMap, clean_name, show_name

_DEPTH = 4  # how many functions around a module are looked into


class ModuleNames:
    """Names of the modules of one model, wrapper parts left out, and the unit that each lies in.

    Built at the first question and again, once per recording, when a module is asked for that was not there.
    """

    def __init__(self, model_map: ModelMap) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._units = {unit.fqn: unit.id for unit in model_map.units}
        for unit in model_map.units:
            self._units.update(dict.fromkeys(unit.modules, unit.id))
        self._known: dict[str, int] = {}
        self._fresh = False
        self._built = False

    def again(self) -> None:
        """A recording begins: modules may have been added since."""
        self._fresh = False

    def of(self, module: nn.Module, root: nn.Module | None) -> str | None:
        """Name of ``module`` in ``root``; ``None`` where it has none."""
        name = self._names.get(module)
        if name is None and not self._fresh and root is not None:
            self._fresh = self._built = True
            for path, found in root.named_modules():
                # A wrapper and what it wraps have one name.
                self._names.setdefault(found, clean_name(path))
            name = self._names.get(module)
        return name

    def unit_of(self, name: str) -> int:
        """The unit that the module ``name`` lies in, or is: the longest name that is a part of its own."""
        unit = self._known.get(name)
        if unit is None:
            path = name
            while path and path not in self._units:
                path = path.rpartition(".")[0]
            unit = self._known[name] = self._units.get(path, 0)
        return unit


def modules_of(function: Any, depth: int = _DEPTH) -> list[tuple[nn.Module, str]]:
    """The modules that ``function`` runs, as far as they can be seen from outside, each with what is to be added to its name.

    A module, a bound method of one, a ``functools.partial`` of these or of a method and its module, a function with such things
    in its closure: how models call ``checkpoint``.
    """
    if isinstance(function, nn.Module):
        return [(function, "")]
    if isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        if isinstance(first, nn.Module) and isinstance(function.func, FunctionType):
            # A method with its module, before it is bound: transformers 5 (modeling_layers.py) calls partial(forward, self).
            return modules_of(MethodType(function.func, first))
        return modules_of(function.func, depth)
    if isinstance(function, MethodType):
        if isinstance(function.__self__, nn.Module):
            name = function.__name__
            return [(function.__self__, "" if name in _CALLS else f".{name}()")]
        return modules_of(function.__func__, depth)
    if not isinstance(function, FunctionType) or depth == 0:
        call = type(function).__dict__.get("__call__")
        return modules_of(call.__get__(function), depth - 1) if depth and isinstance(call, FunctionType) else []
    if _of_sequence(function):
        return _sequential(function)
    found: list[tuple[nn.Module, str]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(value, (nn.Module, FunctionType, MethodType, functools.partial)) and name != "__class__":
            found += modules_of(value, depth - 1)
    called = f" ({function.__name__})"
    return [(module, called) for module, _ in found]


_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")


def _of_sequence(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__qualname__.startswith("checkpoint_sequential.")


def _sequential(function: FunctionType) -> list[tuple[nn.Module, str]]:
    """The modules of one segment of ``checkpoint_sequential`` (torch/utils/checkpoint.py, 2.6 to 2.15)."""
    cells = {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    try:
        return [(cells["functions"][i], "") for i in range(cells["start"], cells["end"] + 1)]
    except (KeyError, TypeError, IndexError):
        return []


def name_of(function: Any, names: ModuleNames, root: nn.Module | None) -> tuple[str, str | None]:
    """``(shown name, module name)`` of a checkpointed function: ``layers.3.mlp``, ``layers.3 (run)``, ``layers.0 to
    layers.2`` for a segment of a sequence; the module name is ``None`` where no module of the model is found."""
    found = [(name, more) for module, more in modules_of(function) if (name := names.of(module, root)) is not None]
    if not found:
        name = "__qualname__" if isinstance(function, (FunctionType, MethodType)) else "__name__"
        return getattr(function, name, None) or type(function).__qualname__, None
    first, more = found[0]
    if len(found) == 1:
        return f"{show_name(first)}{more}", first
    shown = [show_name(name) for name, _ in found]
    common = functools.reduce(_common, (name for name, _ in found))
    if _of_sequence(function):
        return f"{shown[0]} to {shown[-1]}", common
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else ""), common


def _common(one: str, other: str) -> str:
    """The name that both lie in."""
    same = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        same.append(a)
    return ".".join(same)
