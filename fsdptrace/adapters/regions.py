"""Checkpointed regions of one recorded model: what is recorded of their forwards and recomputations, and of a mismatch.

A region is one call of a checkpointed function. While it runs, what is cheap and of use when its recomputation turns out
otherwise is kept as integers: the global state that it began under, dtypes that units were given, versions of buffers.
Saved tensors are counted by PyTorch itself, which keeps their shapes, dtypes and devices; they are looked at when the
forward ends, for their bytes, and when a recomputation does not match.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace import repeats
from fsdptrace.adapters import surroundings
from fsdptrace.adapters.context import (
    BACKWARD_SEQ,
    BUSY,
    CONTEXT,
    DEPTH,
    RECOMPUTE_DEPTH,
    TOP,
    Context,
    clock,
    graph_task_id,
)  # fmt: skip
from fsdptrace.adapters.look import dtype_number
from fsdptrace.adapters.naming import ModuleNames, modules_of, name_of
from fsdptrace.model_map import ModelMap

NON_REENTRANT, REENTRANT, SELECTIVE = range(3)  # positions in CHECKPOINTS
RETURNED, EARLY_STOP, FAILED = range(3)  # positions in ENDS
COUNT, METADATA, VALUES = range(3)  # positions in MISMATCHES

# An entry of `starts` packs a unit, the position of a tensor among its inputs, and the tensor's dtype.
_ARGUMENT_UNIT = 64
_UNIT_UNIT = 64 * 64


class Explainer(Protocol):
    """What regions ask of the recording beside what all hooks do."""

    def explain(self, error: BaseException, region: int, group: int, detail: dict[str, Any]) -> None:
        """Puts what is known of a mismatch on the exception that PyTorch raised for it."""
        ...

    def remark(self, error: BaseException, region: int, group: int, detail: dict[str, Any]) -> None:
        """Puts what is known of a recomputation on another exception that came out of it."""
        ...

    def cannot_show(self, line: str) -> None:
        """Says in the file what cannot be seen."""
        ...


class Start:
    """What a forward or a recomputation of a region began with.

    Attributes:
        state, variables: the global state and the context variables (see :mod:`~fsdptrace.adapters.surroundings`).
        versions: identities and version counters of the module's buffers; ``training`` its training flag.
        starts: dtypes of what units in it were given, in order, packed.
    """

    __slots__ = ("starts", "state", "training", "variables", "versions")

    def __init__(self, module: nn.Module | None, buffers: Sequence[tuple[dict[str, Any], str, str]]) -> None:
        self.state = surroundings.read()
        self.variables = surroundings.read_variables()
        self.training = module is not None and module.training
        self.versions = _versions(buffers)
        self.starts: list[int] = []


class Again:
    """One recomputation that is running or has just ended."""

    __slots__ = ("depth", "end", "open", "outer", "parent", "pass_", "saved", "seq", "start", "t0", "t1")

    def __init__(self, seq: int, t0: int, parent: int, start: Start) -> None:
        self.seq = seq
        self.t0 = self.t1 = t0
        self.parent = parent
        self.start = start
        self.end = RETURNED
        self.saved = ev.NONE
        self.outer = self.depth = self.open = 0
        self.pass_ = ev.PASS_RECOMPUTE


class Region:
    """One call of a checkpointed function. Lives as long as PyTorch's own frame for it."""

    __slots__ = (
        "again", "checkpoint", "function", "group", "module", "name", "outer", "owner", "parent", "pass_", "seq", "shown",
        "start", "t0",
    )  # fmt: skip

    def __init__(self, owner: Regions, function: Any, name: str, group: int, checkpoint: int) -> None:
        self.owner = owner
        self.function = function
        self.shown = name
        self.name = owner.context.owner.text(name)
        self.group = group
        self.checkpoint = checkpoint
        self.again: Again | None = None
        self.seq = self.t0 = self.parent = self.outer = 0
        self.pass_ = ev.PASS_FORWARD
        self.module: weakref.ref[nn.Module] | None = None
        self.start: Start


class Regions:
    """The regions of one recorded model; tells the seam (:mod:`~fsdptrace.adapters.checkpoint`) whose a function is.

    Args:
        context: what the hooks of the model share.
        model_map: the model.
        root: the model itself, or ``None`` while no recording holds it.
        explainer: the recording.
    """

    def __init__(
        self, context: Context, model_map: ModelMap, root: Callable[[], nn.Module | None], explainer: Explainer
    ) -> None:
        self.context = context
        self.map = model_map
        self.active = False
        self._compiled = False
        self._root = root
        self._explainer = explainer
        self._names = ModuleNames(model_map)
        self._named: weakref.WeakKeyDictionary[nn.Module, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._buffers: weakref.WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str, str]]] = weakref.WeakKeyDictionary()
        self._open: list[Region | Again] = []
        context.forward_ends = self._forward_ends
        context.regions = self

    # -- life ----------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """A recording begins."""
        self.active = True
        self._names.again()
        self._buffers.clear()

    def stop(self) -> None:
        """A recording ended; regions that wait for their backward are of no interest any more."""
        self.active = False
        self._open.clear()
        self._buffers.clear()
        self.context.collect = None

    def runs(self) -> bool:
        """Whether a forward or a backward of the model is running, so that a function without a module is its own."""
        shared = self.context.shared
        return bool(shared[DEPTH] or (shared[BACKWARD_SEQ] and graph_task_id() != -1))

    def owns(self, function: Any) -> bool:
        """Whether a module of the model lies in ``function``."""
        root = self._root()
        return any(self._names.of(module, root) is not None for module, _ in modules_of(function))

    def traced(self) -> None:
        """torch.compile traced through a checkpoint of the model: it recomputes inside of one graph, where nobody sees it."""
        if not self._compiled:
            self._compiled = True
            self._explainer.cannot_show("recompute: not visible where torch.compile was put around a checkpoint")

    # -- forward -------------------------------------------------------------------------------------------------------
    def begin(self, function: Any, checkpoint: int) -> Region:
        """A region's forward begins."""
        c = self.context
        shared = c.shared
        if not shared[DEPTH] and not shared[BACKWARD_SEQ]:
            self._open.clear()  # what an exception left
        name, unit = self._name(function)
        groups = self.map.units[unit].groups
        region = Region(self, function, name, groups[0] if groups else ev.NONE, checkpoint)
        module = self._module(function)
        region.module = None if module is None else weakref.ref(module)
        region.parent = c.parent()
        region.pass_ = shared[CONTEXT] % 4 or ev.PASS_FORWARD
        region.outer = shared[TOP]
        region.start = Start(module, self._buffers_of(module))
        region.seq = shared[TOP] = next(c.ids)
        self._open.append(region)
        c.collect = self._collect
        region.t0 = clock()
        return region

    def done(self, region: Region, saved: int, size: int) -> None:
        """Its forward returned: ``saved`` tensors of ``size`` bytes, -1 where it is not known."""
        t1 = clock()
        self._close(region, region.outer)
        self.context.shared[BUSY] = 1
        self._emit(region, t1, saved, size)

    def left(self, region: Region) -> None:
        """An exception left its forward."""
        self.done(region, ev.NONE, ev.NONE)

    def _emit(self, region: Region, t1: int, saved: int, size: int) -> None:
        self.context.emit(
            ev.REGION, region.seq, region.t0, t1, region.group, region.parent,
            region.seq, saved, size, region.checkpoint, region.name, pass_=region.pass_,
        )  # fmt: skip

    def _close(self, entry: Region | Again, outer: int) -> None:
        """Takes ``entry`` from what is open, and what lies in it and was left by an exception: nobody tells of that."""
        shared = self.context.shared
        if entry in self._open:
            at = self._open.index(entry)
            inside = self._open[at + 1 :]
            del self._open[at:]
            for region in reversed(inside):
                if isinstance(region, Region):
                    self._emit(region, clock(), ev.NONE, ev.NONE)
                shared[TOP] = region.outer
        if shared[TOP] == entry.seq:
            shared[TOP] = outer
        if not self._open:
            self.context.collect = None

    def _forward_ends(self, seq: int) -> None:
        for entry in self._open:
            if isinstance(entry, Region) and entry.seq > seq:
                self.left(entry)
                break

    # -- recomputation -------------------------------------------------------------------------------------------------
    def begin_again(self, region: Region) -> Again:
        """The function is called again."""
        c = self.context
        shared = c.shared
        if not shared[BACKWARD_SEQ]:
            c.open_backward()
        again = Again(next(c.ids), 0, c.parent(), Start(region.module() if region.module else None, self._buffers_for(region)))
        again.outer = shared[TOP]
        again.depth = shared[RECOMPUTE_DEPTH]
        again.open = len(self._open)
        shared[TOP] = again.seq
        if shared[BACKWARD_SEQ]:
            shared[RECOMPUTE_DEPTH] += 1
            shared[CONTEXT] |= ev.PASS_RECOMPUTE
        again.pass_ = shared[CONTEXT] % 4
        self._open.append(again)
        c.collect = self._collect
        region.again = again
        again.t0 = clock()
        return again

    def end_again(self, again: Again, end: int) -> None:
        """The function returned, or was left, as ``end`` says."""
        again.t1 = clock()
        again.end = end
        shared = self.context.shared
        if shared[BACKWARD_SEQ]:
            shared[RECOMPUTE_DEPTH] = again.depth
            if not again.depth and shared[CONTEXT] % 4 == ev.PASS_RECOMPUTE:
                shared[CONTEXT] -= ev.PASS_RECOMPUTE - ev.PASS_BACKWARD
        self._close(again, again.outer)

    def recomputed(self, region: Region, again: Again, saved: int) -> None:
        """Records the recomputation: ``saved`` tensors, -1 where it is not known."""
        again.saved = saved
        self.context.emit(
            ev.RECOMPUTE, again.seq, again.t0, again.t1, region.group, again.parent,
            region.seq, saved, again.end, region.checkpoint, region.name, pass_=again.pass_,
        )  # fmt: skip

    def failed(self, region: Region, again: Again, error: BaseException) -> None:
        """An exception that is no mismatch left the recomputation."""
        self._explainer.remark(error, region.seq, region.group, self._detail(region, again))

    # -- mismatch ------------------------------------------------------------------------------------------------------
    def mismatch(
        self, region: Region, again: Again, error: BaseException, forward: Sequence[Any], recompute: Sequence[Any], more: bool
    ) -> None:
        """PyTorch found that a recomputation saved other tensors.

        Args:
            forward, recompute: metadata of the saved tensors of both, ``None`` where it is not known.
            more: the recomputation was about to save more of them than the forward, and was stopped there.
        """
        one, other = [_saved(item) for item in forward], [_saved(item) for item in recompute]
        what = METADATA if len(one) == len(other) and not more else COUNT
        detail = {
            **self._detail(region, again), "forward": len(one), "recompute": max(again.saved, len(other)), "more": more,
            **_difference(one, other, more),
        }  # fmt: skip
        c = self.context
        now = clock()
        try:
            c.emit(
                ev.MISMATCH, next(c.ids), now, now, region.group, again.seq,
                region.seq, what, again.seq, c.owner.text_once(json.dumps(detail)), pass_=again.pass_,
            )  # fmt: skip
        except Exception as fault:  # a rule that raises: the run stops anyway, with PyTorch's own error
            if not c.owner.stop_run(fault):
                raise
        self._explainer.explain(error, region.seq, region.group, detail)

    def _detail(self, region: Region, again: Again) -> dict[str, Any]:
        """What is said of any mismatch: who, how it ended, what the two began with."""
        differs, same, missing = self._causes(region, again)
        return {
            "name": region.shown, "checkpoint": ev.CHECKPOINTS[region.checkpoint], "end": ev.ENDS[again.end],
            "differs": differs, "same": same, "missing": missing,
        }  # fmt: skip

    def _causes(self, region: Region, again: Again) -> tuple[list[dict[str, str]], list[str], list[str]]:
        """What differs between the two starts, what was looked at and is the same, what was not recorded."""
        one, other = region.start, again.start
        differs: list[dict[str, str]] = []

        def add(kind: str, what: str, forward: Any, recompute: Any) -> None:
            differs.append({"kind": kind, "what": what, "forward": str(forward), "recompute": str(recompute)})

        for a, b in zip(one.starts, other.starts, strict=False):
            if a != b:
                if a // _ARGUMENT_UNIT == b // _ARGUMENT_UNIT:
                    unit = self.map.units[a // _UNIT_UNIT].fqn or "the root"
                    what = f"input {a // _ARGUMENT_UNIT % 64} of {unit}, after FSDP2's cast"
                    add("inputs", what, ev.DTYPES[a % 64], ev.DTYPES[b % 64])
                break  # what follows from it differs too
        for name, before, after in surroundings.differences(one.state, other.state):
            add("context", name, before, after)
        if one.training != other.training:
            add("module", f"{region.shown}.training", one.training, other.training)
        for i, (_, _, name) in enumerate(self._buffers_for(region)):
            was, now = one.versions[2 * i : 2 * i + 2], other.versions[2 * i : 2 * i + 2]
            if was != now and len(was) == len(now):
                times = now[1] - was[1]
                how = f"written {'once' if times == 1 else f'{times} times'} since"
                how = "another tensor" if was[0] != now[0] else how
                add("module", f"buffer {name}", "as it was", how)
        variables = surroundings.changed_variables(one.variables, other.variables)
        if variables:
            add("context", f"context variable {', '.join(variables)}", "set one way", "set another")
        kinds = {item["kind"] for item in differs}
        same = [kind for kind in ("context",) if kind not in kinds]
        missing = [kind for kind in ("params", "inputs", "rng", "module") if kind not in kinds]
        return differs, same, missing

    # -- names, and what is kept cheaply -------------------------------------------------------------------------------
    def _name(self, function: Any) -> tuple[str, int]:
        """The shown name and the unit of a function."""
        if isinstance(function, nn.Module):
            known = self._named.get(function)
            if known is not None:
                return known
        name, module = name_of(function, self._names, self._root())
        unit = self._names.unit_of(module) if module is not None else 0
        if isinstance(function, nn.Module) and module is not None:
            self._named[function] = name, unit
        return name, unit

    def _module(self, function: Any) -> nn.Module | None:
        if isinstance(function, nn.Module):
            return function
        found = modules_of(function)
        return found[0][0] if found else None

    def _buffers_for(self, region: Region) -> Sequence[tuple[dict[str, Any], str, str]]:
        return self._buffers_of(region.module() if region.module else None)

    def _buffers_of(self, module: nn.Module | None) -> Sequence[tuple[dict[str, Any], str, str]]:
        """Where the buffers of ``module`` are kept, by owner and name; looked up once per recording."""
        if module is None:
            return ()
        known = self._buffers.get(module)
        if known is None:
            prefix = self._names.of(module, self._root())
            known = [
                (owner._buffers, name, ".".join(part for part in (prefix, path, name) if part))
                for path, owner in module.named_modules()
                for name in owner._buffers
            ]
            self._buffers[module] = known
        return known

    def _collect(self, unit: int, args: Sequence[Any]) -> None:
        """A unit's forward begins, with ``args`` as FSDP2's pre-forward left them."""
        entries = [
            unit * _UNIT_UNIT + position * _ARGUMENT_UNIT + dtype_number(value.dtype)
            for position, value in enumerate(args[:64])
            if isinstance(value, torch.Tensor)
        ]
        for entry in self._open:
            entry.start.starts += entries


def _versions(buffers: Sequence[tuple[dict[str, Any], str, str]]) -> tuple[int, ...]:
    out: list[int] = []
    for owner, name, _ in buffers:
        try:
            buffer = owner[name]
            out += (id(buffer), buffer._version)
        except (AttributeError, KeyError, RuntimeError):  # None, taken away, made under inference_mode
            out += (0, -1)
    return tuple(out)


def size_of(metadata: Sequence[Any]) -> int:
    """Bytes of saved tensors by what PyTorch keeps of each (``_default_meta_extractor``, torch/utils/checkpoint.py); -1 where
    it keeps nothing (``determinism_check="none"``)."""
    total = 0
    try:
        for item in metadata:
            total += item["shape"].numel() * item["dtype"].itemsize
    except (TypeError, KeyError, AttributeError):
        return ev.NONE
    return total


def _saved(item: Any) -> repeats.Saved | None:
    try:
        return tuple(map(int, item["shape"])), str(item["dtype"]).removeprefix("torch."), str(item["device"])
    except (TypeError, KeyError):
        return None


def _difference(one: list[Any], other: list[Any], more: bool) -> dict[str, Any]:
    """Where two lists of saved tensors part, and the loop that explains it."""
    if any(item is None for item in one):
        return {"first": None, "differ": 0, "rows_only": False, "repeat": None, "known": False}
    # Of a tensor that nobody asks for any more the recomputation keeps nothing: it is taken to be as it was.
    other = [one[i] if item is None and i < len(one) else item for i, item in enumerate(other)]
    first = repeats.first_difference(one, other)
    if first is None and more:
        first = len(one)
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
    repeat = repeats.find_repeat(one, other) if len(other) < len(one) else None
    if len(other) == len(one) and first is not None:
        repeat = repeats.find_longer_loop(one, other)
    return {
        "first": None if first is None else {
            "position": first,
            "forward": _plain(one[first]) if first < len(one) else None,
            "recompute": _plain(other[first]) if first < len(other) else None,
        },
        "known": True,
        "differ": len(pairs),
        "rows_only": bool(pairs) and all(repeats.only_rows_differ(a, b) for a, b in pairs),
        "repeat": None if repeat is None else {
            "tensors": repeat.tensors, "start": repeat.start, "forward": repeat.forward, "recompute": repeat.recompute,
            "open": repeat.open,
        },
    }  # fmt: skip


def _plain(tensor: repeats.Saved) -> dict[str, Any]:
    return {"shape": list(tensor[0]), "dtype": tensor[1], "device": tensor[2]}
