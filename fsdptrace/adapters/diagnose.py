"""Runs a region whose recomputation did not match once more, twice, and names the first operator that differs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import dirname
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdptrace.adapters.fingerprints import Quiet, fingerprint
from fsdptrace.adapters.group import PRE_BACKWARD_STATE, UNSHARDED
from fsdptrace.adapters.mismatches import saved
from fsdptrace.adapters.region import SELECTIVE, Region
from fsdptrace.model_map import show_name

_NOT_THEIRS = (dirname(torch.__file__), dirname(dirname(__file__)))
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")


class Failure(NamedTuple):
    """A region that did not match: PyTorch's frame, ours, the function as the user gave it, the units that it needs."""

    frame: Any
    region: Region
    function: Any
    units: list[tuple[Any, Any, Any]]


# As long as the error lives, and no longer.
_failures: weakref.WeakKeyDictionary[BaseException, Failure] = weakref.WeakKeyDictionary()


def remember(error: BaseException, frame: Any, region: Region, function: Any) -> None:
    """``error`` is about ``region``."""
    _failures[error] = Failure(frame, region, function, _units(region))


class Operator(NamedTuple):
    """One operator that ran: name, shapes and dtypes of its results, fingerprints of their values, the program's line."""

    name: str
    results: tuple[str, ...]
    values: tuple[int | None, ...]
    line: str

    def __str__(self) -> str:
        return f"{self.name} -> {', '.join(self.results) or 'nothing'}, at {self.line}"


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found out; ``str()`` of it is what was printed.

    Attributes:
        text: in words.
        position: of the first operator that differs; ``None`` where none does, or where it stopped.
        first, second: that operator in the first run and in the second; ``None`` past the end of one.
    """

    text: str
    position: int | None = None
    first: Operator | None = None
    second: Operator | None = None

    def __str__(self) -> str:
        return self.text


class _Collective(Exception):
    pass


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator, and stops at a collective before it starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise _Collective(str(func))
        result = func(*args, **(kwargs or {}))
        if func.namespace not in ("profiler", "prim") and "detach" not in str(func):
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            with Quiet():
                values = tuple(None if (found := fingerprint(tensor)) is None else int(found) for tensor in tensors)
            shown = tuple(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
            # What lies in memory that nobody has written yet is nobody's value.
            values = () if "empty" in str(func) else values
            self.operators.append(Operator(str(func), shown, values, _line()))
        return result


def _line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THEIRS) and name[0] != "<":
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that is not known"


def diagnose(error: BaseException | None = None, show: Callable[[str], Any] = print) -> Diagnosis:
    """After a CheckpointError of a recorded model: runs the failing region again, twice, under the conditions of its
    recomputation, and prints the first operator that differs, with its line in both runs.

    Never called by itself. It starts no collective: it computes with the parameters that are still gathered, and says so and
    stops where a unit of the region is not, or where the region has collectives of its own (expert or tensor parallelism).
    Buffers and torch's CPU generator are put back; whatever else the function changes stays changed.

    Args:
        error: what ``backward()`` raised; the one that is being handled, or was raised last, when not given.
        show: takes the text.

    Raises:
        ValueError: the error is not about a recorded region.
    """
    error = error or sys.exc_info()[1] or getattr(sys, "last_value", None)
    failure = next((_failures[one] for one in _chain(error) if one in list(_failures)), None)
    if failure is None:
        raise ValueError(
            "diagnose(): give the CheckpointError that backward() raised under `fsdptrace.record`; this one is not about a "
            "region that was recorded"
        )
    diagnosis = _diagnose(failure)
    show(diagnosis.text)
    return diagnosis


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _diagnose(failure: Failure) -> Diagnosis:
    region = failure.region
    name = region.shown
    if region.checkpoint == SELECTIVE:
        return Diagnosis(f"{name}: cannot be run again: what selective checkpointing has kept of it is used up.")
    closed = [show_name(info.fqn) for _, group, info in failure.units if group._sharded_state._value_ != UNSHARDED]
    if closed:
        return Diagnosis(
            f"{name}: cannot be run again without a collective: {', '.join(closed[:3])} "
            f"{'is' if len(closed) == 1 else 'are'} not gathered any more. Call diagnose() right where the error is caught."
        )
    try:
        args = _inputs(failure.frame)
        first, second = (_run(failure, args) for _ in range(2))
    except _Collective as stopped:
        return Diagnosis(f"{name}: stopped before a collective of the region's own ({stopped}): it cannot be run by one rank.")
    return _compare(failure, first, second)


def _compare(failure: Failure, first: list[Operator], second: list[Operator]) -> Diagnosis:
    name = failure.region.shown
    for i in range(max(len(first), len(second))):
        one, other = (run[i] if i < len(run) else None for run in (first, second))
        if one is None or other is None or one[:3] != other[:3]:
            how = ""
            if one is not None and other is not None and one[:2] == other[:2]:
                how = " It gave other values, from the same operators before it."
            return Diagnosis(
                f"{name}, run twice: {i} operators are the same, then they part.{how}\n"
                f"  first run:  {one or 'the end'}\n  second run: {other or 'the end'}",
                i, one, other,
            )  # fmt: skip
    forward = [saved(item) for item in failure.frame.x_metadatas]
    return Diagnosis(
        f"{name}, run twice: all {len(first)} operators are the same, and so are their results. What the recomputation "
        "depended on is not there any more, or is the same for both runs (gathered parameters, an input's dtype): the forward "
        f"had saved {len(forward)} tensors. The note on the error says what differed between the two, with "
        "fingerprints as well."
    )


def _units(region: Region) -> list[tuple[Any, Any, Any]]:
    """State, group and what is known of it for the unit that the region lies in and those that lie in the region."""
    hooks = region.owner._hooks
    module = region.its_module()
    inside = set() if module is None else {id(inner) for inner in module.modules()}
    out = []
    for unit in hooks.units:
        own = bool(inside) and any(id(one) in inside for one in unit.modules)
        for number, group in zip(unit.info.groups, unit.groups, strict=False):
            if own or number == region.group:
                out.append((unit.state, group, hooks.map.groups[number]))
    return out


def _inputs(frame: Any) -> Any:
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()  # torch 2.12
    saver = frame.input_saver.grad_fn
    return saver.get_args(saver.saved_tensors)


def _run(failure: Failure, args: Any) -> list[Operator]:
    """The operators of one run, with the region's hooks kept from gathering and freeing."""
    watch = _Watch()
    function = failure.function

    def watched(*given: Any, **more: Any) -> Any:
        with watch:
            return function(*given, **more)

    with _as_in_a_recomputation(failure, watched), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        failure.frame.recompute_fn(*args)
    return watch.operators


@contextmanager
def _as_in_a_recomputation(failure: Failure, function: Any) -> Iterator[None]:
    """FSDP2's hooks return early in PRE_BACKWARD; ours are off; the function is the user's; buffers are put back."""
    hooks = failure.region.owner._hooks
    module = failure.region.its_module()
    kept = [] if module is None else [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    before = [(state, state._training_state) for state, _, _ in failure.units]
    code = failure.frame.recompute_fn.__code__
    cell = dict(zip(code.co_freevars, failure.frame.recompute_fn.__closure__, strict=True))["fn"]
    ours = cell.cell_contents
    installed = hooks.installed
    if installed:
        hooks.remove()
    try:
        for state, training in before:
            state._training_state = type(training)(PRE_BACKWARD_STATE)
        cell.cell_contents = function
        yield
    finally:
        cell.cell_contents = ours
        for state, training in before:
            state._training_state = training
        with torch.no_grad():
            for buffer, values in kept:
                buffer.copy_(values)
        if installed:
            hooks.install(lambda group: None)
