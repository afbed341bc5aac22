"""What is done about a violation: raise, warn, record, or a function of the user's. And the quiet log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from fsdptrace.checks import registry
from fsdptrace.checks.base import InvariantViolation, Violation
from fsdptrace.checks.text import count, pattern, size

ACTIONS: Final[tuple[str, ...]] = ("raise", "warn", "record")
SAID_AT: Final = (1, 10, 100, 1000)
"""A rule and name pattern is logged the first, 10th, 100th and 1000th time."""
LIVE_LINES: Final = 3
"""So many lines of violations while training runs; the rest is summed up at the end."""

OnViolation = str | Callable[[Violation], None] | Mapping[str, Any]


def logger() -> Any:
    """structlog over the standard logger ``fsdptrace``; the host program's own logging set-up is left as it is."""
    return structlog.wrap_logger(
        logging.getLogger("fsdptrace"),
        processors=[structlog.stdlib.filter_by_level, _render],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _render(_logger: Any, _method: str, event: Any) -> str:
    text = str(event.pop("event"))
    return text + "".join(f" {key}={value}" for key, value in event.items())


def check_policy(on_violation: OnViolation) -> None:
    """Raises ``ValueError`` naming what is wrong with an ``on_violation``."""
    entries = on_violation.items() if isinstance(on_violation, Mapping) else [("*", on_violation)]
    for rule, action in entries:
        if rule != "*":
            registry.check_names([rule], "on_violation")
        if not callable(action) and action not in ACTIONS:
            raise ValueError(f"on_violation: {action!r} is none of {', '.join(ACTIONS)}, nor a function")


def action_for(on_violation: OnViolation, rule: str) -> Any:
    """The action for ``rule``: its own entry of a mapping, else that of ``"*"``, else ``"warn"``."""
    if isinstance(on_violation, Mapping):
        return on_violation.get(rule, on_violation.get("*", "warn"))
    return on_violation


@dataclass(slots=True)
class _Said:
    times: int = 0
    bytes: int = 0
    first: Violation | None = None


@dataclass(slots=True)
class QuietLog:
    """One line per rule and name pattern, again at the 10th, 100th and 1000th; what was not said live comes at the end."""

    lines: int = 0
    said: dict[tuple[str, str, str], _Said] = field(default_factory=dict)
    untold: int = 0

    def add(self, violation: Violation, rank: int) -> None:
        """Counts ``violation`` and logs it if it is time to."""
        key = (violation.rule, pattern(violation.fqn), violation.severity)
        entry = self.said.setdefault(key, _Said())
        entry.times += 1
        entry.bytes += violation.bytes
        entry.first = entry.first or violation
        if entry.times not in SAID_AT or violation.severity != "error" or self.lines >= LIVE_LINES:
            return
        self.lines += 1
        if entry.times == 1:
            logger().error(f"{violation} (step {violation.step}, rank {rank})")
        else:
            logger().error(f"{violation.rule}: {key[1] or '(root)'}: {entry.times} times, {size(entry.bytes)} so far")

    def close(self, where: str) -> None:
        """One line at the end with everything that was found, if anything was."""
        worth = {key: entry for key, entry in self.said.items() if key[2] != "info"}
        if not worth:
            return
        parts = [
            f"{rule}: {name or '(root)'}: {count(entry.times, 'time')}" + (f", {size(entry.bytes)}" if entry.bytes else "")
            for (rule, name, _severity), entry in list(worth.items())[:4]
        ]
        if len(worth) > 4:
            parts.append(f"and {len(worth) - 4} more")
        logger().warning(f"found {'; '.join(parts)}. See `fsdptrace report {where}`")


def act(violation: Violation, on_violation: OnViolation, raise_until_step: int | None, log: QuietLog, rank: int) -> None:
    """Carries the policy out.

    Raises:
        InvariantViolation: the action is ``raise``, the severity ``error`` and the step within ``raise_until_step``.
    """
    action = action_for(on_violation, violation.rule)
    if action == "record":
        return
    if action == "raise":
        log.add(violation, rank)
        if violation.severity == "error" and (raise_until_step is None or violation.step < raise_until_step):
            raise InvariantViolation(violation)
        return
    if callable(action):
        action(violation)
        return
    log.add(violation, rank)
