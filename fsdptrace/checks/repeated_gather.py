"""``repeated-gather``: a unit that is called by itself again and again is gathered anew each time for nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.text import count, size

_MANUAL = ev.MODES.index("manual")
_USUAL = 2  # one for a forward, one for its backward
_FORWARD = -2  # in Tracker.gathers
_MANY = 30_000  # integers in it that are looked at before the step ends


class RepeatedGather(Rule):
    name: ClassVar[str] = "repeated-gather"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = (
        "a group is gathered more often than once, plus once per further use and recomputation that needed it closed in between"
    )
    explanation: ClassVar[str] = (
        "A unit below the root that is called by itself several times in a row (a head called per chunk of the sequence, each "
        "with its own backward) is freed after each call and gathered again for the next, though nothing else needed the "
        "memory in between and its parameters have not changed. One gather would do. Said as a cost, at the step."
    )
    example: ClassVar[str] = (
        "h = model(x)\n"
        "for chunk in h.detach().requires_grad_().chunk(8):\n"
        "    model.head(chunk).sum().backward()      # head is gathered 16 times"
    )
    mend: ClassVar[str] = (
        "Around the loop: `unit.set_requires_gradient_sync(False)`, `unit.set_reshard_after_backward(False)` and, on torch "
        "2.8 and newer, `unit.set_reshard_after_forward(False)`; before the last chunk set the first two back to True."
    )
    silent: ClassVar[str] = (
        "micro-batches through the whole model, a unit used several times within one forward, a model whose only unit it is, "
        "gathers that you call for yourself (`unit.unshard()` around the loop, as torchtitan's chunked loss has it)"
    )
    cost: ClassVar[str] = "a few comparisons per gather and outermost forward"

    def configure(self, options: Any) -> None:
        self._run: list[int] = []  # gathers of one group, with none by another group's own hook in between
        self._by_hand = 0  # those of them that the user called for: a loop of the user's own making
        self._calls = 0  # outermost forwards of its own unit in that row
        self._last = -1
        self._worst: dict[int, tuple[list[int], int]] = {}
        self._covered: set[int] = set()
        self._forwards: Counter[int] = Counter()  # outermost forwards in the step, by unit
        self._long = False  # a part of the step was looked at before it ended

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._forwards[a] += 1
        gathers = self.tracker.gathers
        gathers += (seq, a, _FORWARD)
        if len(gathers) > _MANY:
            self._long = True
            self._replay()

    def _replay(self) -> None:
        """What was noted of the step, in order. Only in a step in which a unit was called by itself again, beside another one,
        is there anything to find."""
        gathers = self.tracker.gathers
        if self._long or (len(self._forwards) > 1 and max(self._forwards.values()) > 1):
            for seq, number, how in zip(*[iter(gathers)] * 3, strict=True):
                if how == _FORWARD:
                    self._called(number)
                elif how >= 0:
                    self._gathered(seq, number, how)
                elif number == self._last:  # its shards changed: what is gathered from now on is new
                    self._close()
        gathers.clear()

    def _gathered(self, seq: int, group: int, how: int) -> None:
        # 0 is a gather by the group's own hook, which is used at once. A prefetch may be for nothing.
        if group != self._last:
            if how:
                return
            self._close()
            self._last = group
        self._run.append(seq)
        self._by_hand += how // ev.MODE_UNIT == _MANUAL

    def _called(self, number: int) -> None:
        unit = self.tracker.map.units[number]
        own = set(unit.groups)
        if self._last in own:
            self._calls += 1
        else:
            # A forward of the unit's ancestor: being called by itself as well is then what makes the unit special.
            prefix = f"{unit.fqn}." if unit.fqn else ""
            self._covered.update(g.id for g in self.tracker.map.groups if g.fqn.startswith(prefix) and g.id not in own)

    def step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._replay()
        self._forwards.clear()
        self._long = False
        self._close()
        for number, (gathers, calls) in self._worst.items():
            if number in self._covered:
                self._say(number, gathers, calls)
        self._worst.clear()
        self._covered.clear()

    def _close(self) -> None:
        if self._last >= 0 and len(self._run) - self._by_hand > _USUAL and self._calls > 1:
            gathers, calls = self._worst.get(self._last, ([], 0))
            self._worst[self._last] = (gathers + self._run, calls + self._calls)
        self._run = []
        self._calls = self._by_hand = 0
        self._last = -1

    def _say(self, group: int, seqs: list[int], calls: int) -> None:
        tracker = self.tracker
        state = tracker.groups[group]
        info = tracker.map.groups[group]
        gathers = len(seqs)
        wasted = (gathers - 1) * info.bytes
        wire = (gathers - 1) * info.bytes // max(1, info.world) * (info.world - 1)
        name = state.name
        keeps = (
            f"{name}.set_reshard_after_forward(False)"
            if self.since(2, 8)
            else f"fully_shard({name}, reshard_after_forward=False)"
        )
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"{name} was gathered {gathers} times in {count(calls, 'call')} of its own (last at event {seqs[-1]}) with nothing "
                f"else gathered in between; expected 1. The others gathered {size(wasted)} again, {size(wire)} of it over the "
                "wire on this rank.",
                f"Around those calls: {name}.set_requires_gradient_sync(False) and {name}.set_reshard_after_backward(False), both "
                f"back to True before the last call; and {keeps} keeps it open after the calls themselves.",
                (*seqs[:7], seqs[-1]) if gathers > 8 else tuple(seqs), wasted, "calls",
            )
        )  # fmt: skip
