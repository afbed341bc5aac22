"""What the leading rank makes of what all ranks say: who left the common order, who stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fsdptrace.checks.base import Violation
from fsdptrace.checks.rank_order import Side
from fsdptrace.model_map import ranks_of
from fsdptrace.parting import Marks, differ, parting
from fsdptrace.places import Standing, grouped, ranks_text
from fsdptrace.rank_order import LAST, Item

ANSWER_WAIT: Final = 3.0  # seconds that the leader waits for an answer
SILENT: Final = 5.0  # seconds without a new word after which a rank is said not to breathe
GONE_WAIT: Final = 1.0  # seconds that a rank has waited for one that has ended before it is said
LOOK_FOR_MISSING: Final = 5.0  # seconds between questions for ranks that have not said anything yet
TRIES: Final = 5  # questions about one process group that led nowhere


@dataclass(slots=True)
class _Seen:
    """What the leader knows of a rank: its last words, and when, on the leader's clock, it last breathed and last moved."""

    state: dict[str, Any]
    breathed: float
    moved: float


class Leader:
    """The leading rank's view.

    Args:
        rank, world: of the leader.
        stall_seconds: when a standstill is said.
        told: what a leader before has said already.
        clock: seconds.
    """

    def __init__(
        self, rank: int, world: int, stall_seconds: float, told: list[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank = rank
        self.world = world
        self.question: dict[str, Any] | None = None
        self._stall_seconds = stall_seconds
        self._told = set(told)
        self._clock = clock
        self._seen: dict[int, _Seen] = {}
        self._present: list[int] = []
        self._searched = -LOOK_FOR_MISSING
        self._began = clock()
        self._asked_at = 0.0
        self._ids = int(time.time()) % 1_000_000 * 1000  # a leader that takes over numbers on from elsewhere
        self._tries: dict[str, int] = {}
        self._found: dict[str, Any] | None = None
        self._stall: Violation | None = None

    # -- for the thread ------------------------------------------------------------------------------------------------
    @property
    def waits(self) -> bool:
        """Whether an answer is awaited."""
        return self.question is not None

    @property
    def asked(self) -> list[int]:
        """Ranks whose answers are awaited."""
        return list(self.question["ranks"]) if self.question else []

    def known(self, present: Callable[[list[int]], list[int]]) -> list[int]:
        """Other ranks whose words can be read. Those that have said nothing yet are asked for at every look in the first
        seconds, then now and then."""
        now = self._clock()
        if len(self._present) < self.world - 1:
            early = now - self._began < 4 * LOOK_FOR_MISSING and self.world <= 64
            if early or now - self._searched >= LOOK_FOR_MISSING:
                self._searched = now
                have = {*self._present, self.rank}
                self._present += present([rank for rank in range(self.world) if rank not in have])
        return sorted(self._present)

    def to_say(self) -> dict[str, Any]:
        """What all ranks are told: a question, the newest finding, what was said already."""
        out: dict[str, Any] = {"told": sorted(self._told)[:64]}
        if self.question:
            out["ask"] = self.question
        if self._found:
            out["found"] = self._found
        return out

    def take_stall(self) -> Violation | None:
        """A standstill that was found and not yet taken."""
        stall, self._stall = self._stall, None
        return stall

    def look(self, states: Mapping[int, dict[str, Any]], answers: Mapping[int, Any]) -> None:
        """All ranks' newest words, and the answers to the question that is out."""
        now = self._clock()
        for rank, state in states.items():
            seen = self._seen.get(rank)
            if seen is None:
                self._seen[rank] = _Seen(state, now, now - float(state.get("idle", 0)))
                continue
            if state["beat"] != seen.state["beat"]:
                seen.breathed = now
            if state["last"] != seen.state["last"]:
                seen.moved = now
            seen.state = state
        if self.question is not None:
            self._take_answers(answers, now)
        if self.question is None:
            self._compare(now)
        self._stalls(now)

    # -- rank-order ----------------------------------------------------------------------------------------------------
    def _sequences(self) -> dict[tuple[str, str], dict[int, Marks]]:
        out: dict[tuple[str, str], dict[int, Marks]] = {}
        for rank in sorted(self._seen):
            for name, sequences in self._seen[rank].state["groups"].items():
                for label, count, marks in sequences:
                    out.setdefault((name, label), {})[rank] = Marks(label, count, marks)
        return out

    def _compare(self, now: float) -> None:
        for (name, label), marks in self._sequences().items():
            key = f"{name} {label}"
            if key in self._told or self._tries.get(key, 0) >= TRIES or len(marks) < 2:
                continue
            first, *others = marks
            apart = [(window, rank) for rank in others if (window := differ(marks[first], marks[rank])) is not None]
            if apart:
                window, other = min(apart)
                self._differ(name, label, marks, (first, other), window, now)
                return

    def _differ(
        self, name: str, label: str, marks: Mapping[int, Marks], pair: tuple[int, int], window: tuple[int, int], now: float
    ) -> None:
        """Two checksums differ: the collectives are known at once where both ranks are stuck in them, else they are asked
        for."""
        start, stop = window
        a, b = (self._stuck(rank, name) for rank in pair)
        if a is not None and b is not None and stop == start + 1 and all(marks[rank].count == stop for rank in pair):
            self._say(name, label, marks, (a, b))
            return
        self._ids += 1
        self.question = {"id": self._ids, "group": name, "label": label, "start": start, "stop": stop, "ranks": list(pair)}
        self._asked_at = now

    def _stuck(self, rank: int, name: str) -> Side | None:
        state = self._seen[rank].state
        stuck = state.get("stuck")
        return Side((rank,), Item(*stuck[1]), tuple(stuck[2]), state["step"], 0) if stuck and stuck[0] == name else None

    def _take_answers(self, answers: Mapping[int, Any], now: float) -> None:
        question = self.question
        assert question is not None
        name, label = question["group"], question["label"]
        got = [answer for rank in question["ranks"] if (answer := answers.get(rank)) and answer["id"] == question["id"]]
        if len(got) < 2:
            if now - self._asked_at > ANSWER_WAIT:
                self._nowhere(f"{name} {label}")
            return
        found = parting(got[0], got[1])
        marks = self._sequences().get((name, label), {})
        if found is None or not set(question["ranks"]) <= marks.keys():
            self._nowhere(f"{name} {label}")
            return
        self.question = None
        a, b = question["ranks"]
        self._say(
            name, label, marks,
            (
                Side((a,), found.mine, tuple(got[0]["params"].get(found.mine.fqn, ())), found.my_step, found.my_seq),
                Side((b,), found.other, tuple(got[1]["params"].get(found.other.fqn, ())), found.other_step, found.other_seq),
            ),
        )  # fmt: skip

    def _nowhere(self, key: str) -> None:
        self.question = None
        self._tries[key] = self._tries.get(key, 0) + 1

    def _say(self, name: str, label: str, marks: Mapping[int, Marks], sides: tuple[Side, Side]) -> None:
        """A finding, with all ranks that are known to be on either side."""
        full = []
        for side, opposite in (sides, sides[::-1]):
            rank, against = side.ranks[0], opposite.ranks[0]
            mine, theirs = marks[rank], marks[against]
            like = [
                other
                for other, its in marks.items()
                if other not in (rank, against) and differ(mine, its) is None and differ(theirs, its) is not None
            ]
            full.append(Side((rank, *sorted(like)), side.item, side.params, side.step, side.seq))
        self._ids += 1
        self._told.add(f"{name} {label}")
        self._found = {"id": self._ids, "group": name, "label": label, "sides": [side.to_json() for side in full]}

    # -- rank-stall ----------------------------------------------------------------------------------------------------
    def _stalls(self, now: float) -> None:
        names = dict.fromkeys(name for seen in self._seen.values() for name in seen.state["groups"])
        for name in names:
            members = [rank for rank in ranks_of(name) if rank in self._seen]
            live = [rank for rank in members if self._ending(rank, now) == ""]
            if not live:
                continue
            key = f"stall {name} {max(self._seen[rank].state['last'] for rank in live)}"
            if key in self._told:
                continue
            idle = min(now - self._seen[rank].moved for rank in live)
            inside = [rank for rank in live if (self._seen[rank].state.get("stuck") or [""])[0] == name]
            ended = [rank for rank in members if self._seen[rank].state.get("exit")]
            groups = [self._seen[rank].state["groups"] for rank in members]
            counts = {group[name][0][1] for group in groups if name in group}
            if inside and ended and idle >= GONE_WAIT:
                self._tell_stall(key, "error", name, now, f"{ranks_text(ended)} ended and will not come", idle)
            elif idle >= self._stall_seconds and (inside or len(counts) > 1 or len(live) < len(members)):
                self._tell_stall(key, "error", name, now, f"no rank has moved for {idle:.0f} s", idle)
                self._ask_the_slowest(name, now)
            elif idle >= self._stall_seconds:
                said = f"no rank has moved for {idle:.0f} s, all at the same place outside of collectives"
                self._tell_stall(key, "info", name, now, said, idle)

    def _ask_the_slowest(self, name: str, now: float) -> None:
        """Ranks that stand still may have parted after the last position whose checksum both know."""
        sequences = [(label, marks) for (own, label), marks in self._sequences().items() if own == name]
        if self.question is not None or not sequences:
            return
        label, marks = sequences[-1]
        slow, fast = min(marks, key=lambda rank: marks[rank].count), max(marks, key=lambda rank: marks[rank].count)
        ahead = marks[fast].count - marks[slow].count
        if ahead >= LAST and f"{name} {label}" not in self._told:
            start = max(0, marks[slow].count - 4 * ahead)
            self._ids += 1
            self.question = {
                "id": self._ids, "group": name, "label": label, "start": start, "stop": marks[slow].count,
                "ranks": [slow, fast],
            }  # fmt: skip
            self._asked_at = now

    def _ending(self, rank: int, now: float) -> str:
        seen = self._seen[rank]
        ended = seen.state.get("ended")
        if ended:
            return "ended in order" if ended == "in order" else f"ended by {ended}"
        if now - seen.breathed > SILENT:
            return f"has not breathed for {now - seen.breathed:.0f} s"
        return ""

    def standings(self, now: float) -> list[Standing]:
        """Where every rank that has said anything stands."""
        out = []
        for rank, seen in sorted(self._seen.items()):
            state = seen.state
            place = state.get("place") or "moving"
            out.append(
                Standing(
                    rank, state["step"], place, bool(state.get("inside")), now - seen.moved, self._ending(rank, now),
                    state.get("code", ""), state.get("held", -1),
                )
            )  # fmt: skip
        return out

    def _tell_stall(self, key: str, severity: str, name: str, now: float, said: str, idle: float) -> None:
        self._told.add(key)
        lines = [str(group) for group in grouped(self.standings(now))]
        silent = [rank for rank in ranks_of(name) if rank not in self._seen]
        if silent:
            lines.append(f"{ranks_text(silent)}: not recorded")
        step = self._seen[self.rank].state["step"]
        process_group, _, ranks = name.rpartition(":")
        self._stall = Violation(
            "rank-stall", severity, 0, None, "", step,
            f"{said} in process group {process_group} of ranks {ranks}: {'; '.join(lines)}.",
            "Look at the rank that is not in the collective: the others wait for it. `fsdptrace postmortem` shows the same "
            "from the files, and py-spy dump --pid its whole stack.",
            (), 0, name,
        )  # fmt: skip
