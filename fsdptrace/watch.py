"""Compares ranks while they train, through the default c10d store: who left the common order, and who stands still.

A thread of its own in every rank puts down what the rank did so far (one key per rank, overwritten) and reads one key of the
leader's, the lowest rank that still breathes. The leader reads all ranks' keys at once. When two checksums differ it asks the
two ranks, by its key, for the collectives around that place, and names the first one that differs. So there are as many keys
as ranks and a few more, and per period one write and one read per rank and one long read by the leader; the period grows with
the number of ranks, so that the store is asked about 1,000 times a second however many they are.

No collective, nothing on the training thread; on a TCPStore a connection of our own (torch 2.8 and newer). A store that is gone
ends the comparison and nothing else.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fsdptrace.checks import registry
from fsdptrace.checks.base import Violation
from fsdptrace.leading import Leader
from fsdptrace.places import place_of
from fsdptrace.standing import Movement, details, entered

if TYPE_CHECKING:
    from fsdptrace.session import Session

SHORTEST: Final = 0.25  # seconds between looks
FIRST_LOOKS: Final = 60  # looks of the first seconds, in which most runs that part ways do: taken more often in small jobs
RANKS_PER_SECOND: Final = 512  # so many ranks write and read in a second: the period of larger runs is longer
QUICKLY: Final = 0.05  # seconds between looks of a leader that waits for an answer
STUCK: Final = (
    0.3  # seconds in a collective after which it counts as issued: a call that turns out to need none is over by then
)
LEADERLESS: Final = 3.0  # seconds without a sign of the leader after which the next rank leads
AFTER_ERROR: Final = 3  # events that closing what an exception left takes at most
FAILURES: Final = 3  # store operations in a row that fail, after which the comparison ends
END_WAIT: Final = 0.5  # seconds that the end of the process waits for the store
FILE_LOOKS: Final = 2_000  # after so many looks a store that grows with every write is looked at less often
RULES: Final = ("rank-order", "rank-stall")

_claimed = threading.Lock()
_watches = 0


def period_of(world: int) -> float:
    """Seconds between looks in a job of ``world`` ranks."""
    return max(SHORTEST, world / RANKS_PER_SECOND)


class Watch:
    """One rank's part in the comparison. Only one session of a process takes part at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._movement = Movement(session)
        self._store: Any = None
        self._default = 0
        self._own = False
        self._prefix = ""
        self._period = period_of(session.identity.world_size)
        self._looks = self._failed = 0
        self._lead_seen: tuple[Any, float] = (None, 0.0)
        self._answered = self._told = 0
        self.leader: Leader | None = None
        self.rules = frozenset(rule.name for rule in registry.select(session.options.checks)) & set(RULES)

    def start(self) -> None:
        """Starts the thread, where there are other ranks and rules that want it; no-op when it runs."""
        global _watches
        if self._thread is None and self._session.identity.world_size > 1 and self.rules and _claimed.acquire(blocking=False):
            _watches += 1
            self._prefix = f"fsdptrace/{self._session.identity.attempt}.{_watches}/"
            self._thread = threading.Thread(target=self._run, name="fsdptrace-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, which says goodbye to the others; waits for the store no longer than :data:`END_WAIT`."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_WAIT)
            self._thread = None
            _claimed.release()

    # -- one rank ------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause()):
                if not self._attempt(self._look):
                    return
            self._attempt(self._say_goodbye)
        finally:
            self._store = None

    def _pause(self) -> float:
        if self.leader is not None and self.leader.waits:
            return min(QUICKLY, self._period)
        if self._looks < FIRST_LOOKS and self._period == SHORTEST:
            return QUICKLY
        if not self._own and self._looks > FILE_LOOKS:
            return self._period * (self._looks // FILE_LOOKS + 1)
        return self._period

    def _attempt(self, what: Any) -> bool:
        """False when it failed too often. What a store raises is nobody's business but ours."""
        try:
            what()
        except Exception:
            self._failed += 1
            self._store, self._default = None, 0
            return self._failed < FAILURES
        self._failed = 0
        return True

    def _connect(self) -> bool:
        from fsdptrace.adapters import store

        default = store.default_store()
        if default is None:
            self._store, self._default = None, 0
            return False
        if self._own and self._default == id(default):
            return True
        if not store.reaches_others(default):
            self._stop.set()
            return False
        self._store, self._own = store.own_connection(default)
        self._default = id(default)
        return True

    def _look(self) -> None:
        if not self._connect():
            return
        try:
            self._looks += 1
            self._session.ring.pump()
            rank = self._session.identity.rank
            state = self._state()
            self._put(str(rank), state)
            lead = self._read_lead()
            if self._leads(lead):
                self._lead(state, lead)
            elif lead is not None:
                self.leader = None
                self._follow(lead)
        finally:
            if not self._own:
                self._store = None  # the program's own: it lives as long as the program wants

    def _state(self) -> dict[str, Any]:
        """What the others are told of this rank."""
        session = self._session
        moved = self._movement.look()
        idle = (time.perf_counter_ns() - moved) / 1e9
        inside = entered(session)
        stuck = session.order.entered(inside) if idle >= STUCK else None
        steps = {number: step.step for number, step in session.ring.running.items()}
        step = steps.get(inside["model"], 0) if inside else steps.get(max(steps, default=0), 0)
        state: dict[str, Any] = {
            "beat": self._looks, "last": self._movement.last, "idle": round(idle, 1), "step": step,
            "groups": session.order.state(stuck),
        }  # fmt: skip
        if stuck is not None:
            model = session.models[inside["model"]] if inside else None
            params = [p.name for p in model.groups[inside["group"]].params] if model and inside and stuck[1].which else []
            state["stuck"] = [stuck[0], stuck[1].to_json(), params]
        if idle >= STUCK:
            known = details(session)
            state["place"], state["inside"] = place_of(inside, known.get("at"), session.models)
            state["code"] = known.get("stack", [""])[-1]
            state["held"] = sum(item["bytes"] for item in known["held"])
            error, seq = session.left_by
            if error and not inside and self._movement.last - seq <= AFTER_ERROR:
                state["place"] = f"after {error}"
        return state

    def _say_goodbye(self) -> None:
        if self._looks and self._connect():
            state = {**self._state(), "ended": self._session.ended_by or "in order", "exit": self._session.at_exit}
            self._put(str(self._session.identity.rank), state)

    # -- the store -----------------------------------------------------------------------------------------------------
    def _put(self, key: str, data: Any) -> None:
        self._store.set(self._prefix + key, zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1))

    def _get(self, key: str) -> Any:
        """What lies under ``key``, None for nothing: asked first, for a store waits for a key that is not there."""
        key = self._prefix + key
        return _read(self._store.get(key)) if self._store.check([key]) else None

    def get_all(self, ranks: list[int]) -> dict[int, Any]:
        """What the given ranks, whose keys are known to be there, say."""
        keys = [f"{self._prefix}{rank}" for rank in ranks]
        if self._store.has_extended_api():
            return dict(zip(ranks, map(_read, self._store.multi_get(keys)), strict=True))
        return {rank: _read(self._store.get(key)) for rank, key in zip(ranks, keys, strict=True)}

    def present(self, ranks: list[int]) -> list[int]:
        """Which of ``ranks`` have said anything: one question where all or none have, a few where some have."""
        if not ranks or self._store.check([f"{self._prefix}{rank}" for rank in ranks]):
            return ranks
        if len(ranks) == 1:
            return []
        half = len(ranks) // 2
        return [*self.present(ranks[:half]), *self.present(ranks[half:])]

    # -- who leads -----------------------------------------------------------------------------------------------------
    def _read_lead(self) -> Any:
        lead = self._get("lead")
        sign = (lead["rank"], lead["beat"]) if lead is not None else None
        if self._lead_seen[0] != sign or not self._lead_seen[1]:
            self._lead_seen = (sign, time.monotonic())
        return lead

    def _leads(self, lead: Any) -> bool:
        """The lowest rank that breathes: a lower one that shows itself takes over, a higher one when the leader is silent."""
        rank = self._session.identity.rank
        if lead is not None and lead["rank"] >= rank:
            return True
        if lead is None and rank == 0:
            return True
        patience = max(LEADERLESS, 4 * self._period) + rank * self._period
        return time.monotonic() - self._lead_seen[1] > patience

    def _lead(self, state: dict[str, Any], lead: Any) -> None:
        session = self._session
        if self.leader is None:
            told = list(lead.get("told", ())) if lead else []
            self.leader = Leader(session.identity.rank, session.identity.world_size, session.options.stall_seconds, told)
            self._told = lead.get("found", {}).get("id", 0) if lead else 0
        leader = self.leader
        states = self.get_all(leader.known(self.present))
        states[session.identity.rank] = state
        answers = {rank: self._get(f"answer/{rank}") for rank in leader.asked}
        if session.identity.rank in answers:
            answers[session.identity.rank] = self._answer(leader.question)
        leader.look(states, answers)
        said = leader.to_say()
        self._put("lead", {"rank": session.identity.rank, "beat": self._looks, **said})
        if "rank-stall" in self.rules and (stall := leader.take_stall()) is not None:
            self._report(replace(stall, model=session.order.newest(stall.cause)))
        self._note_found(said, leads=True)

    def _follow(self, lead: dict[str, Any]) -> None:
        question = lead.get("ask")
        rank = self._session.identity.rank
        if question and question["id"] != self._answered and rank in question["ranks"]:
            self._answered = question["id"]
            self._put(f"answer/{rank}", self._answer(question))
        self._note_found(lead, leads=False)

    def _answer(self, question: Any) -> dict[str, Any]:
        order = self._session.order
        inside = entered(self._session)
        stuck = order.entered(inside) if (time.perf_counter_ns() - self._movement.moved) / 1e9 >= STUCK else None
        excerpt = order.excerpt(question["group"], question["label"], question["start"], question["stop"], stuck)
        return {"id": question["id"], **excerpt, "params": order.params(excerpt["table"])}

    def _note_found(self, lead: dict[str, Any], leads: bool) -> None:
        """What the leader found is recorded by the ranks that it names, and said by the leader."""
        found = lead.get("found")
        if not found or found["id"] == self._told:
            return
        self._told = found["id"]
        if "rank-order" not in self.rules:
            return
        from fsdptrace.checks.rank_order import Side, parted

        sides = (Side.from_json(found["sides"][0]), Side.from_json(found["sides"][1]))
        rank = self._session.identity.rank
        mine = next((i for i, side in enumerate(sides) if side.ranks[0] == rank), None)
        if mine is None and not leads:
            return
        model, group = self._session.order.where(found["group"], found["label"], sides[mine or 0].item)
        self._report(parted(sides, found["group"], mine or 0, model, group), say=leads)

    def _report(self, violation: Violation, say: bool = True) -> None:
        self._session.found(violation, say)


def _read(raw: Any) -> Any:
    return json.loads(zlib.decompress(raw))
