"""The state of a model that its events imply: what is open, pending, in use, over. One per recorded model.

Rules, the heartbeat, the summary of a step and the notes on exceptions all read it. It sees every event once, in order,
online or from a file, and knows nothing but events and the model map.
"""

from __future__ import annotations

from fsdptrace import events as ev
from fsdptrace.checks.regions import RegionTracker
from fsdptrace.checks.state import ALL_SYNC, RESHARD_AFTER_FORWARD, GroupState, Told
from fsdptrace.model_map import ModelMap, usual_flags

_BACKWARD_PASSES = (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)
_IMPLICIT = ev.MODES.index("implicit")
_MANY_GATHERS = 60_000  # integers in Tracker.gathers


class Tracker:
    """State of one model. The methods named after kinds take an event's integers.

    Attributes:
        map: the model map.
        release: of torch, as ``(2, 13)``: what a hint may name.
        texts: the strings that events refer to by number.
        groups: one :class:`GroupState` per group.
        step: number of the running step.
        held, peak: bytes open or pending now, and their peak since the last step boundary.
        broken: an exception left FSDP2 half way, and neither a backward that ended nor reset_iter_state came since.
        midway: recording began when forwards had run whose backward was to come (or eval passes), until a backward ended.
        past, past_peak: of these, bytes of groups whose backward is over (they wait for nobody), now and at most.
        backward: number of the running or last backward.
        in_backward: an event of a backward that has not ended was seen.
        allocated, grown: bytes of the accelerator's allocator as last seen in the running step, 0 before, and by how much they
            had grown when they were read at a group's hook, by group.
        regions: checkpointed regions.
        order: groups in the order in which the last forward with grad ran them, each time that it did.
        gathers: of the running step, flat: ``seq``, group and packed how of each gather, and ``seq``, group and -1 of each change
            of a group's shards; :class:`~fsdptrace.checks.repeated_gather.RepeatedGather` adds forwards, and reads it.
        told: what the rules want to be told of.
    """

    def __init__(self, model_map: ModelMap, release: tuple[int, int] = (2, 13), texts: ev.Texts | None = None) -> None:
        self.map = model_map
        self.release = release
        self.texts = texts or ev.Texts()
        self.regions = RegionTracker(frozenset(group.id for group in model_map.groups if len(group.modules) > 1))
        self.told = Told()
        self.gathers: list[int] = []
        self._dtypes = [ev.DTYPE_NUMBER.get(group.dtype, 0) for group in model_map.groups]
        self.order: list[int] = []
        self._order: list[int] = []
        self.groups = [GroupState(group.id, group.fqn, usual_flags(group)) for group in model_map.groups]
        self.step_number = 0
        self.allocated = 0
        self.grown: dict[int, int] = {}
        self.held = 0
        self.peak = 0
        self.past = 0
        self.past_peak = 0
        self.broken = False
        self.midway = False
        self.backward_number = 0
        self.in_backward = False
        self._root_of = [_root_of(model_map, group.unit) for group in model_map.groups]
        self._began: dict[int, int] = {}  # the group that ran first in the running forward, by root
        self._last: dict[int, int] = {}  # and the one that ran last so far
        self.post_forward_worlds = [max(1, group.post_forward_world) for group in model_map.groups]

    # -- questions -----------------------------------------------------------------------------------------------------
    def past_backward(self) -> list[GroupState]:
        """Groups that are open or pending although their last backward is over and no use is outstanding."""
        return [g for g in self.groups if (g.open or g.pending) and g.over and not g.uses and not g.paused]

    def name(self, group: int) -> str:
        """How ``group`` is called in a message."""
        return self.groups[group].name if group >= 0 else "a unit without parameters"

    def asked_by(self, how: int, issuer: int, call: str = "unshard()") -> str:
        """Who asked for a gather, for a message: a prefetch and its source, the user's ``call``, or the group's own hook."""
        _, direction, mode = ev.unpack_how(how)
        if direction:
            return f"the {mode} {direction} prefetch of {self.name(issuer)}"
        return f"a call of {call}" if mode == "manual" else "its own hook"

    def by_leftover(self, issuer: int, how: int, target: int) -> bool:
        """Whether a prefetch is due to what an earlier pass left in the post-forward order list.

        The group that ran first in its root's forward has nothing before it in the list, so that its implicit backward
        prefetch, unless a recomputation put it in the list again, finds the last group of an earlier pass. So does one that
        finds a group of another root (``share_comm_ctx``), and whatever a recording sees that began in the middle of a step.
        """
        if how // ev.MODE_UNIT != _IMPLICIT:
            return False
        if issuer < 0 or self.midway or self._root_of[issuer] != self._root_of[target]:
            return True
        state = self.groups[issuer]
        return state.began and not state.rejoined

    def is_over(self, group: GroupState) -> bool:
        """Whether the group's backward is over in the running backward, with no use or recomputation to come."""
        return group.over_in == self.backward_number and not group.uses and not group.paused

    # -- events --------------------------------------------------------------------------------------------------------
    def unshard(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if e % 4:
            return
        state = self.groups[group]
        state.pending = True
        state.bytes = a
        state.opened = seq
        state.opened_how = e
        state.opened_by = d
        state.opened_step = self.step_number
        state.used = False
        state.closed_by = 0
        self.gathers += (seq, group, e)
        if c != self._dtypes[group]:
            self.told.other_dtype(seq, group, c)
        if not state.smaller:
            state.gathered = seq
            state.gathered_step = self.step_number
        self.held = held = self.held + a
        if held > self.peak:
            self.peak = held
        # As is_over() has it, without the call: this runs for every gather.
        if state.over_in == self.backward_number and self.in_backward and not state.uses and not state.paused:
            self._lies_past(state)
            self.told.late_gather(seq, state, context, e)

    def wait(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.regions.runs += (seq, ~group)
        state = self.groups[group]
        state.pending = False
        state.open = True

    def reshard(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.groups[group]
        state.freed = seq
        state.smaller = b == 1
        if state.past:
            self.past -= state.past
            state.past = 0
        state.freed_cause = c
        if state.open:
            state.open = False
            self.held -= state.bytes
        if context % 4 == ev.PASS_RECOMPUTE and not b and state.training == 1:
            state.rejoined = True
        if not state.used and a:
            self.told.freed_unused(seq, state, c)

    def discard(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.groups[group]
        if state.pending:
            state.pending = False
            self.held -= state.bytes
        if state.past:
            self.past -= state.past
            state.past = 0

    def pre_forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.regions.runs += (seq, group)
        state = self.groups[group]
        state.used = True
        state.training = b
        if state.past:  # used after all
            self.past -= state.past
            state.past = 0
        if not state.open or a not in self.told.before_forward[context % 4]:
            self.told.odd_forward(seq, state, context, a, b)
        if a == 1:  # a further module of a grouped unit
            return
        if d == 1 and c != 3:
            state.input_grad = c
        if state.changed > state.gathered and context % 4 != ev.PASS_RECOMPUTE:
            self.told.stale_use(seq, group, context)
        if context % 4 == ev.PASS_RECOMPUTE:
            if d == 1 and state.paused and a != 2:
                state.paused -= 1
                state.uses += 1
        elif d == 1:
            self._order.append(group)
            state.ran = seq
            state.uses += 1
            state.over = 0
        elif d == 2:
            state.paused += 1
            state.over = 0

    def post_forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.groups[group]
        state.training = b
        recompute = context % 4 == ev.PASS_RECOMPUTE
        if a == 1 and state.open:
            state.closed_by = ev.POST_FORWARD
            state.closed_in_grad = bool(state.uses or recompute)
        if a not in self.told.after_forward[context % 4]:
            self.told.odd_order("post_forward", seq, state, context, a)
        if a != 1 or recompute:
            return
        if state.open is not (state.flags & RESHARD_AFTER_FORWARD == 0):
            self.told.other_policy(seq, state, context)
        root = self._root_of[group]
        state.began = self._began.setdefault(root, group) == group
        state.previous = self._last.get(root, ev.NONE)
        self._last[root] = group

    def pre_backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if not self.in_backward:
            self._begin_backward()
        state = self.groups[group]
        state.used = True
        if state.past:
            self.past -= state.past
            state.past = 0
        state.touched = True
        state.training = b
        if state.uses:
            state.uses -= 1
        if a not in self.told.before_backward[context % 4]:
            self.told.odd_order("pre_backward", seq, state, context, a)

    def post_backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.groups[group]
        state.training = b
        state.grads = d
        if state.touched:
            state.late = c == 1
            if state.late and d:
                self.told.late_reduction(seq, state)
        else:
            state.late = False
            if d and context % 4 in _BACKWARD_PASSES:
                self.told.lost_gradient(seq, state)
        if d:  # gradients kept from earlier backwards are among them
            state.held_back = 0 if state.flags & 3 == 3 else seq
            state.held_back_flags = state.flags
        if state.open:
            state.closed_by = ev.POST_BACKWARD
        if not self.in_backward:
            if context % 4 not in _BACKWARD_PASSES:
                return
            self._begin_backward()
        if state.touched and not state.uses and not state.paused and state.over_in != self.backward_number:
            state.over = seq
            state.over_in = self.backward_number
            if state.open:
                self._lies_past(state)

    def _lies_past(self, state: GroupState) -> None:
        """The group's copy is held although its backward is over."""
        state.past = state.bytes
        self.past += state.bytes
        self.past_peak = max(self.past_peak, self.past)

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if not e and self.map.units[a].sharded:  # its list was empty: nothing of an earlier pass
            for first in self._began.values():
                self.groups[first].began = False
        if len(self.gathers) > _MANY_GATHERS:  # nobody reads them
            self.gathers.clear()
        self._began.clear()
        self._last.clear()
        self.order, self._order = self._order, []
        self.regions.shorten()

    def region(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.regions.region(seq, self.texts.get(e), context, self.step_number)

    def recompute(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.regions.recompute(seq)

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.in_backward = False
        for state in self.groups:
            state.touched = False
            state.rejoined = False
            state.late = False
            if b:
                state.training = 4
        if b:
            self.broken = False
            self.midway = self.midway and not a

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.broken = True

    def _begin_backward(self) -> None:
        self.in_backward = True
        self.backward_number += 1

    def state(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.groups[group]
        if state.open or state.pending:
            self.held -= state.bytes
        self.past -= state.past
        state.past = 0
        self.broken = False
        self.midway = self.midway or (d > 0 and not self.backward_number)
        state.open = a == 3
        state.pending = bool(b)
        state.smaller = a == 2
        if state.open or state.pending or state.smaller:
            state.gathered = seq
            state.gathered_step = self.step_number
        state.held_back = 0
        state.training = c
        if state.open or state.pending:
            state.bytes = e
            state.opened = state.opened or seq
            state.used = state.open  # for all that is known: a forward before the recording began may have opened it
            self.held += e
            self.peak = max(self.peak, self.held)
        state.uses = state.paused = 0
        state.over = 0
        state.over_in = -1
        state.touched = False

    def param_change(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.groups[group]
        state.changed = seq
        state.changed_by = a
        self.gathers += (seq, group, -1)
        if state.open:
            self.told.changed_open(seq, state, a)
        if state.pending:
            self.told.changed_pending(seq, state)
        if not a:
            if state.held_back or c or d or self.in_backward:
                self.told.stepped_oddly(seq, state, c, d)
            if state.flags & ALL_SYNC != ALL_SYNC:
                self.told.stepped_switched(state)

    def flag(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if group >= 0:
            state = self.groups[group]
            state.flags = state.flags | 1 << a if b else state.flags & ~(1 << a)

    def memory(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if self.allocated and a > self.allocated:
            self.grown[group] = self.grown.get(group, 0) + a - self.allocated
        self.allocated = a

    def step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.step_number += 1
        self.allocated = 0
        self.gathers.clear()
        self.grown.clear()
        self.past_peak = self.past
        self.peak = self.held
        self.regions.end_step(self.step_number)
        for state in self.groups:
            # What nobody came back for in a whole step will not come: heads that had no backward, an aborted pass.
            state.uses = state.paused = 0


def _root_of(model_map: ModelMap, unit: int) -> int:
    """The outermost FSDP module that ``unit`` lies in: what is its root unless it runs by itself first."""
    fqn = model_map.units[unit].fqn
    above = [u for u in model_map.units if u.sharded and (not u.fqn or fqn == u.fqn or fqn.startswith(f"{u.fqn}."))]
    return min(above, key=lambda u: len(u.fqn), default=model_map.units[unit]).id
