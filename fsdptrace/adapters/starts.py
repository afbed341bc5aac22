"""What a region's forward and its recomputation begin with, and what differs between the two.

By default what is cheap and held by no tensor: the global state, dtypes that units are given, identities and version counters
of buffers. With ``fingerprint`` also values, on the device (see :mod:`~fsdptrace.adapters.fingerprints`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters import fingerprints, surroundings
from fsdptrace.adapters.fingerprints import Prints, Quiet
from fsdptrace.adapters.fsdp import InstalledModel
from fsdptrace.adapters.group import UNSHARDED
from fsdptrace.adapters.look import dtype_number
from fsdptrace.model_map import show_name

# An entry of `dtypes` packs a unit, the position of a tensor among its inputs, and the tensor's dtype.
_ARGUMENT_UNIT = 64
_UNIT_UNIT = 64 * 64

Buffers = Sequence[tuple[dict[str, Any], str, str]]
Cause = dict[str, str]


class Start:
    """What one of them began with.

    Attributes:
        state, variables: the global state and the context variables.
        training, versions: the module's training flag; identities and version counters of its buffers.
        dtypes: of what units in it were given, in order, packed.
        prints: values, where wanted; ``used`` counts the units' uses in them; ``drawn`` holds the generators that the forward
            drew from.
    """

    __slots__ = ("drawn", "dtypes", "prints", "state", "training", "used", "variables", "versions")

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()
        self.variables: tuple[str | int, ...] = ()
        self.training = False
        self.versions: tuple[int, ...] = ()
        self.dtypes: list[int] = []
        self.prints: Prints | None = None
        self.used: dict[int, int] = {}
        self.drawn: frozenset[str] = frozenset()


class Starts:
    """Takes and compares the starts of one model's regions.

    Attributes:
        wants: kinds of fingerprints that are taken.
    """

    def __init__(self, hooks: InstalledModel) -> None:
        self.wants: frozenset[str] = frozenset()
        self._hooks = hooks
        self._map = hooks.map
        self._buffers: weakref.WeakKeyDictionary[nn.Module, Buffers] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Drops what leads to the model's tensors."""
        self._buffers.clear()

    # -- taking --------------------------------------------------------------------------------------------------------
    def take(self, module: nn.Module | None, name: str, group: int, function: Any, args: Any, kwargs: Any) -> Start:
        """The start of a region: ``function`` is called with ``args`` and ``kwargs`` (``None`` where they are not known)."""
        start = Start()
        start.state = surroundings.read()
        start.variables = surroundings.read_variables()
        if module is not None:
            start.training = module.training
            start.versions = _versions(self._buffers_of(module, name))
        if self.wants:
            start.prints = prints = Prints()
            with Quiet():
                if "params" in self.wants and group >= 0:
                    self._add_group(start, group)
                if "inputs" in self.wants:
                    if args is not None:
                        for i, value in enumerate(args):
                            prints.add("inputs", f"input {i}", value)
                        for key, value in (kwargs or {}).items():
                            prints.add("inputs", f"input {key!r}", value)
                    _add_closure(prints, function)
                    if module is not None:
                        prints.add_module(name, module)
                    prints.add_random()
                prints.freeze()
        return start

    def unit(self, starts: Sequence[Start], unit: int, args: Sequence[Any]) -> None:
        """A unit's forward begins in what began with ``starts``, with ``args`` as FSDP2's pre-forward left them."""
        entries = [
            unit * _UNIT_UNIT + position * _ARGUMENT_UNIT + dtype_number(value.dtype)
            for position, value in enumerate(args[:64])
            if isinstance(value, torch.Tensor)
        ]
        for start in starts:
            start.dtypes += entries
        if "params" in self.wants and starts:
            with Quiet():
                for start in starts:
                    for group in self._map.units[unit].groups:
                        self._add_group(start, group)

    def end_forward(self, start: Start) -> None:
        """The forward that began with ``start`` is over: which generators did it draw from?"""
        if start.prints is not None and "inputs" in self.wants:
            with Quiet():
                before = dict(zip(start.prints.names, start.prints.texts, strict=True))
                start.drawn = frozenset(name for name, state in fingerprints.random_states() if before.get(name) != state)

    def _add_group(self, start: Start, group: int) -> None:
        hooks = self._hooks.groups[group]
        if start.prints is None or hooks.group is None or hooks.group._sharded_state._value_ != UNSHARDED:
            return
        use = start.used[group] = start.used.get(group, 0) + 1
        which = f", use {use}" if use > 1 else ""
        unit = show_name(hooks.info.fqn)
        for param, info in zip(hooks.group.fsdp_params, hooks.info.params, strict=False):
            copy = param.__dict__.get("_unsharded_param")
            if copy is not None:
                start.prints.add("params", f"{info.name} (gathered by {unit}{which})", copy.detach())

    # -- comparing -----------------------------------------------------------------------------------------------------
    def causes(self, name: str, module: nn.Module | None, one: Start, other: Start) -> tuple[list[Cause], list[str], list[str]]:
        """What differs between the forward's start and the recomputation's, what was looked at and is the same, what was not
        recorded. Waits for the device where there are fingerprints."""
        differs: list[Cause] = []

        def add(kind: str, what: str, forward: Any, recompute: Any) -> None:
            differs.append({"kind": kind, "what": what, "forward": str(forward), "recompute": str(recompute)})

        self._dtypes(add, one, other)
        for what, before, after in surroundings.differences(one.state, other.state):
            add("context", what, before, after)
        variables = surroundings.changed_variables(one.variables, other.variables)
        if variables:
            add("context", f"context variable {', '.join(variables)}", "set one way", "set another")
        values = one.prints is not None and other.prints is not None and "inputs" in self.wants
        if one.training != other.training:
            add("module", f"{name}.training", one.training, other.training)
        if not values and module is not None:
            self._written(add, self._buffers_of(module, name), one.versions, other.versions)
        if one.prints is not None and other.prints is not None:
            with Quiet():
                found = fingerprints.differences(one.prints, other.prints)
            for item in found:
                if item.kind == "rng" and not item.name.startswith("generator ") and item.name not in one.drawn:
                    continue  # the forward did not draw from it
                if not (item.kind == "module" and item.name == f"{name}.training"):
                    add(item.kind, _shown(item), item.forward, item.recompute)
        kinds = {item["kind"] for item in differs}
        seen = ["context"]
        if one.prints is not None and other.prints is not None:
            seen += [kind for kind in ("params",) if kind in self.wants]
            seen += ["inputs", "rng", "module"] if "inputs" in self.wants else []
            seen = [kind for kind in seen if kind not in one.prints.cut | other.prints.cut]
        same = [kind for kind in seen if kind not in kinds]
        missing = [kind for kind in ("params", "inputs", "rng", "module") if kind not in kinds and kind not in seen]
        return differs, same, missing

    def values(self, one: Start, other: Start) -> list[Cause]:
        """Gathered parameters and inputs whose values differ."""
        if one.prints is None or other.prints is None:
            return []
        with Quiet():
            found = fingerprints.differences(one.prints, other.prints, tensors_only=True)
        return [
            {"kind": item.kind, "what": _shown(item), "forward": item.forward, "recompute": item.recompute}
            for item in found
            if item.kind in ("params", "inputs")
        ]

    def _dtypes(self, add: Any, one: Start, other: Start) -> None:
        for a, b in zip(one.dtypes, other.dtypes, strict=False):
            if a != b:
                if a // _ARGUMENT_UNIT == b // _ARGUMENT_UNIT:
                    unit = show_name(self._map.units[a // _UNIT_UNIT].fqn)
                    what = f"input {a // _ARGUMENT_UNIT % 64} of {unit}, after FSDP2's cast"
                    add("inputs", what, ev.DTYPES[a % 64], ev.DTYPES[b % 64])
                return  # what follows from it differs too

    def _written(self, add: Any, buffers: Buffers, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        for i, (_, _, name) in enumerate(buffers):
            was, now = before[2 * i : 2 * i + 2], after[2 * i : 2 * i + 2]
            if was == now or len(was) != len(now):
                continue
            times = now[1] - was[1]
            how = f"written {'once' if times == 1 else f'{times} times'} since"
            add("module", f"buffer {name}", "as it was", "another tensor" if was[0] != now[0] else how)

    def _buffers_of(self, module: nn.Module, name: str) -> Buffers:
        """Where the buffers of ``module`` are kept, by owner and name; looked up once per recording."""
        known = self._buffers.get(module)
        if known is None:
            known = self._buffers[module] = [
                (owner._buffers, key, ".".join(part for part in (name, path, key) if part))
                for path, owner in module.named_modules()
                for key in owner._buffers
            ]
        return known


def _shown(item: fingerprints.Difference) -> str:
    return f"{item.name}, {item.tensor}" if item.tensor else item.name


def _versions(buffers: Buffers) -> tuple[int, ...]:
    out: list[int] = []
    for owner, name, _ in buffers:
        try:
            buffer = owner[name]
            out += (id(buffer), buffer._version)
        except (AttributeError, KeyError, RuntimeError):  # None, taken away, made under inference_mode
            out += (0, -1)
    return tuple(out)


def _add_closure(prints: Prints, function: Any) -> None:
    """What a function brings along beside its arguments."""
    while isinstance(function, functools.partial):
        for i, value in enumerate(function.args):
            prints.add("inputs", f"input {i} of the partial", value)
        for key, value in function.keywords.items():
            prints.add("inputs", f"input {key!r} of the partial", value)
        function = function.func
    if isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                prints.add("inputs", f"{name}, which it closes over", cell.cell_contents)
            except ValueError:  # not filled yet
                continue
