"""What an exporter is to the process that follows the files: one or more sinks, each with a thread and a position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsdptrace.analysis.follow import FollowedStep, Follower


class Unusable(ValueError):
    """The exporter cannot work as it is set up; the message is one clear line that names what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What exporters are told.

    Attributes:
        detail_ranks: ranks whose units are shown one by one, beside those with a violation; ``None`` is every rank.
        live: the files still grow; else one pass over what is there.
        stop: set when the process is to end: whatever waits gives up.
        say: takes one clear line for people.
    """

    detail_ranks: frozenset[int] | None = frozenset({0})
    live: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], None] = print


class Sink(Protocol):
    """Takes the steps of the processes that are followed. Everything but ``close`` is called from one thread.

    Attributes:
        name: part of the names of its position files: positions of two back ends must not mix.
        linger: seconds that it wants to live on after the last process ended.

    A sink may also have ``lines``, a pattern of the only lines that it needs; ``keeps_position``, False where it always
    begins anew; and ``reached(process)``, where it holds steps back over a :meth:`flush`: the position of the last one that it
    did not, or None before any.
    """

    name: str
    linger: float

    def begin(self, process: Follower, state: Mapping[str, Any]) -> None:
        """A process is followed from now on; ``state`` is what :meth:`state` gave when its position was last kept."""

    def step(self, process: Follower, step: FollowedStep) -> None:
        """A step of it is over, or, with ``step.part.line`` None, was running when it ended."""

    def round(self, process: Follower, caught_up: bool) -> None:
        """After each look at its files; ``caught_up`` when there was nothing new."""

    def end(self, process: Follower) -> None:
        """It is over: ``process.ended`` says how."""

    def flush(self, due: bool) -> bool:
        """Delivers what it has, all of it when ``due``; may block. Whether all that it was given is now delivered."""

    def state(self, process: Follower) -> dict[str, Any]:
        """What to keep beside the position."""

    def close(self) -> None:
        """Ends it; whatever blocks in :meth:`flush` returns soon."""


class Factory(Protocol):
    """An entry point of the group ``fsdptrace.exporters``."""

    def __call__(self, argument: str, settings: Settings) -> Sequence[Sink]:
        """The sinks; ``argument`` is what follows the colon in ``--to NAME:ARGUMENT``.

        Raises:
            Unusable: a package is missing, or a setting cannot be used.
        """
