"""What the events say of one param group, and what rules are told of: the parts of the tracker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdptrace import events as ev
from fsdptrace.model_map import show_name

ALL_SYNC = 7
SYNC, ALL_REDUCE, RESHARD_AFTER_BACKWARD, RESHARD_AFTER_FORWARD, UNSHARD_IN_BACKWARD = 1, 2, 4, 8, 16
"""Bits of ``GroupState.flags``, in the order of :data:`fsdptrace.events.FLAGS`."""


class GroupState:
    """What the events say of one param group.

    Attributes:
        open, pending: the parameters are unsharded; a gather was issued and not waited for.
        bytes: size of the copy that is open or pending (or was last).
        opened: ``seq`` of the unshard that made it, ``opened_how`` its packed how, ``opened_by`` its issuer,
            ``opened_step`` its step.
        used: the copy has been computed with: a forward or a pre-backward came after it.
        uses: forwards with grad minus pre-backwards: how often its backward is still to come.
        paused: forwards under a paused grad mode whose recomputation is to come (reentrant checkpointing).
        over: ``seq`` of the post-backward after which no use was outstanding, 0 before; ``over_in`` the number of the
            backward in which that was.
        touched: it has had a pre-backward in the running backward.
        rejoined: in this backward a recomputation freed it and put it in the post-forward order again (torch before 2.10).
        training: training state after its last hook.
        ran: ``seq`` of its last pre-forward with grad outside a recomputation.
        freed: ``seq`` of its last reshard, ``freed_cause`` its cause; ``closed_by`` the kind of the last hook that decides whether it stays open
            (post-forward or post-backward), 0 when none ran since it was opened; ``closed_in_grad`` whether that was a
            post-forward of a forward with grad.
        late: in the running backward its post-backward ran in the root's final callback, after a pre-backward.
        input_grad: what went into its last forward with grad (see the event's field).
        past: bytes of the copy while it is held although the backward is over, else 0.
        blamed: ``seq`` of an unshard that a rule has reported, so that no other rule says it again.
        flags: the group's switches as bits, in the order of ``events.FLAGS``.
        gathered: ``seq`` of the gather from the shards that the copy stems from: of one made from a post-forward copy (a
            smaller mesh) the gather that this one was made of; ``gathered_step`` its step, ``smaller`` whether such a copy is there.
        changed: ``seq`` of the last change of its shards, ``changed_by`` its cause.
        held_back: ``seq`` of the post-backward whose gradients were not reduced, or not over the replicas, 0 when all were;
            ``held_back_flags`` the switches of then.
        previous: the group whose post-forward came before its own in the last forward; ``began`` whether it was the first one
            of its root in it and an earlier pass may have left something in the order list.
    """

    __slots__ = (
        "began",
        "blamed",
        "bytes",
        "changed",
        "changed_by",
        "closed_by",
        "closed_in_grad",
        "flags",
        "fqn",
        "freed",
        "freed_cause",
        "gathered",
        "gathered_step",
        "grads",
        "held_back",
        "held_back_flags",
        "id",
        "input_grad",
        "late",
        "open",
        "opened",
        "opened_by",
        "opened_how",
        "opened_step",
        "over",
        "over_in",
        "past",
        "paused",
        "pending",
        "previous",
        "ran",
        "rejoined",
        "smaller",
        "touched",
        "training",
        "used",
        "uses",
    )  # fmt: skip

    def __init__(self, id: int, fqn: str, flags: int) -> None:
        self.id = id
        self.fqn = fqn
        self.open = False
        self.pending = False
        self.bytes = 0
        self.opened = 0
        self.opened_how = 0
        self.opened_by = ev.NONE
        self.opened_step = 0
        self.used = False
        self.uses = 0
        self.paused = 0
        self.over = 0
        self.over_in = -1
        self.touched = False
        self.rejoined = False
        self.training = 4
        self.previous = ev.NONE
        self.began = True  # not known until a forward of it was seen
        self.flags = flags
        self.freed = 0
        self.freed_cause = 0
        self.ran = 0
        self.closed_by = 0
        self.closed_in_grad = False
        self.late = False
        self.grads = 0
        self.input_grad = 0
        self.blamed = 0
        self.past = 0
        self.gathered = self.gathered_step = 0
        self.changed = self.changed_by = 0
        self.smaller = False
        self.held_back = self.held_back_flags = 0

    @property
    def name(self) -> str:
        """How the group is called in a message."""
        return show_name(self.fqn)


_EVERY = (frozenset(range(5)),) * 4


def _nobody(*_: Any) -> None:
    pass


class Told:
    """What rules are told of instead of looking at every gather, forward and backward themselves, which is what training would
    pay for. The tracker calls; nobody listens until a rule puts a function of its own in the place.

    Attributes:
        other_dtype: ``(seq, group, dtype)``: a gather has another dtype than the model map says.
        late_gather: ``(seq, state, context, how)``: in a backward a group was gathered that has no use to come in it.
        freed_unused: ``(seq, state, cause)``: a copy was freed that nothing had computed with.
        stale_use: ``(seq, group, context)``: a forward uses a copy that is older than its shards.
        odd_forward: ``(seq, state, context, before, after)``: a pre-forward found the group closed, or in a training state that
            is not in ``before_forward`` of the pass.
        odd_order: ``(hook, seq, state, context, before)``: so did another hook, by ``after_forward`` and ``before_backward``.
        other_policy: ``(seq, state, context)``: after a forward it is open or closed against its reshard_after_forward.
        late_reduction: ``(seq, state)``: its post-backward, with gradients, ran in the root's final callback.
        lost_gradient: ``(seq, state)``: so did one without a pre-backward before it.
        changed_open: ``(seq, state, cause)``: shards of a group that is open changed. ``changed_pending`` likewise ``(seq, state)``.
        stepped_oddly: ``(seq, state, unreduced, taken)``: an optimizer changed the group in a backward, or while gradients of it
            were held back, lay on its copies, or may have been taken by hooks.
        stepped_switched: ``(state)``: one did while a switch of its backward was off.
    """

    def __init__(self) -> None:
        self.other_dtype: Callable[[int, int, int], None] = _nobody
        self.late_gather: Callable[[int, GroupState, int, int], None] = _nobody
        self.freed_unused: Callable[[int, GroupState, int], None] = _nobody
        self.stale_use: Callable[[int, int, int], None] = _nobody
        self.odd_forward: Callable[[int, GroupState, int, int, int], None] = _nobody
        self.odd_order: Callable[[str, int, GroupState, int, int], None] = _nobody
        self.other_policy: Callable[[int, GroupState, int], None] = _nobody
        self.late_reduction: Callable[[int, GroupState], None] = _nobody
        self.lost_gradient: Callable[[int, GroupState], None] = _nobody
        self.changed_open: Callable[[int, GroupState, int], None] = _nobody
        self.changed_pending: Callable[[int, GroupState], None] = _nobody
        self.stepped_oddly: Callable[[int, GroupState, int, int], None] = _nobody
        self.stepped_switched: Callable[[GroupState], None] = _nobody
        self.before_forward: Sequence[frozenset[int]] = _EVERY
        self.after_forward: Sequence[frozenset[int]] = _EVERY
        self.before_backward: Sequence[frozenset[int]] = _EVERY
