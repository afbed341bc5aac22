"""Looks at a model's parameters as a whole, once or at the end of a backward, and records what breaks a rule."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters.context import Context, clock
from fsdptrace.adapters.describe import Described
from fsdptrace.adapters.wrap import alone, cut_ties, mixed_dtypes, outside

if TYPE_CHECKING:
    from fsdptrace.adapters.hooks import GroupHooks

OUTSIDE, IGNORED, OUTSIDE_AT_WRAP, IGNORED_AT_WRAP, DTYPE, TIED, INFERENCE = (
    ev.PARAM_FACTS.index(name)
    for name in ("outside_with_gradient", "ignored_with_gradient", "outside", "ignored", "dtype", "tied", "inference_buffer")
)
SHOWN = 8  # names in one event


class Facts:
    """What one recorded model's parameters are like beyond its groups. Holds no parameter."""

    def __init__(self, context: Context, groups: list[GroupHooks], described: Callable[[], Described]) -> None:
        self._context = context
        self._described = described
        self._groups = groups
        self._looked = False
        self._inference = True  # buffers of before the recording are not known
        self._outside: list[tuple[str, bool, weakref.ref[nn.Parameter]]] = []  # name, whether it was ignored
        self.named: set[int] = set()

    def forward_begins(self, inference: bool) -> None:
        """An outermost forward begins, before FSDP2's own hooks."""
        if not self._looked:
            self._looked = True
            self._look()
        if inference:
            self._inference = True
        elif self._inference:
            self._inference = False
            self._look_at_buffers()

    def _look(self) -> None:
        described = self._described()
        root = described.units[0].modules[0]
        if any(hooks.info.world * hooks.info.replicate_world > 1 for hooks in self._groups):
            found = outside(root, described)
            self.named = {id(item.param) for item in found}
            self._outside = [(item.name, item.ignored, weakref.ref(item.param)) for item in found]
        if any(unit.state is not None and unit.state._is_root is None for unit in described.units):
            for group, named in mixed_dtypes(described):
                self._tell(DTYPE, group, some([f"{name} ({dtype})" for name, dtype in named]), detail=kinds(named))
            for tie in cut_ties(described):
                self._tell(TIED, tie.group, tie.name, tie.other, tie.other_name)

    def _look_at_buffers(self) -> None:
        for hooks in self._groups:
            if hooks.buffers_are_plain:
                continue
            copies = [param.__dict__.get("_unsharded_param") for param in hooks.group.fsdp_params]
            if not copies or any(copy is None for copy in copies):
                continue
            hooks.buffers_are_plain = True
            for info, copy in zip(hooks.info.params, copies, strict=True):
                if copy.is_inference():
                    hooks.buffers_are_plain = False
                    self._tell(INFERENCE, hooks.id, info.name, size=info.bytes)
                    break

    def backward_ended(self) -> None:
        """A backward ended: parameters in no group that have a gradient now are trained, each rank for itself."""
        if not self._outside:
            return
        left = []
        got: dict[bool, list[tuple[str, int]]] = {False: [], True: []}
        for name, ignored, reference in self._outside:
            param = reference()
            if param is None or not alone(param):
                continue
            if param.grad is None:
                left.append((name, ignored, reference))
            else:
                got[ignored].append((name, param.numel() * param.element_size()))
        self._outside = left
        for ignored, items in got.items():
            if items:
                names, size = some([name for name, _ in items]), sum(size for _, size in items)
                self._tell(IGNORED if ignored else OUTSIDE, ev.NONE, names, detail=str(len(items)), size=size)

    def _tell(self, fact: int, group: int, name: str, other: int = ev.NONE, detail: str = "", size: int = 0) -> None:
        tell(self._context, fact, group, name, other, detail, size)


def tell(c: Context, fact: int, group: int, name: str, other: int = ev.NONE, detail: str = "", size: int = 0) -> None:
    """Records a fact of a parameter, or of several that are named together."""
    now = clock()
    text = c.owner.text
    c.emit(ev.PARAM, next(c.ids), now, now, group, c.parent(), fact, text(name), other, text(detail), size)


def some(names: list[str]) -> str:
    """``a, b and 3 more``."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def kinds(named: list[tuple[str, str]]) -> str:
    """The dtypes of parameters, each once."""
    return ", ".join(sorted({dtype for _, dtype in named}))
