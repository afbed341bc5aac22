"""One checkpointed region, and one recomputation of it, as :mod:`fsdptrace.adapters.regions` keeps them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters.fingerprints import Prints
from fsdptrace.adapters.starts import Start

if TYPE_CHECKING:
    from fsdptrace.adapters.regions import Regions

NON_REENTRANT, REENTRANT, SELECTIVE = range(3)  # positions in CHECKPOINTS
RETURNED, EARLY_STOP, FAILED = range(3)  # positions in ENDS
COUNT, METADATA, VALUES = range(3)  # positions in MISMATCHES


class Again:
    """One recomputation that is running or has just ended."""

    __slots__ = ("by", "depth", "end", "open", "outer", "parent", "pass_", "prints", "saved", "seq", "start", "t0", "t1")

    def __init__(self, seq: int, t0: int, parent: int, start: Start) -> None:
        self.seq = seq
        self.t0 = self.t1 = t0
        self.parent = parent
        self.start = start
        self.end = RETURNED
        self.saved = ev.NONE
        self.outer = self.depth = self.open = 0
        self.pass_ = ev.PASS_RECOMPUTE
        self.by: list[str] = []
        self.prints: Prints | None = None


class Region:
    """One call of a checkpointed function. Lives as long as PyTorch's own frame for it."""

    __slots__ = (
        "again", "by", "checkpoint", "group", "module", "name", "outer", "owner", "parent", "pass_", "prints", "seq", "shown",
        "start", "t0",
    )  # fmt: skip

    def __init__(self, owner: Regions, name: str, group: int, checkpoint: int) -> None:
        self.owner = owner
        self.shown = name
        self.name = owner.context.owner.text(name)
        self.group = group
        self.checkpoint = checkpoint
        self.again: Again | None = None
        self.seq = self.t0 = self.parent = self.outer = 0
        self.pass_ = ev.PASS_FORWARD
        self.module: weakref.ref[nn.Module] | None = None
        self.start: Start
        self.by: list[str] = []  # which submodule saved each tensor, where wanted
        self.prints: Prints | None = None  # fingerprints of saved tensors, where wanted

    def its_module(self) -> nn.Module | None:
        """The module that the function belongs to."""
        return None if self.module is None else self.module()


class Recomputed(NamedTuple):
    """A recomputation whose values are compared when the step ends."""

    region: int
    recompute: int
    name: str
    group: int
    checkpoint: int
    end: int
    forward: Start
    again: Start
    saved: Prints | None
    saved_again: Prints | None
    by: list[str]
