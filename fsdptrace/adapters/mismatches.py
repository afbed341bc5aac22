"""Two lists of saved tensors as PyTorch keeps them: their bytes, and where they part."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter, methodcaller, mul
from os.path import basename, dirname
from typing import Any

import torch
import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace import repeats

_CALL = nn.Module._call_impl.__code__
_NOT_THEIRS = (dirname(torch.__file__), dirname(dirname(__file__)))


_shape, _dtype, _numel, _itemsize = itemgetter("shape"), itemgetter("dtype"), methodcaller("numel"), attrgetter("itemsize")


def size_of(metadata: Sequence[Any]) -> int:
    """Bytes of saved tensors by what PyTorch keeps of each (``_default_meta_extractor``, torch/utils/checkpoint.py); -1 where
    it keeps nothing (``determinism_check="none"``)."""
    try:  # for every tensor of every region: no bytecode of ours for each
        return sum(map(mul, map(_numel, map(_shape, metadata)), map(_itemsize, map(_dtype, metadata))))
    except (TypeError, KeyError, AttributeError):
        return ev.NONE


def saved(item: Any) -> repeats.Saved | None:
    """What PyTorch keeps of one saved tensor, as it is compared."""
    try:
        return tuple(map(int, item["shape"])), str(item["dtype"]).removeprefix("torch."), str(item["device"])
    except (TypeError, KeyError):
        return None


def difference(
    one: list[Any], other: list[Any], more: bool, by: Sequence[str] = (), by_again: Sequence[str] = ()
) -> dict[str, Any]:
    """Where two lists of saved tensors part, and the loop that explains it.

    Args:
        one, other: of the forward and of the recomputation.
        more: the recomputation was about to save more.
        by, by_again: which submodule saved each, where that was recorded.
    """
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
            "position": first, "forward": plain(one, first, by), "recompute": plain(other, first, by_again),
        },
        "known": True,
        "differ": len(pairs),
        "rows_only": bool(pairs) and all(repeats.only_rows_differ(a, b) for a, b in pairs),
        "repeat": None if repeat is None else {
            "tensors": repeat.tensors, "start": repeat.start, "forward": repeat.forward, "recompute": repeat.recompute,
            "open": repeat.open, **_loop_in(by[repeat.start : repeat.start + repeat.tensors * repeat.forward]),
        },
    }  # fmt: skip


def plain(tensors: Sequence[repeats.Saved], position: int, by: Sequence[str] = ()) -> dict[str, Any] | None:
    """One saved tensor for an event; ``None`` past the last one."""
    if position >= len(tensors):
        return {"by": by[position]} if position < len(by) and by[position] else None
    shape, dtype, device = tensors[position]
    own = {"by": by[position]} if position < len(by) and by[position] else {}
    return {"shape": list(shape), "dtype": dtype, "device": device, **own}


def _loop_in(by: Sequence[str]) -> dict[str, str]:
    """The module that all of a loop's tensors were saved in."""
    paths = [name.partition(" at ")[0].split(".") for name in by if name]
    if not paths:
        return {}
    same = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        same.append(parts[0])
    return {"by": ".".join(same)} if same else {}


def running(name_of: Callable[[nn.Module], str | None]) -> str:
    """The innermost module whose forward is running, and the program's line that it is at: ``layers.0.mlp at moe.py:88``.

    Looks at the interpreter's frames: no hook is needed on any module.
    """
    frame = sys._getframe(2)
    line = ""
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            name = name_of(frame.f_locals["self"])
            if name is not None:
                return f"{name or '(root)'}{line}"
        elif not line and not code.co_filename.startswith(_NOT_THEIRS) and code.co_filename[0] != "<":
            line = f" at {basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return line.strip()


class Counter(defaultdict[Any, int]):
    """PyTorch's counter of recomputed tensors, which tells who saved each as it counts."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__(int)
        self._told = told

    def __setitem__(self, key: Any, value: int) -> None:
        super().__setitem__(key, value)
        if value:
            self._told()
