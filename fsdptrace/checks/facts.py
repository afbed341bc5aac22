"""What the rules over single parameters share: a fact of a parameter is an event of its own (``param``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation

Handler = Callable[[int, int, str, int, str, int], None]
"""``handler(seq, group, name, other, detail, bytes)``."""


class FactRule(Rule):
    """A rule that reads ``param`` events: one method per fact, named as the fact."""

    def configure(self, options: Any) -> None:
        self._handlers: list[Handler | None] = [getattr(self, name, None) if name else None for name in ev.PARAM_FACTS]

    def param(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        handler = self._handlers[a]
        if handler is not None:
            texts = self.tracker.texts
            handler(seq, group, texts.get(b), c, texts.get(d), e)

    def unit(self, group: int) -> str:
        """The group's name inside parentheses."""
        return self.tracker.groups[group].fqn or "the root"

    def say(self, group: int, message: str, hint: str, evidence: tuple[int, ...], cause: str, **more: Any) -> None:
        """Reports a violation of the rule; ``more`` takes its ``severity`` and ``bytes``."""
        tracker = self.tracker
        fqn = tracker.groups[group].fqn if group >= 0 else ""
        self.report(
            Violation(
                self.name, more.get("severity", self.severity), tracker.map.model, group if group >= 0 else None, fqn,
                tracker.step_number, message, hint, evidence, more.get("bytes", 0), cause,
            )
        )  # fmt: skip
