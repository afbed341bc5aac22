"""The wrappers around one param group's methods. Each is a closure with the wrapped method's exact signature.

Laws that hold here (docs/design.md): no dispatcher operator, no tensor held, nothing synchronised; the wrapped method
gets its arguments untouched and its result is returned as it is; a fault of ours never reaches training. The training
thread pays for every line, so that constants live in the closure and an event is one ``append`` of a tuple of integers.
"""

from __future__ import annotations

import weakref
from types import CellType
from typing import Any

from fsdptrace.adapters.context import Context
from fsdptrace.adapters.gathering import Gathering
from fsdptrace.adapters.group import Wrapper
from fsdptrace.adapters.passes import Passes
from fsdptrace.model_map import GroupInfo


class GroupHooks(Gathering, Passes):
    """Wrappers of one FSDPParamGroup, by method name."""

    def __init__(self, context: Context, group: Any, info: GroupInfo) -> None:
        super().__init__(context, group, info)
        self.wrappers: dict[str, Wrapper] = {
            "unshard": self._unshard(),
            "wait_for_unshard": self._wait(),
            "_to_sharded": self._to_sharded("_to_sharded", 0),
            "_to_sharded_post_forward": self._to_sharded("_to_sharded_post_forward", 1),
            "use_training_state": self._use_training_state(),
            "_prefetch_unshard": self._prefetch_unshard(),
            "pre_forward": self._pre_forward(),
            "post_forward": self._post_forward(),
            "pre_backward": self._pre_backward(),
            "post_backward": self._post_backward(),
            "finalize_backward": self._finalize_backward(),
        }
        if hasattr(group, "_reset_iter_state"):
            self.wrappers["_reset_iter_state"] = self._reset_iter_state()
        self._reference = weakref.ref(group)
        self._cells = self._strong_cells()

    # -- keeping no model alive ----------------------------------------------------------------------------------------
    def _strong_cells(self) -> tuple[list[CellType], list[CellType]]:
        """Closure cells that hold the group, and those that hold its list of parameters."""
        groups, params = [], []
        for wrapper in self.wrappers.values():
            for cell in wrapper.__closure__ or ():
                if cell.cell_contents is self.group:
                    groups.append(cell)
                elif cell.cell_contents is self.group.fsdp_params:
                    params.append(cell)
        return groups, params

    def let_go(self) -> None:
        """Drops every strong reference to the group: while no recording is active nothing of ours keeps a model alive."""
        self.group = None
        self.others.clear()
        self.leaves.clear()
        groups, params = self._cells
        for cell in groups:
            cell.cell_contents = None
        for cell in params:
            cell.cell_contents = None

    def take_hold(self) -> bool:
        """The inverse of :meth:`let_go`. False when the group is gone or somebody else's methods are on it."""
        group = self._reference()
        if group is None or self.shared_with_others or not self.wrappers.keys().isdisjoint(group.__dict__):
            return False
        self.group = group
        self.known.clear()
        self.reduced.clear()
        self.leaves.clear()
        groups, params = self._cells
        for cell in groups:
            cell.cell_contents = group
        for cell in params:
            cell.cell_contents = group.fsdp_params
        return True
