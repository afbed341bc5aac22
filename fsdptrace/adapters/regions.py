"""Checkpointed regions of one recorded model: what is recorded of their forwards and recomputations, and of a mismatch.

A region is one call of a checkpointed function. While it runs, what is cheap and of use when its recomputation turns out
otherwise is kept as integers: the global state that it began under, dtypes that units were given, versions of buffers.
Saved tensors are counted by PyTorch itself, which keeps their shapes, dtypes and devices; they are looked at when the
forward ends, for their bytes, and when a recomputation does not match.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters import fingerprints
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
from fsdptrace.adapters.fingerprints import Prints, Quiet
from fsdptrace.adapters.fsdp import InstalledModel
from fsdptrace.adapters.mismatches import Counter, difference, running, saved
from fsdptrace.adapters.naming import ModuleNames, modules_of, name_of
from fsdptrace.adapters.region import COUNT, METADATA, VALUES, Again, Recomputed, Region
from fsdptrace.adapters.starts import Starts


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


class Regions:
    """The regions of one recorded model; tells the seam (:mod:`~fsdptrace.adapters.checkpoint`) whose a function is.

    Args:
        context: what the hooks of the model share.
        hooks: the model's hooks; they lead to the model while a recording holds it.
        explainer: the recording.

    Attributes:
        by_module: which submodule saves each tensor is recorded.
    """

    def __init__(self, context: Context, hooks: InstalledModel, explainer: Explainer) -> None:
        self.context = context
        self.map = model_map = hooks.map
        self.active = False
        self.by_module = False
        self.starts = Starts(hooks)
        self._hooks = hooks
        self._compiled = False
        self._explainer = explainer
        self._names = ModuleNames(model_map)
        self._named: weakref.WeakKeyDictionary[nn.Module, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._recomputed: list[Recomputed] = []
        self._open: list[Region | Again] = []
        context.forward_ends = self._forward_ends
        context.regions = self

    # -- life ----------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """A recording begins."""
        self.active = True
        self._names.again()
        self.starts.forget()

    def stop(self) -> None:
        """A recording ended; regions that wait for their backward are of no interest any more."""
        self.active = False
        self._open.clear()
        self._recomputed.clear()
        self.starts.forget()
        self.context.collect = None

    def wants(self, fingerprint: Sequence[str], detail: str) -> None:
        """What is recorded beside the usual: kinds of fingerprints, and which submodule saves what."""
        self.starts.wants = frozenset(fingerprint)
        self.by_module = detail == "modules"

    def _root(self) -> nn.Module | None:
        modules = self._hooks.units[0].modules
        return modules[0] if modules else None

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
    def begin(self, function: Any, checkpoint: int, args: Any, kwargs: Any) -> Region:
        """A region's forward begins, with ``args`` and ``kwargs``, ``None`` where they are not known."""
        c = self.context
        shared = c.shared
        if not shared[DEPTH] and not shared[BACKWARD_SEQ]:
            self._open.clear()  # what an exception left
        name, unit = self._name(function)
        groups = self.map.units[unit].groups
        region = Region(self, name, groups[0] if groups else ev.NONE, checkpoint)
        module = self._module(function)
        region.module = None if module is None else weakref.ref(module)
        region.start = self.starts.take(module, name, region.group, function, args, kwargs)
        if "saved" in self.starts.wants:
            region.prints = Prints()
        region.parent = c.parent()
        region.pass_ = shared[CONTEXT] % 4 or ev.PASS_FORWARD
        region.outer = shared[TOP]
        region.seq = shared[TOP] = next(c.ids)
        self._open.append(region)
        c.collect = self._collect
        region.t0 = clock()
        return region

    def done(self, region: Region, saved: int, size: int) -> None:
        """Its forward returned: ``saved`` tensors of ``size`` bytes, -1 where it is not known."""
        t1 = clock()
        self._close(region, region.outer)
        if self.starts.wants:
            self.starts.end_forward(region.start)
            _freeze(region.prints)
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
        if self._open and self._open[-1] is entry:
            self._open.pop()
        elif entry in self._open:
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
    def begin_again(self, region: Region, function: Any, args: Any, kwargs: Any) -> Again:
        """The function is called again."""
        c = self.context
        shared = c.shared
        if not shared[BACKWARD_SEQ]:
            c.open_backward()
        start = self.starts.take(region.its_module(), region.shown, region.group, function, args, kwargs)
        again = Again(next(c.ids), 0, c.parent(), start)
        again.outer = shared[TOP]
        again.depth = shared[RECOMPUTE_DEPTH]
        again.open = len(self._open)
        shared[TOP] = again.seq
        if shared[BACKWARD_SEQ]:
            c.watch_parts(False)
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
        if self.starts.wants:
            self._recomputed.append(
                Recomputed(
                    region.seq, again.seq, region.shown, region.group, region.checkpoint, again.end, region.start, again.start,
                    region.prints, again.prints, region.by,
                )
            )  # fmt: skip
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
        if self.starts.wants and self._recomputed:
            self._recomputed.pop()  # it is told here
        one, other = [saved(item) for item in forward], [saved(item) for item in recompute]
        what = METADATA if len(one) == len(other) and not more else COUNT
        detail = {
            **self._detail(region, again), "forward": len(one), "recompute": max(again.saved, len(other)), "more": more,
            **difference(one, other, more, region.by, again.by),
        }  # fmt: skip
        value = _first_value(region.prints, again.prints, region.by)
        if value is not None:
            detail["value"] = value
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
        differs, same, missing = self.starts.causes(region.shown, region.its_module(), region.start, again.start)
        return {
            "name": region.shown, "checkpoint": ev.CHECKPOINTS[region.checkpoint], "end": ev.ENDS[again.end],
            "differs": differs, "same": same, "missing": missing,
        }  # fmt: skip

    # -- values --------------------------------------------------------------------------------------------------------
    def looks_at_saved(self, frame: Any, region: Region) -> None:
        """Has PyTorch's frame tell of each tensor that is saved, where fingerprints or submodules are wanted."""
        if region.prints is None and not self.by_module:
            return
        metadata_fn = frame.metadata_fn

        def metadata(tensor: torch.Tensor) -> Any:
            # Called for each tensor as it is saved in the forward, and for what is compared after a recomputation.
            if not frame_done():
                self._saved(region.prints, region.by, tensor)
            return metadata_fn(tensor)

        reference = weakref.ref(frame)

        def frame_done() -> bool:
            own = reference()
            return own is None or own.forward_completed

        frame.metadata_fn = metadata
        if self.by_module:
            frame.recomp_counter = Counter(lambda: self._saved_again(region))

    def _saved(self, prints: Prints | None, by: list[str], tensor: torch.Tensor) -> None:
        try:
            if prints is not None:
                with Quiet():
                    prints.add("saved", str(len(prints.names)), tensor)
            if self.by_module:
                by.append(running(self._name_of))
        except Exception as error:
            self.context.owner.fault(error)

    def _saved_again(self, region: Region) -> None:
        if self.active and region.again is not None:
            region.again.by.append(running(self._name_of))

    def _name_of(self, module: nn.Module) -> str | None:
        return self._names.of(module, self._root())

    def took(self, again: Again, tensors: Sequence[torch.Tensor | None]) -> None:
        """The tensors that a recomputation saved, in order; ``None`` for those that nobody asks for any more."""
        if "saved" not in self.starts.wants:
            return
        again.prints = prints = Prints()
        with Quiet():
            for i, tensor in enumerate(tensors):
                if tensor is not None:
                    prints.add("saved", str(i), tensor)
            prints.freeze()

    def settle(self) -> None:
        """A step ends: compares the values of its recomputations, which waits for the device."""
        waiting, self._recomputed = self._recomputed, []
        c = self.context
        for item in waiting:
            differs = self.starts.values(item.forward, item.again)
            value = _first_value(item.saved, item.saved_again, item.by)
            if not differs and value is None:
                continue
            detail = {
                "name": item.name, "checkpoint": ev.CHECKPOINTS[item.checkpoint], "end": ev.ENDS[item.end], "values": True,
                "differs": differs, "value": value, "same": [], "missing": [],
            }  # fmt: skip
            now = clock()
            c.emit(
                ev.MISMATCH, next(c.ids), now, now, item.group, item.recompute,
                item.region, VALUES, item.recompute, c.owner.text_once(json.dumps(detail)), pass_=ev.PASS_RECOMPUTE,
            )  # fmt: skip

    # -- names -------------------------------------------------------------------------------
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

    def _collect(self, unit: int, args: Sequence[Any]) -> None:
        """A unit's forward begins, with ``args`` as FSDP2's pre-forward left them."""
        self.starts.unit([entry.start for entry in self._open], unit, args)


def _freeze(prints: Prints | None) -> None:
    if prints is not None:
        with Quiet():
            prints.freeze()


def _first_value(one: Prints | None, other: Prints | None, by: Sequence[str]) -> dict[str, Any] | None:
    """The first saved tensor whose value alone differs."""
    if one is None or other is None:
        return None
    with Quiet():
        found = fingerprints.differences(one, other, tensors_only=True)
    for item in found:
        if item.tensor:
            at = int(item.name)
            return {"position": at, "tensor": item.tensor, **({"by": by[at]} if at < len(by) and by[at] else {})}
    return None
