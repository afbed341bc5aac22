"""``fsdptrace inspect``: a wrap, looked at without training, on a process group that only pretends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fsdptrace.checks.text import count, pattern, size
from fsdptrace.cli.output import STYLES, Column, Screen, clean, name
from fsdptrace.peak import keeps_open

if TYPE_CHECKING:
    from fsdptrace.inspection import Inspection
    from fsdptrace.model_map import GroupInfo

MANY_ROWS = 24


def build(target: str, world_size: int, rank: int, meta: bool) -> list[Inspection]:
    """What ``SCRIPT:FUNCTION`` (or ``MODULE:FUNCTION``) makes, as seen by ``rank`` of ``world_size`` ranks.

    Raises:
        ValueError: the target cannot be used, or it gives no wrapped model; the message says what to change.
    """
    place, _, function = target.rpartition(":")
    if not place or not function.isidentifier():
        raise ValueError(f"{target}: give SCRIPT:FUNCTION, for instance train.py:build_model")
    try:
        import torch
        import torch.nn as nn
    except ImportError:
        raise ValueError("inspect needs torch: pip install torch") from None
    from fsdptrace.adapters.fake import pretend
    from fsdptrace.inspection import inspect

    pretend(world_size, rank)
    make = _function(place, function)
    with torch.device("meta" if meta else "cpu"):
        try:
            made = make()
        except Exception as error:
            raise ValueError(f"{target}: {type(error).__name__}: {error}\n{_innermost(error)}") from error
    models = [made] if isinstance(made, nn.Module) else list(made) if isinstance(made, Iterable) else []
    models = [model for model in models if isinstance(model, nn.Module)]
    if not models:
        raise ValueError(f"{target}: it gave {type(made).__name__}; it must return the model that fully_shard wrapped")
    try:
        return [inspect(model) for model in models]
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from None


def _function(place: str, function: str) -> Callable[[], Any]:
    path = Path(place)
    if (path.suffix == ".py" or path.exists()) and not path.is_file():
        raise ValueError(f"{place}: no such file")
    sys.path.insert(0, os.getcwd())
    try:
        module = _load(path) if path.is_file() else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}\n{_innermost(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{place}: there is no function {function} in it")
    return found  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location("__fsdptrace_inspect__", path)
    if spec is None or spec.loader is None:
        raise ValueError("it is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _innermost(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"  at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


@dataclass(slots=True)
class _Row:
    title: str
    group: GroupInfo
    units: int = 1


def show(screen: Screen, found: Inspection, world_size: int, rank: int, every: bool) -> None:
    """Totals, the peak, a table of units, and what the rules find."""
    model = found.map
    screen.line((clean(model.root, 60), "bold"), f"  as seen by rank {rank} of {world_size:,}")
    screen.prose(
        f"{count(len(model.groups), 'unit')}, {size(found.gathered_bytes)} of parameters gathered, {size(found.sharded_bytes)} "
        f"of shards on this rank" + (f", {size(found.outside_bytes)} trainable in no unit" if found.outside_bytes else ""), 2,
    )  # fmt: skip
    screen.line()
    screen.line(("gathered at most", "bold"), f"  {size(found.peak.bytes)}")
    screen.prose(found.when, 2)
    if found.peak.smaller:
        screen.prose(f"beside it up to {size(found.peak.smaller)} of copies on smaller meshes, between forward and backward", 2)
    screen.prose(
        f"largest gather {size(found.largest_gather[1])} ({name(found.largest_gather[0])}), largest reduction "
        f"{size(found.largest_reduction[1])} ({name(found.largest_reduction[0])})", 2,
    )  # fmt: skip
    screen.prose("In module order, with FSDP2's own prefetch; explicit prefetch lists add what they name.", 2, "dim")
    screen.title("units")
    _table(screen, found, every)
    if found.violations:
        screen.title("findings")
    for violation in found.violations:
        screen.line((violation.severity, STYLES.get(violation.severity, "")), "  ", (violation.rule, "bold"))
        screen.prose(clean(violation.message), 2)
        screen.prose(clean(violation.hint), 2, "dim")


def _table(screen: Screen, found: Inspection, every: bool) -> None:
    model = found.map
    rows = [_Row(name(group.fqn), group) for group in model.groups]
    if not every and len(rows) > MANY_ROWS:
        rows = _by_pattern(model.groups)
    columns = [
        Column("unit", right=False), Column("tensors", keep=4), Column("gathered"), Column("shards", keep=2),
        Column("dtype", right=False, keep=5), Column("reduced in", right=False, keep=6), Column("mesh", right=False, keep=3),
        Column("after forward", right=False, keep=1),
    ]  # fmt: skip
    cells = []
    for row in rows:
        group = row.group
        after = "open" if keeps_open(model, group) else "freed" if group.reshard_after_forward is True else "smaller mesh"
        if after == "smaller mesh":
            after = f"on {group.post_forward_world} ranks"
        cells.append([
            row.title + (f"  x{row.units}" if row.units > 1 else ""), f"{group.tensors:,}", size(group.bytes),
            size(group.sharded_bytes), group.dtype if group.dtype != "uint8" else "mixed",
            group.reduce_dtype if group.trainable else "-",
            " x ".join(f"{dim} {length}" for dim, length in group.mesh.items()), after,
        ])  # fmt: skip
    screen.table(columns, cells)
    if len(rows) < len(model.groups):
        screen.prose(f"({len(model.groups)} units by name pattern and size; --all shows each)", style="dim")


def _by_pattern(groups: Iterable[GroupInfo]) -> list[_Row]:
    rows: dict[tuple[Any, ...], _Row] = {}
    for group in groups:
        title = name(pattern(group.fqn))
        key = (title, group.bytes, group.dtype, group.reduce_dtype, group.reshard_after_forward, tuple(group.mesh.items()))
        row = rows.get(key)
        if row is None:
            rows[key] = _Row(title, group)
        else:
            row.units += 1
    return list(rows.values())
