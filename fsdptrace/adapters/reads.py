"""Which tensors a failing expression names: what an exception is about is read off the very operands, never guessed from names.

Read only when an exception is looked at. From Python 3.11 on a code object knows where each instruction stands in the source:
it is the failing expression itself; on 3.10 that is found by counting. Without the source nothing is found. Values are looked
up in dictionaries: no property and no ``__getattr__`` of the program is called, nor its ``__class__``.
"""

from __future__ import annotations

import ast
import dis
import linecache
import opcode
import sys
from collections.abc import Iterator, Mapping
from inspect import CO_OPTIMIZED
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

_NOTHING = object()
_VIEWS = ("data", "T", "mT", "H", "mH")
_ABOUT = (
    "shape", "dtype", "device", "ndim", "size", "numel", "dim", "stride", "grad", "requires_grad", "is_leaf", "layout", "names",
    "device_mesh", "placements", "untyped_storage",
)  # fmt: skip
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_STORES = [opcode.opmap[name] for name in ("STORE_SUBSCR", "STORE_ATTR")]  # they stand where the target does
_WHOLE = ("STORE_SUBSCR", "STORE_ATTR", "GET_ITER", "FOR_ITER", "UNPACK_SEQUENCE", "UNPACK_EX")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SNAPSHOTS = sys.version_info < (3, 13)


def variables(frame: FrameType) -> Mapping[str, Any]:
    """The variables of ``frame``. Before Python 3.13 ``f_locals`` is a dictionary that the frame keeps until it ends, and with
    it whatever the variables were: a batch, a graph. Where nobody else has it, it is emptied; Python fills it when asked."""
    found: Any = frame.f_locals
    code = frame.f_code
    if not _SNAPSHOTS or not code.co_flags & CO_OPTIMIZED:
        return found  # type: ignore[no-any-return]
    copy = dict(found)
    if sys.getrefcount(found) <= 3:  # the frame's, ours, and the argument
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            found.pop(name, None)
    return copy


def is_a(value: Any, kind: type[Any] | tuple[type[Any], ...]) -> bool:
    """``isinstance`` by the type alone: a proxy's ``__class__`` is code of the program."""
    return issubclass(type(value), kind)


def tensors_of(frame: FrameType, lasti: int, exact: bool = False) -> list[torch.Tensor]:
    """The tensors that the expression names which ``frame`` was at, as operands (``w.shape`` is none); with ``exact`` none
    where the expression itself is not known."""
    tree = _expression(frame, lasti, exact)
    if tree is None:
        return []
    names = {**frame.f_globals, **variables(frame)}
    return [value for value in _operands(tree, names) if is_a(value, torch.Tensor)]


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


def _expression(frame: FrameType, lasti: int, exact: bool = False) -> ast.AST | None:
    code = frame.f_code
    first, last, begin, end = _position(code, lasti)
    if first is None:
        return None
    while opcode.opname[code.co_code[lasti]] == "CACHE":  # what belongs to an instruction lies behind it
        lasti -= 2
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if last is None or begin is None or end is None or code.co_code[lasti] in _STORES:
        return _counted(code, lasti, first, _parsed("".join(lines)), exact)
    text = [line.encode() for line in lines[first - 1 : last]]
    if not text:
        return None
    text[-1] = text[-1][:end]
    text[0] = text[0][begin:]
    source = b"".join(text).decode(errors="replace")
    return _parsed(f"({source})") or _parsed(source)


def _counted(code: CodeType, lasti: int, line: int, tree: ast.AST | None, exact: bool) -> ast.AST | None:
    """The expression that instruction ``lasti`` computes, where only its line is known: the third call of a statement is its
    third call instruction. ``None`` where they do not match one to one."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _spans(node, line)] if tree is not None else []
    if not around:
        return None
    inner = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    heads = [field for name, field in ast.iter_fields(inner) if name not in _BODIES]
    head = [part for field in heads for part in (field if isinstance(field, list) else [field]) if isinstance(part, ast.AST)]
    if code.co_name == "<lambda>":
        found = [node for part in head for node in ast.walk(part) if isinstance(node, ast.Lambda)]
        head = [node.body for node in found if node.lineno == code.co_firstlineno]
        if len(head) != 1:
            return None
    if any(isinstance(node, _COMPREHENSIONS) for part in head for node in ast.walk(part)):  # functions of their own, or not
        return None
    kind = _kind(opcode.opname[code.co_code[lasti]])
    if kind is ast.stmt:
        return None if exact else ast.Tuple([part for part in head if not _is_set(part)], ast.Load())  # type: ignore[misc]
    if kind is None or (kind is ast.Call and isinstance(inner, (ast.With, ast.AsyncWith))):  # leaving it is a call too
        return None
    ends = max((getattr(part, "end_lineno", line) for part in head), default=line)
    at = {offset for begin, end, of in code.co_lines() if of and inner.lineno <= of <= ends for offset in range(begin, end)}
    same = [one.offset for one in dis.get_instructions(code) if one.offset in at and _kind(one.opname) is kind]
    head.sort(key=_is_target)  # what is assigned to is looked at last
    nodes = [node for part in head for node in _in_order(part) if isinstance(node, kind) and not _is_target(node)]
    if isinstance(inner, ast.AugAssign) and kind is ast.BinOp:
        nodes.append(inner)
    return nodes[same.index(lasti)] if lasti in same and len(same) == len(nodes) else None


def _kind(name: str) -> type[ast.AST] | None:
    """The kind of node that an instruction computes: ``ast.stmt`` for those that a statement has once, at its end."""
    if name in _WHOLE:
        return ast.stmt
    if name in ("BINARY_SUBSCR", "LOAD_ATTR", "LOAD_METHOD", "COMPARE_OP"):
        return ast.Subscript if name == "BINARY_SUBSCR" else ast.Compare if name == "COMPARE_OP" else ast.Attribute
    if name.startswith(("BINARY_", "INPLACE_")):
        return ast.BinOp
    return ast.Call if name.startswith("CALL") and "INTRINSIC" not in name else None


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what it is made of, as they are computed; without what functions inside compute when they are called."""
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _in_order(child)
    yield node


def _is_target(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))


def _is_set(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Tuple, ast.List)) and _is_target(node)


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _parsed(source: str) -> ast.AST | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _operands(node: ast.AST, names: Mapping[str, Any]) -> Iterator[Any]:
    value = _value(node, names)
    if value is not _NOTHING:
        yield value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to_local":
        yield _attribute(_value(node.func.value, names), "_local_tensor")
    if isinstance(node, ast.Attribute) and node.attr in _ABOUT and is_a(_value(node.value, names), torch.Tensor):
        return
    for child in ast.iter_child_nodes(node):
        yield from _operands(child, names)


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """What ``node`` stands for, as far as dictionaries tell."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, _NOTHING)
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, names), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, names), _value(node.slice, names))
    return _NOTHING


def _attribute(base: Any, name: str) -> Any:
    if is_a(base, torch.Tensor):
        if name == "_local_tensor" and is_a(base, DTensor):
            return base._local_tensor
        return base if name in _VIEWS else _NOTHING
    try:
        own: Mapping[str, Any] = object.__getattribute__(base, "__dict__")
    except AttributeError:
        return _NOTHING
    if is_a(base, nn.Module):
        for kind in ("_parameters", "_modules"):
            if name in own.get(kind, ()):
                return own[kind][name]
    return own.get(name, _NOTHING)


def _item(base: Any, index: Any) -> Any:
    if type(index) not in (int, str):
        return _NOTHING
    if is_a(base, nn.Module):
        members = {**base._modules, **base._parameters}
        if type(index) is str:
            return members.get(index, _NOTHING)
        base = list(members.values())
    try:
        return base[index] if type(base) in (list, tuple, dict) else _NOTHING
    except (LookupError, TypeError):
        return _NOTHING
