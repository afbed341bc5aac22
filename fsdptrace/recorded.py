"""One recorded root in this process: its engine, its hooks, and what the hooks ask for."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace import notes
from fsdptrace.adapters import compat
from fsdptrace.adapters.accelerator import api_for
from fsdptrace.adapters.context import BUSY, CONTEXT, ENTERED, STEPPED, WHICH, Context, clock
from fsdptrace.adapters.describe import Described, describe
from fsdptrace.adapters.device import Timing
from fsdptrace.adapters.fsdp import InstalledModel
from fsdptrace.adapters.regions import Regions
from fsdptrace.adapters.store import issued
from fsdptrace.checks import mismatch, policy, registry
from fsdptrace.checks.base import InvariantViolation, Violation
from fsdptrace.checks.engine import Engine
from fsdptrace.options import Options
from fsdptrace.session import KEPT_VIOLATIONS, Session
from fsdptrace.standing import newest

if TYPE_CHECKING:
    from fsdptrace.recording import Recording


class Recorded:
    """One recorded root in this process: engine, hooks, and what the hooks ask for (``Owner`` of the adapters)."""

    def __init__(self, session: Session, model: nn.Module, number: int, options: Options, report: compat.Report) -> None:
        self.session = session
        self.checks = (options.checks, repr(options.rule_options), options.budget_bytes)
        self.recording: Recording | None = None
        self.found: dict[str, int] = {}
        self.failed = False
        described = describe(model, number)
        rules = registry.select(options.checks, options.budget_bytes is not None)
        own = registry.options_of(options.rule_options, options.budget_bytes)
        self.engine = Engine(described.map, rules, self._on_violation, report.release, own, session.texts)
        # None where nothing is to do, so that a hook pays one comparison.
        self.before_collective = self._flush if options.flush == "collective" else None
        self.context = Context(number, session.ring.append, session.ids, self.engine, self, session.threads)
        self.timing = self.context.timing = self._timing(options, described)
        self.hooks = InstalledModel(self.context, described)
        Regions(self.context, self.hooks, self)  # known to the context
        self._explained: tuple[weakref.ref[BaseException], str] | None = None
        session.shared[number] = self.context.shared
        session.trackers[number] = self.engine.tracker
        if self.timing is not None:
            session.timings[number] = self.timing
            session.device_takers[number] = weakref.WeakMethod(self.take_device_times)
        session.recorded[number] = weakref.ref(self)
        self._elsewhere: InvariantViolation | None = None
        session.add_model(described.map)
        for rule in rules:
            if rule.unseen:
                session.cannot_show(f"{rule.name}: {rule.unseen}")

        self._seen = False

    def _timing(self, options: Options, described: Described) -> Timing | None:
        """What times the model on its device: nothing on the CPU, unless asked for."""
        if options.device_timing == "off" or not described.groups:
            return None
        device = described.groups[0].device
        if device.type == "cpu" and options.device_timing != "always":
            return None
        detailed = self.session.drain.detailed
        wanted = detailed if options.device_timing == "auto" else lambda step: True
        return Timing(api_for(device), wanted, detailed)

    def take_device_times(self) -> bool:
        """Records what was worked out of earlier steps; whether there was any."""
        timing, context = self.timing, self.context
        any_taken = False
        while timing is not None and timing.results:
            times = timing.results.popleft()
            now = clock()
            span = times.end - times.begin if times.end >= 0 else -1
            context.emit(
                ev.DEVICE, next(context.ids), now, now, ev.NONE, 0,
                times.step, times.gather, times.reduce, times.exposed_total, span, pass_=ev.PASS_NONE,
            )  # fmt: skip
            any_taken = True
        return any_taken

    def install(self) -> None:
        """Puts the hooks on; the first time every group's state is recorded, later only what changed meanwhile."""
        if self.recording is not None:
            self.context.regions.wants(self.recording.options.fingerprint, self.recording.options.checkpoint_detail)
        groups = self.engine.tracker.groups
        first, self._seen = not self._seen, True
        self.session.ring.pump()  # what was recorded before comes before in the order too
        self.session.order.start(self.hooks.map, issued(hooks.group for hooks in self.hooks.groups))
        self.hooks.install(lambda group: None if first else (groups[group].open, groups[group].pending, groups[group].training))
        if self.timing is not None:
            self.timing.begin_step(self.engine.tracker.step_number)

    def let_go(self) -> None:
        """Takes the hooks off and drops every strong reference to the model."""
        if self.timing is not None:
            self.timing.drop()
        self.hooks.let_go()

    # -- Owner ---------------------------------------------------------------------------------------------------------
    def fault(self, error: Exception) -> None:
        """See :class:`fsdptrace.adapters.context.Owner`."""
        recording = self.recording
        if recording is not None:
            recording._fault(error)

    def stop_run(self, error: BaseException) -> bool:
        """See :class:`fsdptrace.adapters.context.Owner`."""
        return isinstance(error, InvariantViolation) or error is self._from_callable

    def text(self, text: str) -> int:
        """See :class:`fsdptrace.adapters.context.Owner`."""
        return self.session.texts.put(text)

    def text_once(self, text: str) -> int:
        """See :class:`fsdptrace.adapters.context.Owner`."""
        return self.session.texts.put_once(text)

    def explain(self, error: BaseException, region: int, group: int, detail: dict[str, Any]) -> None:
        """See :class:`fsdptrace.adapters.regions.Explainer`."""
        message, hint = mismatch.describe(self.engine.tracker, group, region, detail)
        note = f"fsdptrace: {message}\n  {hint}"
        self._explained = weakref.ref(error), note
        notes.put_on(error, note)

    def remark(self, error: BaseException, region: int, group: int, detail: dict[str, Any]) -> None:
        """See :class:`fsdptrace.adapters.regions.Explainer`."""
        notes.put_on(error, f"fsdptrace: {mismatch.failure(self.engine.tracker, group, region, detail)}")

    def cannot_show(self, line: str) -> None:
        """See :class:`fsdptrace.adapters.regions.Explainer`."""
        self.session.cannot_show(line)

    def annotate(self, error: BaseException, seq: int = 0) -> None:
        """See :class:`fsdptrace.adapters.context.Owner`."""
        self.session.left_by = type(error).__name__, newest(self.session) - self.session.found_apart
        if self.stop_run(error):
            return
        if self._explained is not None and error.__cause__ is not None and self._explained[0]() is error.__cause__:
            notes.put_on(error, self._explained[1])  # debug=True: PyTorch raises another CheckpointError from the first
        found = [violation for violation in self.engine.latest if violation.seq == seq]
        if found:
            notes.put_on(error, notes.finding(found))
        if left := self.engine.aftermath.note(seq):
            notes.put_on(error, left)
        note = notes.describe(self.engine.tracker, self.found)
        if self.timing is not None:
            note += notes.allocator(self.engine.tracker, *self.timing.memory())
        notes.put_on(error, note)

    _from_callable: BaseException | None = None

    def _flush(self, model: int) -> None:
        self.session.drain.flush_now(model, self.context.shared[ENTERED], self.context.shared[WHICH])

    def announce(self, model: int) -> None:
        """See :class:`fsdptrace.adapters.context.Owner`."""
        if self.before_collective is None:  # else it is done anyway
            self.session.drain.announce(model, self.context.shared[ENTERED], self.context.shared[WHICH])

    def begin_step(self) -> None:
        """Notes the span of the program's own that is active, for exporters to link to; nothing without OpenTelemetry."""
        trace = sys.modules.get("opentelemetry.trace")
        if trace is not None and self.session.options.exporters:
            context = trace.get_current_span().get_span_context()
            if context.is_valid:
                parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
                self.session.active_spans.append((self.context.model, self.engine.tracker.step_number, parent))

    def end_step(self, model: int | None = None) -> None:
        """Closes the running step; nothing when nothing happened in it."""
        context = self.context
        shared = context.shared
        context.close_backward()
        context.abandon_forward()
        shared[STEPPED] = 0
        if not shared[BUSY]:
            return
        self.hooks.poll_flags()
        context.regions.settle()
        context.step += 1
        if context.step < 4 or not context.step % 128:
            self.hooks.between.written_in_passes()
        if self.timing is not None:
            self.timing.end_step()
            self.take_device_times()
        tracker = self.engine.tracker
        shared[BUSY] = 0
        elsewhere, self._elsewhere = self._elsewhere, None
        past = sum(group.bytes for group in tracker.past_backward())
        now = clock()
        ring = self.session.ring
        seq = next(context.ids)
        data = (tracker.held, tracker.peak, past, ring.dropped, tracker.past_peak)
        packed = context.shared[CONTEXT]
        try:
            # Rules first: what they find at the step belongs to the step that ends.
            context.on[ev.STEP](seq, ev.NONE, packed, *data)
        finally:
            context.append((ev.STEP, seq, now, now, ev.NONE, 0, packed, *data))
        if self.timing is not None:
            self.timing.begin_step(tracker.step_number)
        if ring.full():
            ring.pump_if_free()
        if elsewhere is not None:
            raise elsewhere

    def break_off(self) -> None:
        """Closes the step that a fault of ours cut short, past the checks, so that the next recording begins a new one."""
        context, tracker = self.context, self.engine.tracker
        if context.shared[BUSY]:
            context.shared[BUSY] = 0
            now = clock()
            data = (tracker.held, tracker.peak, 0, self.session.ring.dropped, 0)
            context.append((ev.STEP, next(context.ids), now, now, ev.NONE, 0, context.base, *data))
            tracker.step_number += 1

    def _on_violation(self, violation: Violation) -> None:
        if violation.severity != "info":
            self.found[violation.rule] = self.found.get(violation.rule, 0) + 1
        recording = self.recording
        session = self.session
        context = self.context
        now = clock()
        group = ev.NONE if violation.group is None else violation.group
        context.emit(
            ev.VIOLATION, next(context.ids), now, now, group, violation.seq, session.keep(violation),
        )  # fmt: skip
        if recording is None:
            return
        recording.violation_count += 1
        recording.alarm_count += violation.severity != "info"
        if len(recording.violations) < KEPT_VIOLATIONS:
            recording.violations.append(violation)
        options = recording.options
        try:
            policy.act(violation, options.on_violation, options.raise_until_step, session.log, session.identity.rank)
        except InvariantViolation:
            if self.before_collective is not None:
                session.drain.flush_now()
            raise
        except BaseException as error:
            self._from_callable = error  # a function of the user's may raise whatever it likes
            raise

    def found_elsewhere(self, violation: Violation, say: bool) -> None:
        """A rule that compares ranks was broken; called on the thread that compares. Under ``raise`` the run stops at the end
        of the running step, if it gets there: nothing can be raised in a thread that is stuck in a collective."""
        session, recording = self.session, self.recording
        now = clock()
        group = ev.NONE if violation.group is None else violation.group
        data = (session.keep(violation), 0, 0, 0, 0)
        session.found_apart += 1
        session.ring.append((ev.VIOLATION, next(session.ids), now, now, group, violation.seq, self.context.base, *data))
        session.drain.wake.set()
        if recording is None:
            return
        recording.violation_count += 1
        if len(recording.violations) < KEPT_VIOLATIONS:
            recording.violations.append(violation)
        options = recording.options
        action = policy.action_for(options.on_violation, violation.rule)
        if action == "raise":
            late = options.raise_until_step is not None and violation.step >= options.raise_until_step
            if violation.severity == "error" and not late:
                self._elsewhere = InvariantViolation(violation)
            if say:
                session.log.add(violation, session.identity.rank)
        elif callable(action):
            action(violation)
        elif action == "warn" and say:
            session.log.add(violation, session.identity.rank)
