"""``order-changed``: units run in another order than in the first steps."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace.checks.base import Rule, Violation

LEARNED = 3
"""Steps in which the order is learned."""


class OrderChanged(Rule):
    name: ClassVar[str] = "order-changed"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = "the order of groups in a forward differs from the order learned in the first steps"
    explanation: ClassVar[str] = (
        "Prefetch lists (`set_modules_to_forward_prefetch`) fit one order, and ranks whose units run in different orders wait for each "
        "other's collectives for ever. FSDP2 itself follows each forward anew. The order is that of forwards with grad, by root; "
        "units that are left out, or that come in between, change nothing. A root whose order varies in the first three steps is not "
        "looked at; a new order is said once."
    )
    example: ClassVar[str] = "x = self.b(self.a(x)) if step < 100 else self.a(self.b(x))"
    mend: ClassVar[str] = (
        "Make the order depend on nothing that can differ between ranks; where it is meant to change, set the prefetch lists anew."
    )
    silent: ClassVar[str] = (
        "layers that are dropped, experts without tokens, orders that vary from the start, eval passes, recomputation"
    )
    cost: ClassVar[str] = "one comparison per outermost forward"

    def configure(self, options: Any) -> None:
        self._known: dict[int, set[tuple[int, ...]]] = {}
        self._place: dict[int, dict[int, int]] = {}
        self._since: dict[int, int] = {}
        self._varies: set[int] = set()

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        tracker = self.tracker
        order = tuple(tracker.order)
        if len(order) < 2 or not b or order in self._known.get(a, ()) or tracker.broken or a in self._varies:
            return
        known = self._known.setdefault(a, set())
        if not known:
            self._since[a] = tracker.step_number
        if len(known) < 64:
            known.add(order)
        once = list(dict.fromkeys(order))
        place = self._place.setdefault(a, {})
        pair = self._out_of_place(once, place)
        if pair is None:
            self._learn(once, place)
        elif tracker.step_number - self._since[a] < LEARNED:
            self._varies.add(a)
        else:
            self._say(seq, a, *pair)
            place.clear()
            self._learn(once, place)

    @staticmethod
    def _out_of_place(order: list[int], place: dict[int, int]) -> tuple[int, int] | None:
        before = -1
        for group in order:
            if group in place:
                if before >= 0 and place[group] < place[before]:
                    return before, group
                before = group
        return None

    @staticmethod
    def _learn(order: list[int], place: dict[int, int]) -> None:
        """Puts groups that are new behind the one that ran before them."""
        line = sorted(place, key=lambda group: place[group])
        at = 0
        for group in order:
            if group in place:
                at = line.index(group) + 1
            else:
                line.insert(at, group)
                at += 1
        place.update({group: index for index, group in enumerate(line)})

    def _say(self, seq: int, unit: int, first: int, second: int) -> None:
        tracker = self.tracker
        one, other = tracker.groups[first], tracker.groups[second]
        root = tracker.map.units[unit].fqn or "(root)"
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, one.id, one.fqn, tracker.step_number,
                f"in the forward of {root} (event {seq}) {one.name} ran before {other.name}; in the first steps it was the other way round.",
                "Where it is meant, set prefetch lists anew (set_modules_to_forward_prefetch); if it depends on data, see that all ranks "
                "take the same way, since their collectives must come in one order.",
                (one.ran, seq), 0, "order",
            )
        )  # fmt: skip
