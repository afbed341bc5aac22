"""Activation checkpointing: ``torch.utils.checkpoint``'s own classes, replaced by subclasses while a recording is active.

Models import ``checkpoint`` by name, so that it cannot be wrapped; but every call makes a ``_CheckpointFrame`` (or calls
``CheckpointFunction.apply``, reentrant), which that module looks up when it needs it (2.6 to 2.15). Process-wide, inert for
functions that belong to no recorded model, and put back by the last recording that ends. Frames that live longer go on as
PyTorch's own would.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CellType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint as module

from fsdptrace.adapters.mismatches import size_of
from fsdptrace.adapters.region import EARLY_STOP, FAILED, NON_REENTRANT, REENTRANT, RETURNED, SELECTIVE, Region
from fsdptrace.adapters.regions import Regions

_FRAME = "_CheckpointFrame"
_FUNCTION = "CheckpointFunction"


class CheckpointSeam:
    """The replaced classes and the models that they tell."""

    def __init__(self) -> None:
        # Weak: regions lead to their model, and nothing of ours keeps a model alive.
        self._known: list[weakref.ref[Regions]] = []
        self._originals: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def add(self, regions: list[Regions]) -> None:
        """Starts telling ``regions``."""
        if not self._originals:
            for name, make in ((_FRAME, self._frame_class), (_FUNCTION, self._function_class)):
                original = self._originals[name] = getattr(module, name)
                self._ours[name] = make(original)
                setattr(module, name, self._ours[name])
        for one in regions:
            one.start()
            self._known.append(weakref.ref(one))

    def remove(self, regions: list[Regions]) -> None:
        """Stops telling them; the last one puts the classes back."""
        for one in regions:
            one.stop()
        self._known = [known for known in self._known if (live := known()) is not None and live.active]
        if not self._known and self._originals:
            for name, original in self._originals.items():
                if getattr(module, name) is self._ours[name]:  # else somebody replaced ours, which passes everything through
                    setattr(module, name, original)
            self._originals, self._ours = {}, {}

    def _alive(self) -> list[Regions]:
        return [one for known in self._known if (one := known()) is not None and one.active]

    # -- whose a function is -------------------------------------------------------------------------------------------
    def _begin(self, function: Any, checkpoint: int, given: Callable[[], tuple[Any, Any]]) -> Region | None:
        """A region of the recorded model that ``function`` belongs to; ``None`` where it belongs to none."""
        if not torch.is_grad_enabled():
            return None
        known = self._alive()
        if len(known) == 1:
            (owner,) = known
            if not owner.runs() and not owner.owns(function):
                return None
        else:
            owners = [one for one in known if one.owns(function)] or [one for one in known if one.runs()]
            if not owners:
                return None
            owner = owners[-1]
        if torch.compiler.is_compiling():  # made while tracing: it never recomputes
            owner.traced()
            return None
        args, kwargs = given() if owner.starts.wants else (None, None)
        return owner.begin(function, checkpoint, args, kwargs)

    # -- non-reentrant and selective -----------------------------------------------------------------------------------
    def _open(self, recompute_fn: Any) -> Region | None:
        """The frame's region, with the function in ``recompute_fn`` wrapped, which is what the recomputation calls."""
        owner: Regions | None = None
        try:
            cells = _cells(recompute_fn)
            function = cells["fn"].cell_contents if "fn" in cells else recompute_fn
            kind = NON_REENTRANT
            if "recompute_context" in cells:
                if isinstance(cells["recompute_context"].cell_contents, module._CachedTorchDispatchMode):
                    kind = SELECTIVE
            region = self._begin(function, kind, _arguments)
            if region is None:
                return None
            owner = region.owner
            if "fn" not in cells:
                owner.left(region)
                return None
            cells["fn"].cell_contents = _recomputing(function, region)
        except Exception as error:
            self._fault(owner, error)
            return None
        return region

    def _frame_class(self, base: Any) -> Any:
        seam = self

        class _CheckpointFrame(base):  # type: ignore[misc]
            def __init__(self, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
                self._fsdptrace = seam._open(recompute_fn)
                super().__init__(recompute_fn, *args, **kwargs)
                if self._fsdptrace is not None:
                    self._fsdptrace.owner.looks_at_saved(self, self._fsdptrace)

            @property
            def forward_completed(self) -> Any:
                return self.__dict__["_completed"]

            @forward_completed.setter
            def forward_completed(self, value: Any) -> None:
                self.__dict__["_completed"] = value
                region = self._fsdptrace
                if value and region is not None and region.owner.active:
                    seam._done(region, len(self.weak_holders), size_of(self.x_metadatas))

            def check_recomputed_tensors_match(self, gid: Any) -> Any:
                region = self._fsdptrace
                again = None if region is None else region.again
                if region is None or again is None:
                    return super().check_recomputed_tensors_match(gid)
                region.again = None
                stop = seam._recomputed(self, region, again, gid)
                try:
                    result = super().check_recomputed_tensors_match(gid)
                except module.CheckpointError as error:
                    seam._mismatch(self, region, again, gid, error, more=False)
                    raise
                if stop is not None:
                    raise stop
                return result

        _CheckpointFrame.__qualname__ = base.__qualname__
        _CheckpointFrame.__module__ = base.__module__
        return _CheckpointFrame

    def _done(self, region: Region, saved: int, size: int) -> None:
        try:
            region.owner.done(region, saved, size)
        except Exception as error:
            if region.owner.context.owner.stop_run(error):
                raise
            region.owner.context.owner.fault(error)

    def _recomputed(self, frame: Any, region: Region, again: Any, gid: Any) -> Exception | None:
        """Records a recomputation; a violation that is to stop the run is given back, since PyTorch's own check comes first."""
        owner = region.owner
        try:
            if owner.active:
                if owner.starts.wants:
                    owner.took(again, _recomputed(frame, gid))
                owner.recomputed(region, again, frame.recomp_counter[gid])
        except Exception as error:
            if owner.context.owner.stop_run(error):
                return error
            owner.context.owner.fault(error)
        return None

    def _mismatch(self, frame: Any, region: Region, again: Any, gid: Any, error: BaseException, more: bool) -> None:
        owner = region.owner
        try:
            if owner.active:
                _remember(error, frame, region)
                owner.mismatch(region, again, error, frame.x_metadatas, _recomputed_metadata(frame, gid), more)
        except Exception as fault:
            owner.context.owner.fault(fault)

    def _fault(self, owner: Regions | None, error: Exception) -> None:
        for one in [owner] if owner is not None else self._alive()[:1]:
            one.context.owner.fault(error)

    # -- reentrant -----------------------------------------------------------------------------------------------------
    def _function_class(self, base: Any) -> Any:
        seam = self

        class CheckpointFunction(base):  # type: ignore[misc]
            @classmethod
            def apply(cls, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
                return base.apply(seam._reentrant(run_function, args), preserve_rng_state, *args)

        CheckpointFunction.__qualname__ = base.__qualname__
        CheckpointFunction.__module__ = base.__module__
        return CheckpointFunction

    def _reentrant(self, function: Any, args: tuple[Any, ...]) -> Any:
        """``function``, recorded: its first call is the forward, every other one a recomputation."""
        try:
            region = self._begin(function, REENTRANT, lambda: (args, {}))
        except Exception as error:
            self._fault(None, error)
            return function
        if region is None:
            return function
        again = _recomputing(function, region)
        forward_over: list[bool] = []

        def run(*args: Any) -> Any:
            if forward_over:
                return again(*args)
            forward_over.append(True)
            try:
                result = function(*args)
            except BaseException:
                region.owner.left(region)
                raise
            if region.owner.active:
                self._done(region, -1, -1)
            return result

        return run


def _recomputing(function: Any, region: Region) -> Callable[..., Any]:
    """``function`` as the recomputation calls it."""
    owner = region.owner
    hooks = owner.context.owner

    def recompute(*args: Any, **kwargs: Any) -> Any:
        if not owner.active:
            return function(*args, **kwargs)
        try:
            again = owner.begin_again(region, function, args, kwargs)
        except Exception as error:
            hooks.fault(error)
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            if owner.active:
                try:
                    _broke_off(region, again, error)
                except Exception as fault:
                    if not hooks.stop_run(fault):
                        hooks.fault(fault)
            raise
        try:
            if owner.active:
                owner.end_again(again, RETURNED)
                if region.checkpoint == REENTRANT:
                    region.again = None
                    owner.recomputed(region, again, -1)
        except Exception as error:
            if hooks.stop_run(error):
                raise
            hooks.fault(error)
        return result

    recompute.function = function  # type: ignore[attr-defined]
    return recompute


def _broke_off(region: Region, again: Any, error: BaseException) -> None:
    """An exception left a recomputation: the early stop, which is as it should be, or another."""
    owner = region.owner
    stopped = isinstance(error, module._StopRecomputationError)
    owner.end_again(again, EARLY_STOP if stopped else FAILED)
    if stopped:
        return
    region.again = None
    frame, gid = _frame_that_raised(error) if isinstance(error, module.CheckpointError) else (None, None)
    if frame is None or frame._fsdptrace is not region:
        owner.recomputed(region, again, -1)
        owner.failed(region, again, error)
        return
    # More tensors than in the forward, with early stop off: PyTorch raises as soon as one too many is to be saved.
    owner.recomputed(region, again, frame.recomp_counter[gid])
    _remember(error, frame, region)
    owner.mismatch(region, again, error, frame.x_metadatas, _recomputed_metadata(frame, gid), more=True)


def _frame_that_raised(error: BaseException) -> tuple[Any, Any]:
    """The checkpoint frame in whose pack hook ``error`` was raised, and the graph task's id, by that hook's own variables."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "pack_hook":
            variables = trace.tb_frame.f_locals
            frame = variables.get("target_frame")
            if hasattr(frame, "_fsdptrace") and "gid" in variables:
                return frame, variables["gid"]
        trace = trace.tb_next
    return None, None


def _cells(function: Any) -> dict[str, CellType]:
    code = getattr(function, "__code__", None)
    return {} if code is None else dict(zip(code.co_freevars, function.__closure__ or (), strict=True))


def _remember(error: BaseException, frame: Any, region: Region) -> None:
    """For :func:`fsdptrace.diagnose`, as long as the error lives."""
    from fsdptrace.adapters.diagnose import remember

    remember(error, frame, region, getattr(_cells(frame.recompute_fn)["fn"].cell_contents, "function", None))


def _arguments() -> tuple[Any, Any]:
    """What the checkpointed function is called with: locals of PyTorch's generator that makes the frame (2.6 to 2.15)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.startswith("_checkpoint_without_reentrant_generator"):
        frame = frame.f_back
    variables = {} if frame is None else frame.f_locals
    return variables.get("args"), variables.get("kwargs")


def _recomputed(frame: Any, gid: Any) -> list[Any]:
    """The recomputed tensors, in order; ``None`` for those whose forward counterpart is gone."""
    kept = frame.recomputed[gid]
    out: list[Any] = []
    for reference in frame.weak_holders[: frame.recomp_counter[gid]]:
        holder = reference()
        handle = None if holder is None else holder.handles.get(gid)
        out.append(None if handle is None else kept.get(handle))
    return out


def _recomputed_metadata(frame: Any, gid: Any) -> list[Any]:
    """What PyTorch keeps of each recomputed tensor."""
    return [None if tensor is None else frame.metadata_fn(tensor) for tensor in _recomputed(frame, gid)]


CHECKPOINTS = CheckpointSeam()
