"""Steps whose device times are still to come: they stand in later lines, and go out with the step's spans."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdptrace import events as ev
from fsdptrace.analysis.device import StepOnDevice
from fsdptrace.analysis.follow import FollowedStep, Position

PATIENCE = 75.0  # seconds; the recorder gives the device a minute
MOST = 32  # steps of one process; of the recorder's, eight wait for the device at most


@dataclass(slots=True)
class Held:
    """The steps of one process in their order, each until its device times are known, or will not be.

    Attributes:
        reached: where a reader goes on that has taken everything that was let go; None before anything was.
    """

    reached: Position | None = None
    _queue: deque[tuple[FollowedStep, float]] = field(default_factory=deque)
    _known: dict[tuple[int, int], StepOnDevice] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)  # the newest step whose times came, by model

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, step: FollowedStep) -> None:
        """One more step."""
        self._queue.append((step, time.monotonic()))

    def times(self, times: StepOnDevice) -> None:
        """Device times were read; those of a step may also be there before the step is."""
        self._known[times.model, times.step] = times
        self._newest[times.model] = max(times.step, self._newest.get(times.model, -1))
        while len(self._known) > 2 * MOST:
            del self._known[next(iter(self._known))]

    def ready(self, all_of_them: bool = False) -> Iterator[tuple[FollowedStep, StepOnDevice | None]]:
        """Lets steps go, oldest first, with their device times where there are any."""
        while self._queue:
            step, since = self._queue[0]
            key = (step.part.map.model, step.part.step)
            if (
                not all_of_them
                and len(self._queue) <= MOST
                and timed(step)
                and key not in self._known
                and self._newest.get(key[0], -1) < key[1]  # they come in the order of steps
                and time.monotonic() - since < PATIENCE
            ):
                return
            self._queue.popleft()
            self.reached = step.position
            yield step, self._known.pop(key, None)


def timed(step: FollowedStep) -> bool:
    """Whether device times of it are to come: in timed steps the allocator is read too."""
    return step.part.line is not None and ev.MEMORY in step.part.records[ev.KIND :: ev.WIDTH]
