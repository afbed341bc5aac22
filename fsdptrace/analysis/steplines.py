"""What step lines say, kept small: a long run has a million of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class StepLine:
    """What is known of one finished step of one model on one rank, from its ``step`` line.

    Attributes:
        full: all its events were read; else only this line (and perhaps some events).
        duration_ns: since the previous step's end, or since the first event for the first one; 0 where unknown.
        events: how many events it had.
        gathers: unshards in it, no-ops included; ``violations`` in it; ``dropped`` events of it that did not fit.
        unsharded_bytes, unsharded_peak, past_backward_bytes: at its end, at most during it, and at its end although the
            backward was over; ``past_backward_peak`` at most at one time of it.
    """

    model: int
    step: int
    full: bool
    seq: int
    t: int
    duration_ns: int
    events: int
    gathers: int
    violations: int
    dropped: int
    unsharded_bytes: int
    unsharded_peak: int
    past_backward_bytes: int
    past_backward_peak: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(zip(_NAMES, _values(self), strict=True))


_NAMES = tuple(field.name for field in fields(StepLine))
_values: attrgetter[tuple[int, ...]] = attrgetter(*_NAMES)  # dataclasses.astuple copies every value, at ten times the cost
_WIDTH = len(_NAMES)
_STEP, _MODEL, _FULL, _EVENTS = 1, 0, 2, 6


class StepLines(Sequence[StepLine]):
    """Step lines in the order of writing, as flat integers; an item is made when asked for."""

    def __init__(self) -> None:
        self._flat = array("q")

    def append(self, line: StepLine) -> None:
        """Adds one; ``OverflowError`` or ``TypeError`` when a value is no 64-bit integer."""
        before = len(self._flat)
        try:
            self._flat.extend(_values(line))
        except (OverflowError, TypeError):
            del self._flat[before:]
            raise

    def __len__(self) -> int:
        return len(self._flat) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> StepLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepLine]: ...
    def __getitem__(self, index: int | slice) -> StepLine | list[StepLine]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = (index % len(self)) * _WIDTH
        model, step, full, *rest = self._flat[at : at + _WIDTH]
        return StepLine(model, step, bool(full), *rest)

    def __iter__(self) -> Iterator[StepLine]:
        for model, step, full, *rest in zip(*[iter(self._flat)] * _WIDTH, strict=True):
            yield StepLine(model, step, bool(full), *rest)

    @property
    def full(self) -> int:
        """How many of them have all their events."""
        return sum(self._flat[_FULL::_WIDTH])

    @property
    def events(self) -> int:
        """Events of all these steps, written or not."""
        return sum(self._flat[_EVENTS::_WIDTH])

    @property
    def numbers(self) -> set[int]:
        """The steps' numbers."""
        return set(self._flat[_STEP::_WIDTH])

    def last(self, model: int) -> int:
        """The highest number of a step of ``model``; -1 without one."""
        steps, models = self._flat[_STEP::_WIDTH], self._flat[_MODEL::_WIDTH]
        return max((step for step, of in zip(steps, models, strict=True) if of == model), default=-1)
