"""Sees exceptions that come out of a part of a unit: a module that holds parameters of a unit without being one.

FSDP2 gathers a unit in its forward. Work through another method reaches such a module past all of FSDP2's hooks, and when the
program catches the error, nothing else of ours ever sees it. So each part has a forward hook that is called on exceptions; it
is there only while no forward or recomputation of the model runs, so that training does not pay for it: PyTorch calls a module
without hooks by a shorter way, and putting hooks on and off is what is left (so that a backward without forwards leaves them).
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import methodcaller, setitem
from typing import Any
from weakref import ref

import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from fsdptrace.adapters.frames import holders, says_freed
from fsdptrace.adapters.units import leaves

_run: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend

OnError = Callable[[nn.Module, BaseException], None]

# The module whose hooks PyTorch is running because of an exception: it iterates over them, so that they must not change. What
# was to be taken off it waits.
_running: list[nn.Module] = []
_waiting: list[Callable[[], None]] = []


class PartHooks:
    """The hooks on the parts of some units.

    Args:
        units: for each its modules and param groups.
        on_error: called with the part and an error that leaves it and says that parameters are not gathered.
    """

    def __init__(self, units: Iterable[tuple[list[nn.Module], list[Any]]], on_error: OnError) -> None:
        units = list(units)
        whole = {id(module) for modules, _ in units for module in modules}
        found = {id(part): part for _, groups in units for group in groups for part in holders(group)}
        self._parts = [ref(part) for number, part in found.items() if number not in whole]
        self._hook = _PartHook(self, on_error)
        self._id = RemovableHandle(OrderedDict()).id
        self._pop = methodcaller("pop", self._id, None)
        self._dicts: list[dict[int, Any]] = []
        self.on = False

    def put_on(self) -> None:
        """Prepares the parts; :meth:`watch` does the rest."""
        for part in self._alive():
            part._forward_hooks_always_called[self._id] = True
        self._dicts = [part._forward_hooks for part in self._alive()]

    def watch(self, on: bool) -> None:
        """Whether exceptions are looked for. No-op when it is so already."""
        if on == self.on:
            return
        self.on = on
        if _running or _waiting:
            _later(self._settle)
        else:
            self._settle()

    def take_off(self) -> None:
        """Removes everything."""
        self.watch(False)
        for part in self._alive():
            part._forward_hooks_always_called.pop(self._id, None)
        if not _running:
            self._dicts = []

    def _settle(self) -> None:
        # Twice a step for every part: no bytecode of ours for each.
        _run(map(setitem, self._dicts, repeat(self._id), repeat(self._hook)) if self.on else map(self._pop, self._dicts))

    def _alive(self) -> list[nn.Module]:
        return [part for reference in self._parts if (part := reference()) is not None]


def _later(call: Callable[[], None]) -> None:
    """Runs ``call`` now, or when no module's hooks are being run because of an exception."""
    _waiting.append(call)
    if not _running:
        waiting, _waiting[:] = list(_waiting), []
        for each in waiting:
            each()


class _PartHook:
    """The hook itself: an object, so that a copied or pickled module leaves it behind."""

    def __init__(self, parts: PartHooks, on_error: OnError) -> None:
        self._parts = parts
        self._on_error = on_error

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is not None or not self._parts.on:
            return
        error = sys.exc_info()[1]
        if error is None or not says_freed(error) or not leaves(error, module):
            return
        _running.append(module)
        try:
            self._on_error(module, error)
        finally:
            _running.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Nothing, ())


class _Nothing:
    """What a copy of a module has in the hook's place."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        pass
