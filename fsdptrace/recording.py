"""One recording's life: install → step → drain → close."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace import steps as steps_module
from fsdptrace.adapters import compat
from fsdptrace.adapters.context import FINAL
from fsdptrace.adapters.describe import class_name, groups_in
from fsdptrace.adapters.optimizer import OptimizerSteps
from fsdptrace.adapters.process import attach, detach
from fsdptrace.checks import policy
from fsdptrace.checks.base import InvariantViolation, Violation
from fsdptrace.options import Options, resolve
from fsdptrace.recorded import Recorded
from fsdptrace.session import FILE_WAIT, Session, session_for
from fsdptrace.steps import Step
from fsdptrace.summary import Summary

# Roots and (by id, while their hooks are on and hold them) param groups that are being recorded.
_recorded: weakref.WeakSet[Any] = weakref.WeakSet()
_recorded_groups: set[int] = set()
_active: weakref.WeakSet[Any] = weakref.WeakSet()


class AlreadyRecorded(RuntimeError):
    """A model, or a part of it, is being recorded already; recording it twice would count everything twice."""


def _already(model: nn.Module) -> str:
    return f"this {class_name(model)} (or a part of it) is being recorded already; leave that `record` first"


def is_recorded(model: nn.Module) -> bool:
    """Whether a ``record`` is active on ``model`` or a part of it."""
    return not _recorded_groups.isdisjoint(id(group) for group in groups_in(model))


class Recording:
    """What :func:`record` gives; a context manager. Reading it is safe at any time, also after the end.

    Attributes:
        options: the options in force.
        enabled: False under ``FSDPTRACE=0`` and after a fault of the tracer turned recording off.
        violations: the first 1,000 violations of this recording, in order; the file has all of them.
        violation_count: how many there were, ``alarm_count`` those of severity ``error`` or ``warning``.
        faults: faults of the tracer's own.
    """

    def __init__(self, models: Sequence[nn.Module], options: Options) -> None:
        self.options = options
        self.enabled = options.enabled
        self.violations: list[Violation] = []
        self.violation_count = 0
        self.alarm_count = 0
        self.faults = 0
        self._models = list(models)
        self._references = [weakref.ref(model) for model in models]
        self._recorded: list[Recorded] = []
        self._session: Session | None = None
        self._optimizers: OptimizerSteps | None = None
        self._active = False
        self._groups: list[int] = []

    # -- life ----------------------------------------------------------------------------------------------------------
    def __enter__(self) -> Recording:
        """Puts the hooks on.

        Raises:
            UnsupportedTorch: this PyTorch lacks a name that is needed; nothing was touched.
            AlreadyRecorded: the model is being recorded already.
            ValueError: no unit of ``fully_shard`` in the model.
            ReferenceError: the recording ended before and its model is gone: it keeps none alive.
        """
        if not self.enabled:
            return self
        models = [model for reference in self._references if (model := reference()) is not None]
        if len(models) != len(self._references):
            raise ReferenceError("the model of this recording is gone; make a new one with `record`")
        report = compat.require()
        if report.newer:
            _warn_newer(report.version)
        auto = sys.modules.get("fsdptrace.auto")
        whole = auto.recording() if auto is not None else None
        for model in models:
            if whole is not None and whole is not self:
                whole.release(model)  # what FSDPTRACE=1 records of it ends here
            if model in _recorded:
                raise AlreadyRecorded(_already(model))
        self._models = models
        self._recorded = []
        session = self._session = session_for(self.options)
        try:
            for model in self._models:
                self._recorded.append(_recorded_for(session, model, self.options, report))
            groups = [id(hooks.group) for recorded in self._recorded for hooks in recorded.hooks.groups]
            if not _recorded_groups.isdisjoint(groups) or len(set(groups)) != len(groups):
                raise AlreadyRecorded(_already(self._models[0]))
        except BaseException:
            for recorded in self._recorded:
                recorded.let_go()
            self._recorded = []
            raise
        self._active = True
        self._groups = groups
        _recorded_groups.update(groups)
        for recorded, model in zip(self._recorded, self._models, strict=True):
            recorded.recording = self
            _recorded.add(model)
            recorded.install()
        self._optimizers = OptimizerSteps([recorded.hooks for recorded in self._recorded])
        self._optimizers.install()
        attach([recorded.context for recorded in self._recorded])
        _active.add(self)
        session.drain.start()
        session.watch.start()
        session.drain.opened.wait(FILE_WAIT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Takes the hooks off and closes the step. An exception inside passes through unchanged."""
        if not self._active:
            self._let_go()
            return
        self._active = False
        try:
            for recorded in self._recorded:
                context = recorded.context
                if error is not None and not isinstance(error, InvariantViolation):
                    context.note_exception(error, ev.NONE, ev.NONE)
                context.shared[FINAL] = 0
                if error is None:
                    recorded.end_step()
                else:
                    _quietly(recorded)
        finally:
            self._take_off()

    def _take_off(self) -> None:
        _active.discard(self)
        detach([recorded.context for recorded in self._recorded])
        if self._optimizers is not None:
            self._optimizers.remove()
            self._optimizers = None
        for model in self._models:
            _recorded.discard(model)
        _recorded_groups.difference_update(self._groups)
        self._let_go()
        if self._session is not None:
            self._session.drain.wake.set()

    def _let_go(self) -> None:
        """Drops the references to the models; idempotent."""
        self._models = []
        for recorded in self._recorded:
            if recorded.recording is self:
                if recorded.failed:
                    recorded.break_off()
                recorded.let_go()
                recorded.recording = None

    def step(self) -> None:
        """Ends the running step of every recorded model. Needed only where no optimizer steps.

        Raises:
            InvariantViolation: a rule that looks at the step is broken, under ``on_violation="raise"``.
        """
        for recorded in self._recorded:
            if self._active:
                recorded.end_step()

    def close(self) -> None:
        """Ends the recording if it runs, and the process's file with it; waits until all is written."""
        self.__exit__(None, None, None)
        if self._session is not None:
            self._session.close()

    def flush(self) -> None:
        """Waits until everything recorded so far and wanted is in the file."""
        if self._session is not None and not self._session.closed:
            self._session.drain.cycle(0.0)

    # -- reading -------------------------------------------------------------------------------------------------------
    @property
    def path(self) -> str:
        """This process's file; empty until it is open."""
        session = self._session
        return str(session.writer.path) if session is not None and session.writer is not None else ""

    @property
    def steps(self) -> list[Step]:
        """The last few finished steps, oldest first."""
        session = self._session
        if session is None:
            return []
        session.ring.pump()
        mine = {recorded.context.model for recorded in self._recorded}
        with session.ring.lock:
            return [
                Step(session.models[kept.model], kept.step, tuple(kept.records), session.texts)
                for kept in session.ring.kept
                if kept.model in mine
            ]

    @property
    def events(self) -> list[ev.Event]:
        """Events of the running step, in order of ``seq``."""
        return [event for step in self._running() for event in step.events]

    def _running(self) -> list[Step]:
        session = self._session
        if session is None:
            return []
        session.ring.pump()
        with session.ring.lock:
            return [
                Step(session.models[number], running.step, tuple(running.records), session.texts)
                for recorded in self._recorded
                if (running := session.ring.running.get(number := recorded.context.model)) is not None
            ]

    def _last(self) -> Step | None:
        finished = self.steps
        if finished:
            return finished[-1]
        running = self._running()
        return running[-1] if running else None

    def summary(self) -> Summary | None:
        """Summary of the last finished step (of the running one where none is finished); ``None`` before any event."""
        last = self._last()
        return last.summary() if last is not None else None

    def counts(self) -> dict[str, int]:
        """Events of the last finished step by kind."""
        last = self._last()
        return last.counts if last is not None else {}

    def scalars(self) -> dict[str, float]:
        """At most 12 floats of the last finished step, for wandb, TensorBoard or MLflow."""
        last = self._last()
        if last is None:
            return {}
        dropped = self._session.ring.dropped if self._session is not None else 0
        return steps_module.scalars(last, self.alarm_count, dropped)

    def model_map(self, index: int = 0) -> Any:
        """The :class:`~fsdptrace.model_map.ModelMap` of recorded model ``index``."""
        return self._recorded[index].hooks.map

    # -- faults --------------------------------------------------------------------------------------------------------
    def _fault(self, error: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            policy.logger().error(
                f"fsdptrace failed and turned this recording off; training goes on: {type(error).__name__}: {error}"
            )
            logging.getLogger("fsdptrace").debug("the fault", exc_info=error)
        self.enabled = False
        if self._active:
            for recorded in self._recorded:
                recorded.failed = True
            self._stop()

    def _stop(self) -> None:
        """Takes the hooks off, from wherever the process is: a fault of ours, or a forked child."""
        self._active = False
        _active.discard(self)
        detach([recorded.context for recorded in self._recorded])
        for recorded in self._recorded:
            recorded.hooks.remove()
        if self._optimizers is not None:
            self._optimizers.remove()
        for model in self._models:
            _recorded.discard(model)
        _recorded_groups.difference_update(self._groups)


def _after_fork() -> None:
    """The child is not recorded until it asks for it itself."""
    for recording in list(_active):
        recording._stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _quietly(recorded: Recorded) -> None:
    """Closes the step of a recording that an exception leaves; nothing may take that exception's place."""
    try:
        recorded.end_step()
    except InvariantViolation:
        pass


def _recorded_for(session: Session, model: nn.Module, options: Options, report: compat.Report) -> Recorded:
    checks = (options.checks, repr(options.rule_options), options.budget_bytes)
    known: Recorded | None = session.installed.get(model)
    number = session.next_model()
    if known is not None:
        number = known.context.model
        if known.checks == checks and not known.failed and known.hooks.take_hold():
            return known
        known.let_go()
    if not _recorded_groups.isdisjoint(map(id, groups_in(model))):
        raise AlreadyRecorded(_already(model))
    made = Recorded(session, model, number, options, report)
    if known is not None:
        made.engine.tracker.step_number = known.engine.tracker.step_number
    if not any(unit.sharded for unit in made.hooks.map.units):
        raise ValueError(
            f"record({type(model).__name__}): no module of it was wrapped by fully_shard, so there is nothing to record; "
            "call record after fully_shard, and pass the module that was wrapped or one that contains it"
        )
    session.installed[model] = made
    return made


_warned: list[str] = []


def _warn_newer(version: str) -> None:
    if not _warned:
        _warned.append(version)
        policy.logger().warning(
            f"torch {version} is newer than any release fsdptrace was tried with; all names it needs are there. "
            "`fsdptrace doctor` shows what was found"
        )


def record(model: nn.Module | Iterable[nn.Module], **options: Any) -> Recording:
    """Records what FSDP2 does with ``model`` while the returned context manager is active.

    Args:
        model: a module wrapped by ``fully_shard`` or containing wrapped ones, or several of them.
        **options: see :class:`fsdptrace.Options`; each is also an environment variable.

    Around one training step it ends the step at exit; around a loop, a step ends at the first outermost forward with grad
    after an optimizer's step, or when :meth:`Recording.step` is called.

    Raises:
        ValueError: an option cannot be used.
        TypeError: an unknown option, or ``model`` is not a module.

    Example:
        >>> with fsdptrace.record(model, on_violation="raise") as rec:
        ...     loss = model(batch).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()
    """
    if isinstance(model, nn.Module):
        models = [model]
    elif isinstance(model, Iterable):
        models = list(model)
    else:
        raise TypeError(f"record(): a module or several are needed, not {type(model).__name__}")
    if not models:
        raise ValueError("record(): give one module or more")
    for item in models:
        if not isinstance(item, nn.Module):
            raise TypeError(f"record(): a module or several are needed, not {type(item).__name__}")
    return Recording(models, resolve(**options))
