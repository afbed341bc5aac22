"""What fsdptrace knows, put on an exception as it leaves a recorded step: the last words of a dying run."""

from __future__ import annotations

from fsdptrace.checks.base import Violation
from fsdptrace.checks.policy import logger
from fsdptrace.checks.text import count, size
from fsdptrace.checks.tracker import Tracker

SHOWN = 3
"""So many findings are written out in a note."""

MOST = 12
"""So many notes an exception carries at most: one object may be raised in every step."""


def describe(tracker: Tracker, violations: dict[str, int]) -> str:
    """The note: what is gathered, what of it is past its backward and who asked for the first, what was found so far."""
    model = tracker.map.root
    held = [group for group in tracker.groups if group.open or group.pending]
    if held:
        most = sorted(held, key=lambda group: -group.bytes)[:3]
        text = (
            f"fsdptrace: {model}: {size(sum(group.bytes for group in held))} of parameters are gathered in "
            f"{count(len(held), 'unit')}, most in {', '.join(f'{group.name} {size(group.bytes)}' for group in most)}"
        )
    else:
        text = f"fsdptrace: {model}: no parameters are gathered"
    text += f" (step {tracker.step_number})."
    past = [group for group in tracker.past_backward() if group.opened > group.over or group.open]
    if past:
        first = min(past, key=lambda group: group.opened)
        who = tracker.asked_by(first.opened_how, first.opened_by)
        total, verb = size(sum(group.bytes for group in past)), "are" if len(past) > 1 else "is"
        text += (
            f" {len(past):,} of them, {total}, {verb} past their backward: the first, {first.name}, was gathered at "
            f"event {first.opened} by {who}."
        )
    if violations:
        found = ", ".join(f"{rule} {count(times, 'time')}" for rule, times in violations.items())
        text += f" Found so far: {found}."
    return text


def finding(violations: list[Violation]) -> str:
    """The note with what rules found in the exception itself."""
    text = "\n".join(f"fsdptrace: {violation}" for violation in violations[:SHOWN])
    return text + (f"\nfsdptrace: and {len(violations) - SHOWN} more" if len(violations) > SHOWN else "")


def allocator(tracker: Tracker, allocated: int, reserved: int) -> str:
    """What the allocator says, in bytes, and in which units it grew in the running step; empty where it says nothing."""
    if not reserved:
        return ""
    text = f" Allocator: {size(allocated)} allocated, {size(reserved)} reserved"
    if tracker.grown:
        grown = sorted(tracker.grown.items(), key=lambda item: -item[1])
        most = ", ".join(f"{tracker.name(group)} +{size(more)}" for group, more in grown[:3])
        text += f"; in this step it grew most at {most}"
    return text + "."


def put_on(error: BaseException, note: str) -> None:
    """Adds ``note`` to ``error`` (``add_note``). Where that cannot be done (Python 3.10, frozen exceptions) it is logged.
    ``args`` stay as they are."""
    try:
        if len(getattr(error, "__notes__", ())) < MOST:
            error.add_note(note)  # type: ignore[attr-defined,unused-ignore]
    except Exception:  # an exception class of the user's may refuse any attribute
        logger().error(note)
