"""Which tensors a failing expression names: what an exception is about is read off the very operands, never guessed from names.

Read only when an exception is looked at. From Python 3.11 on a code object knows where each instruction stands in the source:
it is the failing expression itself; on 3.10 it is the statement. Without the source nothing is found. Values are looked
up in dictionaries: no property and no ``__getattr__`` of the program is called.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterator, Mapping
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn

_NOTHING = object()
_VIEWS = ("data", "T", "mT", "H", "mH")
_ABOUT = (
    "shape", "dtype", "device", "ndim", "size", "numel", "dim", "stride", "grad", "requires_grad", "is_leaf", "layout", "names",
    "device_mesh", "placements", "untyped_storage",
)  # fmt: skip
_LINES = 20
"""A statement is looked for in so many lines, where only its first is known."""


def tensors_of(frame: FrameType, lasti: int) -> list[torch.Tensor]:
    """The tensors that the expression names which ``frame`` was at, as operands (``w.shape`` is none)."""
    tree = _expression(frame, lasti)
    return [] if tree is None else [value for value in _operands(tree, frame) if isinstance(value, torch.Tensor)]


def called_in(frame: FrameType, lasti: int) -> str:
    """The name of the function that ``frame`` was calling, empty where that is no plain name."""
    tree = _expression(frame, lasti)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree is not None else ()
    return next((call.func.id for call in calls if isinstance(call.func, ast.Name)), "")


def line_of(frame: FrameType, lasti: int) -> int:
    """The line that ``frame`` was at."""
    return _position(frame.f_code, lasti)[0] or frame.f_code.co_firstlineno


def _position(code: CodeType, lasti: int) -> tuple[int | None, int | None, int | None, int | None]:
    positions = getattr(code, "co_positions", None)
    if positions is not None:
        found: tuple[int | None, ...] = next(islice(positions(), lasti // 2, None), (None,) * 4)
        return found[0], found[1], found[2], found[3]
    lines = [line for begin, end, line in code.co_lines() if begin <= lasti < end]
    return (lines[-1] if lines else None), None, None, None


def _expression(frame: FrameType, lasti: int) -> ast.AST | None:
    first, last, begin, end = _position(frame.f_code, lasti)
    if first is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if last is not None and begin is not None and end is not None:
        text = [line.encode() for line in lines[first - 1 : last]]
        if not text:
            return None
        text[-1] = text[-1][:end]
        text[0] = text[0][begin:]
        source = b"".join(text).decode(errors="replace")
        return _parsed(f"({source})") or _parsed(source)
    for count in range(1, _LINES):
        tree = _parsed(textwrap.dedent("".join(lines[first - 1 : first - 1 + count])))
        if tree is not None:
            return tree
    return None


def _parsed(source: str) -> ast.AST | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _operands(node: ast.AST, frame: FrameType) -> Iterator[Any]:
    value = _value(node, frame)
    if value is not _NOTHING:
        yield value
    if isinstance(node, ast.Attribute) and node.attr in _ABOUT and isinstance(_value(node.value, frame), torch.Tensor):
        return
    for child in ast.iter_child_nodes(node):
        yield from _operands(child, frame)


def _value(node: ast.AST, frame: FrameType) -> Any:
    """What ``node`` stands for, as far as dictionaries tell."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _NOTHING))
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, frame), _value(node.slice, frame))
    return _NOTHING


def _attribute(base: Any, name: str) -> Any:
    if isinstance(base, torch.Tensor):
        return base if name in _VIEWS else _NOTHING
    try:
        own: Mapping[str, Any] = object.__getattribute__(base, "__dict__")
    except AttributeError:
        return _NOTHING
    if isinstance(base, nn.Module):
        for kind in ("_parameters", "_modules"):
            if name in own.get(kind, ()):
                return own[kind][name]
    return own.get(name, _NOTHING)


def _item(base: Any, index: Any) -> Any:
    if type(index) not in (int, str):
        return _NOTHING
    if isinstance(base, nn.Module):
        members = {**base._modules, **base._parameters}
        if type(index) is str:
            return members.get(index, _NOTHING)
        base = list(members.values())
    try:
        return base[index] if type(base) in (list, tuple, dict) else _NOTHING
    except (LookupError, TypeError):
        return _NOTHING
