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
    single: bool = True


@dataclass(slots=True)
class QuietLog:
    """One line per rule and name pattern, again at the 10th, 100th and 1000th; what was not said live comes at the end."""

    lines: int = 0
    said: dict[tuple[str, str, str], _Said] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def add(self, violation: Violation, rank: int, live: bool = True) -> None:
        """Counts ``violation`` and logs it if it is time to; not ``live`` where it is raised and so says itself."""
        key = (violation.rule, pattern(violation.fqn), violation.severity)
        entry = self.said.setdefault(key, _Said())
        entry.times += 1
        entry.bytes += violation.bytes
        entry.first = entry.first or violation
        entry.single = entry.single and entry.first.fqn == violation.fqn
        if entry.times not in SAID_AT or violation.severity != "error":
            return
        # A rule always gets its first line; patterns of its and repetitions share what is left.
        new = violation.rule not in self.told
        if not new and self.lines >= LIVE_LINES:
            return
        self.told.add(violation.rule)
        self.lines += not new
        if entry.times == 1:
            if live:
                logger().error(f"{violation} (step {violation.step}, rank {rank})")
        else:
            logger().error(f"{violation.rule}: {_place(key, entry)}: {entry.times} times, {size(entry.bytes)} so far")

    def close(self, where: str) -> None:
        """One line at the end with everything that was found, if anything was; errors first."""
        worth = {key: entry for key, entry in self.said.items() if key[2] != "info"}
        if not worth:
            return
        ordered = sorted(worth.items(), key=lambda item: item[0][2] != "error")
        parts = [f"{key[0]}: {_place(key, entry)}: {count(entry.times, 'time')}" for key, entry in ordered[:4]]
        if len(worth) > 4:
            parts.append(f"and {len(worth) - 4} more")
        logger().warning(f"found {'; '.join(parts)}. See `fsdptrace report {where}`")


def _place(key: tuple[str, str, str], entry: _Said) -> str:
    """The name where it is one module, the pattern where they are several, the model where it is none."""
    if entry.first is None or entry.first.group is None:
        return "the model"
    return (entry.first.fqn if entry.single else key[1]) or "(root)"


def act(violation: Violation, on_violation: OnViolation, raise_until_step: int | None, log: QuietLog, rank: int) -> None:
    """Carries the policy out.

    Raises:
        InvariantViolation: the action is ``raise``, the severity ``error`` and the step within ``raise_until_step``.
    """
    action = action_for(on_violation, violation.rule)
    if action == "record":
        return
    if action == "raise":
        raises = violation.severity == "error" and (raise_until_step is None or violation.step < raise_until_step)
        log.add(violation, rank, live=not raises)
        if raises:
            raise InvariantViolation(violation)
        return
    if callable(action):
        action(violation)
        return
    log.add(violation, rank)
