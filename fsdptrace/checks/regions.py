"""What the events say of checkpointed regions: which call each was, and which groups ran in it and in its recomputation."""

from __future__ import annotations

from fsdptrace import events as ev

_BACKWARD_PASSES = (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)
_LONGEST = 1 << 16  # integers; a step of 512 groups under checkpointing has some thousand


class RegionState:
    """One region: its name, which call of that name in the step it was (from 1), the step, and in order the groups that ran
    (``units``) and those that became usable in it (``gathers``)."""

    __slots__ = ("call", "gathers", "name", "step", "units")

    def __init__(self, name: str, call: int, step: int, units: tuple[int, ...], gathers: tuple[int, ...]) -> None:
        self.name = name
        self.call = call
        self.step = step
        self.units = units
        self.gathers = gathers


class RegionTracker:
    """Regions of one model, part of the tracker.

    Attributes:
        runs: ``seq`` and group of pre-forwards, one after the other, of the running step; of waits ``seq`` and ``~group``.
        known: regions by number, until the step after theirs has ended.
        again, gathered: the groups that ran and that became usable in the last recomputation.
    """

    def __init__(self, several: frozenset[int]) -> None:
        self.runs: list[int] = []
        self.known: dict[int, RegionState] = {}
        self.again: tuple[int, ...] = ()
        self.gathered: tuple[int, ...] = ()
        # Units of several modules have one pre-forward for each that ran, by release for the first only: once counts.
        self._several = several
        self._calls: dict[str, int] = {}

    def region(self, seq: int, name: str, context: int, step: int) -> None:
        """A region's forward ended."""
        call = 0  # of a forward in a recomputation, which belongs to the region around it
        if context % 4 not in _BACKWARD_PASSES:
            call = self._calls[name] = self._calls.get(name, 0) + 1
        self.known[seq] = RegionState(name, call, step, *self._since(seq))

    def recompute(self, seq: int) -> None:
        """A recomputation ended."""
        self.again, self.gathered = self._since(seq)

    def end_step(self, step: int) -> None:
        """Forgets what no backward will come back for."""
        self.runs.clear()
        self._calls.clear()
        if self.known:
            self.known = {seq: state for seq, state in self.known.items() if state.step >= step - 1}

    def shorten(self) -> None:
        """Keeps a step without an end from growing."""
        if len(self.runs) > _LONGEST:
            del self.runs[: _LONGEST // 2]

    def _since(self, seq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The groups of pre-forwards and those of waits that began after event ``seq``."""
        runs = self.runs
        at = len(runs)
        while at and runs[at - 2] > seq:
            at -= 2
        both = runs[at + 1 :: 2]
        groups = [group for group in both if group >= 0]
        if self._several:
            groups = [group for i, group in enumerate(groups) if not i or group != groups[i - 1] or group not in self._several]
        return tuple(groups), tuple([~group for group in both if group < 0])
