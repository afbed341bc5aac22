"""Feeds one model's events to the tracker and the rules, and keeps violations from being said twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdptrace import events as ev
from fsdptrace.adapters.legal import legal_states
from fsdptrace.checks import registry
from fsdptrace.checks.aftermath import Aftermath
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.tracker import Tracker
from fsdptrace.model_map import ModelMap

Handler = Callable[[int, int, int, int, int, int, int, int], None]


def _nothing(seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
    pass


class Engine:
    """The checks of one model.

    Args:
        model_map: the model.
        rules: which rules run.
        on_violation: called with each violation that is new in its step; may raise, at the event.
        release: of torch, as ``(2, 13)``: what it does and which transitions it has.
        options: options of rules, by rule name.
        texts: the strings that events refer to.

    Attributes:
        aftermath: what exceptions left half done, for the notes on later ones.
        latest: what rules reported at the last event at which they did, new in its step or not.
        repeated: how often a violation was seen again in its step, by ``(rule, group, cause)``.
    """

    def __init__(
        self,
        model_map: ModelMap,
        rules: Sequence[type[Rule]],
        on_violation: Callable[[Violation], None],
        release: tuple[int, int] = (2, 13),
        options: Mapping[str, Mapping[str, Any]] | None = None,
        texts: ev.Texts | None = None,
    ) -> None:
        self.tracker = Tracker(model_map, release, texts)
        self.latest: list[Violation] = []
        self._on_violation = on_violation
        self._seen: set[tuple[str, int | None, str]] = set()
        self.repeated: dict[tuple[str, int | None, str], int] = {}
        self.rules = registry.make(
            rules, self.tracker, self._report, {"illegal-state": {"legal": legal_states(release)}, **(options or {})}
        )
        self.aftermath = Aftermath(self.tracker, self._report)
        self._handlers: list[Handler] = [_nothing] * len(ev.KINDS)
        for kind in range(1, len(ev.KINDS)):
            self._handlers[kind] = self._compose(kind)

    def handler(self, kind: int) -> Handler:
        """The function for events of ``kind``: tracker first, then each rule that reads the kind."""
        return self._handlers[kind]

    def feed(self, record: Sequence[int]) -> None:
        """Shows one record (see :data:`fsdptrace.events.WIDTH`) to the tracker and the rules."""
        self._handlers[record[ev.KIND]](
            record[ev.SEQ], record[ev.GROUP], record[ev.CONTEXT], *record[ev.A : ev.A + 5]
        )  # fmt: skip

    def feed_all(self, records: Sequence[int]) -> None:
        """Shows flat records, one after the other."""
        handlers = self._handlers
        for kind, seq, _, _, group, _, context, a, b, c, d, e in zip(*[iter(records)] * ev.WIDTH, strict=True):
            handlers[kind](seq, group, context, a, b, c, d, e)

    def _compose(self, kind: int) -> Handler:
        name = ev.KINDS[kind]
        parts: list[Handler] = []
        if hasattr(self.tracker, name):
            parts.append(getattr(self.tracker, name))
        # At a step the rules look before the tracker turns the page.
        rules = [getattr(rule, name) for rule in (*self.rules, self.aftermath) if hasattr(rule, name)]
        parts = [*rules, *parts, self._turn_page] if kind == ev.STEP else [*parts, *rules]
        if not parts:
            return _nothing
        if len(parts) == 1:
            return parts[0]
        if len(parts) == 2:
            first, second = parts

            def two(seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
                first(seq, group, context, a, b, c, d, e)
                second(seq, group, context, a, b, c, d, e)

            return two
        if len(parts) == 3:
            one, other, last = parts

            def three(seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
                one(seq, group, context, a, b, c, d, e)
                other(seq, group, context, a, b, c, d, e)
                last(seq, group, context, a, b, c, d, e)

            return three
        every = tuple(parts)

        def many(seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
            for part in every:
                part(seq, group, context, a, b, c, d, e)

        return many

    def _turn_page(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._seen.clear()
        self.repeated.clear()

    def _report(self, violation: Violation) -> None:
        if self.latest and self.latest[-1].seq != violation.seq:
            self.latest.clear()
        self.latest.append(violation)
        key = (violation.rule, violation.group, violation.cause)
        if key in self._seen:
            self.repeated[key] = self.repeated.get(key, 1) + 1
            return
        self._seen.add(key)
        self._on_violation(violation)
