"""Records every outermost FSDP2 model of a process from its first forward on, without keeping any of them alive.

What holds a model's hooks is the model itself (its hooks hold them); everything here is weak, so that a model that the program
lets go is collected with them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from typing import Any

import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters import compat
from fsdptrace.adapters.first_use import FirstUse
from fsdptrace.adapters.frames import STATE_DICT, modules_in
from fsdptrace.adapters.optimizer import OptimizerSteps
from fsdptrace.adapters.process import attach
from fsdptrace.checks.base import InvariantViolation
from fsdptrace.checks.policy import logger
from fsdptrace.last_words import unhandled
from fsdptrace.options import Options, resolve
from fsdptrace.recorded import Recorded
from fsdptrace.recording import Recording, is_recorded
from fsdptrace.session import FILE_WAIT, Session, session_for, total


class AutoRecording(Recording):
    """The recording of a whole process: its models come and go."""

    def __init__(self, options: Options) -> None:
        super().__init__([], options)
        self.seen = 0
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._waiting: weakref.WeakKeyDictionary[nn.Module, FirstUse] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Recorded]] = weakref.WeakKeyDictionary()
        self._report = compat.require()
        self._steps = OptimizerSteps([])
        self._steps.install()
        self.session: Session = session_for(options)
        self._session = self.session
        self.session.drain.start()
        self.session.watch.start()
        atexit.register(self.finish)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        _finalize_in_children(self)

    # -- noticing ------------------------------------------------------------------------------------------------------
    def wrapped(self, modules: list[nn.Module]) -> None:
        """``fully_shard`` wrapped ``modules``: the first forward of any of them starts the recording of its root."""
        for module in modules:
            self._wrapped.append(weakref.ref(module))
            if module not in self._waiting:
                self._waiting[module] = FirstUse(module, self._used, self._misused)

    def _used(self, module: nn.Module, args: Any) -> None:
        try:
            self._start(module, args)
        except InvariantViolation:  # what the rules say before a first forward
            raise
        except Exception as error:
            self.faults += 1
            if self.faults == 1:
                logger().error(
                    f"fsdptrace could not record {type(module).__name__}; training goes on: {type(error).__name__}: {error}"
                )

    def _misused(self, module: nn.Module, part: nn.Module, error: BaseException) -> None:
        """The first use of ``module`` failed in ``part`` of it, past its forward."""
        self._used(module, None)
        for recorded in self.alive():
            if recorded.hooks.has(part):
                recorded.hooks.part_failed(part, error)

    def _start(self, module: nn.Module, args: Any) -> None:
        """Records the root of ``module`` from this use on; ``args`` is ``None`` where it is no forward of its own."""
        root = self._root_of(module)
        for inner in root.modules():
            waiting = self._waiting.pop(inner, None)
            if waiting is not None:
                waiting.remove()
        if is_recorded(root):  # the program's own `record` has it
            return
        recorded = Recorded(self.session, root, self.session.next_model(), self.options, self._report)
        recorded.recording = self
        recorded.install()
        if not self.session.drain.opened.is_set():
            self.session.drain.wake.set()
            self.session.drain.opened.wait(FILE_WAIT)
        self._roots[root] = weakref.ref(recorded)
        self._steps.add(recorded.hooks)
        attach([recorded.context])
        self.seen += 1
        if args is not None:
            recorded.hooks.begin_inside(module, args)

    def _root_of(self, module: nn.Module) -> nn.Module:
        """The largest wrapped module that contains ``module``."""
        best, most = module, 0
        for reference in self._wrapped:
            candidate = reference()
            if candidate is None:
                continue
            inside = list(candidate.modules())
            if len(inside) > most and any(inner is module for inner in inside):
                best, most = candidate, len(inside)
        return best

    def release(self, model: nn.Module) -> None:
        """``record`` takes ``model``, or a part of it or more, over: what is recorded of it here ends."""
        inside = {id(module) for module in model.modules()}
        for root, reference in list(self._roots.items()):
            recorded = reference()
            if recorded is not None and (id(root) in inside or any(module is model for module in root.modules())):
                recorded.end_step()
                recorded.hooks.remove()
                recorded.context.regions.stop()
                del self._roots[root]
        for module, waiting in list(self._waiting.items()):
            if id(module) in inside:
                waiting.remove()
                del self._waiting[module]

    def alive(self) -> list[Recorded]:
        """The recorded models that the program still holds."""
        return [recorded for reference in self._roots.values() if (recorded := reference()) is not None]

    def _uncaught(self, kind: Any, error: BaseException, trace: Any) -> None:
        """An exception that ends the program from outside the models' own calls gets the note too, and goes its way."""
        try:
            for module in modules_in(error):  # a model that nothing of ours has seen yet, used past its forward
                if any(module is part for wrapped in self._waiting for part in wrapped.modules()):
                    self._used(self._root_of(module), None)
            for recorded in self.alive():
                context = recorded.context
                about, used = context.look_at(error)
                if used is not None or about == STATE_DICT:
                    context.note_exception(error, ev.NONE, ev.NONE)
                elif not context.has_seen(error):
                    recorded.annotate(error)
        except Exception as fault:
            self._fault(fault)
        self._excepthook(kind, error, trace)

    # -- ending --------------------------------------------------------------------------------------------------------
    def _fault(self, error: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            logger().error(f"fsdptrace failed and turned itself off; training goes on: {type(error).__name__}: {error}")
        for recorded in self.alive():
            recorded.hooks.remove()
            recorded.context.regions.stop()
        self._steps.remove()

    def finish(self) -> None:
        """At the end of the process: closes steps and files, and leaves the tally for ``fsdptrace run``. Idempotent."""
        if self.session.closed:
            return
        for recorded in self.alive():
            try:
                recorded.end_step()
            except Exception as error:
                if not recorded.stop_run(error):
                    self._fault(error)
        self.session.ended_by, self.session.at_exit = unhandled(), True
        self.session.close()
        tally = os.environ.get("FSDPTRACE_TALLY")
        if not tally:
            return
        body = total()
        try:
            with open(os.path.join(tally, str(os.getpid())), "w") as stream:
                json.dump(body, stream)
        except OSError:
            pass


_recording: AutoRecording | None = None


def recording() -> AutoRecording | None:
    """The process's own recording, once ``fully_shard`` has been called."""
    return _recording


def notice(target: Any) -> None:
    """``fully_shard`` wrapped ``target``, a module or several.

    Raises:
        UnsupportedTorch: this PyTorch lacks a name that is needed.
        ValueError: an option in the environment cannot be used.
    """
    global _recording
    if _recording is None:
        _recording = AutoRecording(resolve())
    _recording.wrapped([target] if isinstance(target, nn.Module) else list(target))


def _finalize_in_children(recording: AutoRecording) -> None:
    """multiprocessing ends forked children by ``os._exit``, past atexit; its own finalizers do run."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(recording, AutoRecording.finish, args=(recording,), exitpriority=200)
