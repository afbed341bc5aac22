"""Where this process stands: what it did last, what it is inside of, what it holds, and where its training threads are.

Read by the threads that write heartbeats and compare ranks; nothing here runs on the training thread, and nothing waits for it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from fsdptrace import events as ev

if TYPE_CHECKING:
    from fsdptrace.session import Session

ENTERED, WHICH = 11, 15  # as in adapters.context, which is not imported here: the drain runs where torch need not be
GROUP_UNIT = 32
LARGEST = 20  # open groups that are named, largest first
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_OURS = os.path.dirname(__file__)


def newest(session: Session) -> int:
    """The highest ``seq`` that was given."""
    return int(repr(session.ids)[6:-1]) - 1


def collective(model: int, packed: int, which: int) -> dict[str, Any]:
    """What was entered: ``kind``, ``model``, ``group``, and ``which`` where not all parameters take part."""
    out: dict[str, Any] = {"kind": ev.KINDS[packed % GROUP_UNIT], "model": model, "group": packed // GROUP_UNIT}
    if which and packed % GROUP_UNIT == ev.POST_BACKWARD:
        out["which"] = ev.which_text(which)
    return out


def entered(session: Session) -> dict[str, Any] | None:
    """The collective that a training thread is in, as its hooks noted it: ``kind``, ``model``, ``group``."""
    for model, shared in list(session.shared.items()):
        packed = shared[ENTERED]
        if packed:
            return collective(model, packed, shared[WHICH])
    return None


class Movement:
    """When the process last moved: notices that events or collectives were begun since the look before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.last = 0
        self.moved = time.perf_counter_ns()

    def look(self) -> int:
        """Since when nothing was begun, in ns of ``time.perf_counter_ns``."""
        last = newest(self._session) - self._session.found_apart
        if last != self.last:
            self.last, self.moved = last, time.perf_counter_ns()
        return self.moved


def details(session: Session) -> dict[str, Any]:
    """What is worth knowing of a process that stands still or is about to end: ``at`` its newest event, ``held`` the groups
    that are open or pending, ``stack`` where its training thread is."""
    out: dict[str, Any] = {}
    at = _at(session)
    if at:
        out["at"] = at
    held = [_held(model, tracker) for model, tracker in list(session.trackers.items())]
    out["held"] = [item for item in held if item["bytes"]]
    stack = stack_of(session.threads)
    if stack:
        out["stack"] = stack
    return out


def _at(session: Session) -> dict[str, Any] | None:
    best: list[int] | None = None
    if not session.ring.lock.acquire(timeout=0.1):
        return None
    try:
        for step in session.ring.running.values():
            records = step.records[-ev.WIDTH :]
            if records and (best is None or records[ev.T1] > best[ev.T1]):
                best = records
    finally:
        session.ring.lock.release()
    if best is None:
        return None
    context = best[ev.CONTEXT]
    out = {"kind": ev.KINDS[best[ev.KIND]], "seq": best[ev.SEQ], "pass": ev.PASSES[context % 4]}
    if best[ev.GROUP] >= 0:
        out["group"] = best[ev.GROUP]
    if model := context % ev.THREAD_UNIT // ev.MODEL_UNIT:
        out["model"] = model
    return out


def _held(model: int, tracker: Any) -> dict[str, Any]:
    groups = sorted((g for g in tracker.groups if g.open or g.pending), key=lambda group: -group.bytes)
    out = {"bytes": sum(group.bytes for group in groups), "groups": [group.id for group in groups[:LARGEST]]}
    if len(groups) > LARGEST:
        out["more"] = len(groups) - LARGEST
    if model:
        out["model"] = model
    return out


def stack_of(threads: Mapping[int, int]) -> list[str]:
    """Where the training thread is: its innermost frame, and the innermost one of the program's own code, as
    ``file:line in function``. The thread is the last one of ``threads`` (by identifier) that recorded, else the main one."""
    frames = sys._current_frames()
    known = [ident for ident, _ in sorted(dict(threads).items(), key=lambda item: item[1])]
    main = threading.main_thread().ident
    # The main thread waits inside the autograd engine while a thread of the engine's runs a backward: the program's own line
    # is on the former, so that it is asked first.
    for ident in (main, *reversed(known)):
        if ident is not None and ident in frames and (ident in known or not known):
            return _two(frames[ident])
    return []


def _two(frame: FrameType) -> list[str]:
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename.startswith(_OURS):
        inner = inner.f_back
    if inner is None:
        return []
    own: FrameType | None = inner
    while own is not None and _library(own.f_code.co_filename):
        own = own.f_back
    texts = [_text(inner)] if own is None or own is inner else [_text(inner), _text(own)]
    return texts


def _library(path: str) -> bool:
    return path.startswith(("<", _OURS, *_LIBRARIES))


def _text(frame: FrameType) -> str:
    path = frame.f_code.co_filename.split(os.sep)
    return f"{'/'.join(path[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
