"""What the hooks of one recorded model share, and the opening and closing of its forwards, backwards and steps."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fsdptrace import events as ev
from fsdptrace.adapters.device import BACKWARD, FORWARD, Timing
from fsdptrace.adapters.frames import Used, has_notes, look_at, shares
from fsdptrace.adapters.state_dict import STATE_DICTS

if TYPE_CHECKING:
    from fsdptrace.adapters.between import Between
    from fsdptrace.adapters.facts import Facts

clock = time.perf_counter_ns
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Positions in the list that the hooks of one model share: reading an item of a list is the cheapest shared state there
# is. A model's hooks run on one thread at a time (FSDP2 itself allows no other): the caller's, or, for a backward on an
# accelerator, the autograd engine's while the caller waits.
CONTEXT = 0  # pass + 4 * model + 1024 * thread, as records carry it
PARENT = 1  # seq of the innermost open hook, 0 outside
TOP = 2  # seq of the open outermost forward or backward, 0 without
DEPTH = 3  # nesting of units' forwards outside a backward
RECOMPUTE_DEPTH = 4  # nesting of units' forwards inside a backward
SOURCE = 5  # first group of the unit whose state hook runs or ran last: the source of explicit prefetches
BACKWARD_SEQ = 6  # seq of the open backward, 0 without
FINAL = 7  # 1 while the root's final callback runs
OUTER_GRAD = 8  # grad mode of the open outermost forward
STEPPED = 9  # 1 after an optimizer of the model stepped
BUSY = 10  # 1 when the running step has an event other than snapshots
ENTERED = 11  # kind + 32 * group of a collective that was entered and not left, 0 without
HOW = 12  # packed how of the prefetch that is running, 0 without
ISSUER = 13  # its source
REPAIR = 14  # 1 between the first and the last pre-forward hook of a unit in a backward: FSDPState may gather it there
WHICH = 15  # which parameters take part in the reduction of the post-backward that is running, 0 for all (ev.pack_which)
SIZE = 16
GROUP_UNIT = 32
OUT_OF_GATHER, OUT_OF_REDUCTION = ev.ABOUT.index("all_gather"), ev.ABOUT.index("reduction")

# The group + 1 that prefetches a group of another root and its context, 0 and None without. Of the process, not of a model:
# roots that share a communication context (share_comm_ctx, torch 2.10) prefetch each other's groups.
implicit: list[Any] = [0, None]


Handler = Callable[[int, int, int, int, int, int, int, int], None]
"""``handler(seq, group, context, a, b, c, d, e)``: what a check engine offers per kind."""


class Listener(Protocol):
    """Takes every event once, in order, on the training thread; may raise a violation that stops the run."""

    def handler(self, kind: int) -> Handler:
        """The function for events of ``kind``."""
        ...


class Owner(Protocol):
    """What the hooks ask of the recording."""

    def fault(self, error: Exception) -> None:
        """A fault of the tracer: counted, logged once, recording turns itself off."""
        ...

    def stop_run(self, error: BaseException) -> bool:
        """Whether ``error`` is meant to stop the run (a violation under ``raise``)."""
        ...

    @property
    def before_collective(self) -> Callable[[int], None] | None:
        """With ``flush="collective"``: puts what is recorded into the file now. Else ``None``."""
        ...

    def announce(self, model: int) -> None:
        """Like :attr:`before_collective`, for a collective that ranks may not agree on; never waits for a disk."""
        ...

    def text(self, text: str) -> int:
        """Index of ``text`` in the session's table."""
        ...

    def text_once(self, text: str) -> int:
        """Index of a text that will hardly come again."""
        ...

    def end_step(self, model: int) -> None:
        """A step of ``model`` is over."""
        ...

    def begin_step(self) -> None:
        """A step begins with an outermost forward."""
        ...

    def annotate(self, error: BaseException, seq: int = 0) -> None:
        """Adds what is known to an exception that leaves the model, and what rules found in it at event ``seq``."""
        ...


class Context:
    """Shared by all hooks of one recorded model in one process.

    Args:
        model: number of the model.
        append: the ring's append.
        ids: the process's counter of ``seq``.
        listener: check engine of the model.
        owner: the recording.
        threads: thread numbers of the process.
    """

    def __init__(
        self,
        model: int,
        append: Callable[[tuple[int, ...]], None],
        ids: count[int],
        listener: Listener,
        owner: Owner,
        threads: dict[int, int],
    ) -> None:
        self.model = model
        self.append = append
        self.ids = ids
        self.owner = owner
        self.shared = [0] * SIZE
        self.threads = threads
        self.base = model * ev.MODEL_UNIT
        self.shared[CONTEXT] = self.base
        self.on = {kind: listener.handler(kind) for kind in range(1, len(ev.KINDS))}
        self.backward_t0 = 0
        self.backward_task = -1
        self.backward_outer = (self.base, 0, 0)
        self.backward_t1 = 0
        self.backward_last = True
        self.forward_t0 = 0
        self.forward_unit = ev.NONE
        self.forward_seq = 0
        self.inference = False
        self.forward_start = self.forward_order = 0
        self.backward_finished = False
        self.roots: list[Any] = []
        self.numbers: dict[int, int] = {}  # number of a group by its id(), while the hooks hold it
        # The switches of all groups when they were polled; None once one was seen to change since.
        self.polled: list[Any] | None = None
        self.seen_exception, self.seen_noted = 0, False
        self.units: list[Any] = []  # of the installed model, with PyTorch's own objects
        self.watch_parts: Callable[[bool], None] = _no_parts
        self.step = 0  # steps that ended so far
        self.between: Between
        self.timing: Timing | None = None
        self.facts: Facts
        self.regions: Any = None  # checkpointed regions, see adapters/regions.py
        # What wants to know what units are given while a checkpointed region runs: collect(unit, args), else None.
        self.collect: Callable[[int, Any], None] | None = None
        # The outermost forward of that number ends: regions of it that are still open were left by an exception.
        self.forward_ends: Callable[[int], None] = _nothing

    def emit(
        self, kind: int, seq: int, t0: int, t1: int, group: int, parent: int, *data: int, pass_: int | None = None
    ) -> None:
        """Records one event and shows it to the checks; the slow form, for rare kinds."""
        context = self.shared[CONTEXT]
        if pass_ is not None:
            context += pass_ - context % 4
        payload = data + (0,) * (5 - len(data))
        self.append((kind, seq, t0, t1, group, parent, context, *payload))
        self.on[kind](seq, group, context, *payload)

    def enter_pass(self, pass_: int) -> None:
        """The model goes over to ``pass_`` on this thread."""
        threads = self.threads
        thread = threads.setdefault(get_ident(), len(threads))
        self.shared[CONTEXT] = pass_ + self.base + thread * ev.THREAD_UNIT

    def parent(self) -> int:
        """``seq`` of what is open around the caller, 0 for nothing."""
        return self.shared[PARENT] or self.shared[TOP]

    # -- outermost forward ---------------------------------------------------------------------------------------------
    def open_forward(self, unit: int, t0: int, state: Any) -> None:
        """An outermost forward of the unit with FSDPState ``state`` begins outside a backward."""
        shared = self.shared
        grad = torch.is_grad_enabled()
        if grad and shared[STEPPED]:
            self.owner.end_step(self.model)
        if not shared[BUSY]:
            self.owner.begin_step()
        seq = next(self.ids)
        shared[TOP] = seq
        shared[PARENT] = 0
        self.enter_pass(ev.PASS_FORWARD)
        self.watch_parts(False)
        shared[OUTER_GRAD] = 1 if grad else 0
        shared[BUSY] = 1
        self.seen_exception = 0  # the same object may be raised again
        self.forward_seq = seq
        self.forward_t0 = t0
        self.forward_unit = unit
        self.inference = torch.is_inference_mode_enabled()
        self.forward_start, self.forward_order = _remembered(state)
        if self.between.left:
            self.between.arrive()
        if self.timing is not None and self.timing.on:
            self.timing.open(seq)
        self.facts.forward_begins(self.inference)

    def close_forward(self, t1: int) -> None:
        """The outermost forward is over; its event is recorded."""
        shared = self.shared
        if self.collect is not None:
            self.forward_ends(self.forward_seq)
        shared[TOP] = 0
        grad = shared[OUTER_GRAD]
        try:
            if self.timing is not None and self.timing.on:
                self.timing.close(self.forward_seq, FORWARD)
            self.emit(
                ev.FORWARD, self.forward_seq, self.forward_t0, t1, ev.NONE, 0,
                self.forward_unit, grad, int(self.inference), self.forward_start, self.forward_order, pass_=ev.PASS_FORWARD,
            )  # fmt: skip
        finally:
            self.enter_pass(ev.PASS_NONE)
            shared[DEPTH] = 0
            self.outside(bool(shared[OUTER_GRAD]))
            shared[OUTER_GRAD] = 0

    def abandon_forward(self) -> None:
        """A forward that will not end: an exception left a registered forward method, where no hook runs."""
        if self.shared[DEPTH]:
            self.close_forward(clock())

    # -- outermost backward --------------------------------------------------------------------------------------------
    def open_backward(self) -> None:
        """Called by the first hook that runs in a graph task; does nothing outside one or when one is open."""
        shared = self.shared
        task = graph_task_id()
        if task == -1 or shared[BACKWARD_SEQ]:
            return
        self.backward_outer = (shared[CONTEXT], shared[TOP], shared[PARENT])
        self.backward_t0 = self.backward_t1 = clock()
        self.backward_task = task
        shared[BACKWARD_SEQ] = shared[TOP] = next(self.ids)
        shared[PARENT] = 0
        self.enter_pass(ev.PASS_BACKWARD)
        shared[RECOMPUTE_DEPTH] = 0
        shared[BUSY] = 1
        self.backward_finished = False
        if self.timing is not None and self.timing.on:
            self.timing.open(shared[BACKWARD_SEQ])

    def final_callback_done(self, last: bool) -> None:
        """A root's final callback returned. It ends the backward when it is the last one of the outermost task."""
        self.backward_t1 = clock()
        self.backward_last = last
        self.backward_finished = True
        if graph_task_id() not in (-1, self.backward_task):
            return
        if any(context.post_backward_final_callback_queued for context in self.roots):
            return
        self.close_backward()

    def close_backward(self) -> None:
        """Records the open backward; also called when a forward or a step begins after one that had no end."""
        shared = self.shared
        seq = shared[BACKWARD_SEQ]
        if not seq:
            return
        shared[BACKWARD_SEQ] = 0
        shared[RECOMPUTE_DEPTH] = 0
        outer, shared[TOP], shared[PARENT] = self.backward_outer
        if not self.backward_finished:  # no root's final callback ended it (set_is_last_backward(False)): it ends here
            self.backward_t1 = clock()
        try:
            if self.timing is not None and self.timing.on:
                self.timing.close(seq, BACKWARD)
            self.emit(
                ev.BACKWARD, seq, self.backward_t0, self.backward_t1, ev.NONE, self.parent(),
                int(self.backward_last and self.backward_finished), int(self.backward_finished), pass_=ev.PASS_BACKWARD,
            )  # fmt: skip
        finally:
            shared[CONTEXT] = outer
            self.outside(True)
            self.facts.backward_ended()

    def outside(self, grad: bool) -> None:
        """A forward (with ``grad`` or without) or a backward ended: what comes now may be work past the forwards."""
        if not self.shared[TOP]:
            self.watch_parts(True)
            if not grad:
                STATE_DICTS.look()
            self.between.leave(grad)

    def backward_left(self, error: BaseException | None) -> None:
        """The engine's outermost call returned, or raised ``error``."""
        shared = self.shared
        try:
            if error is not None and self.waits_for_backward():
                shared[PARENT] = 0
                self.note_exception(error, ev.NONE, ev.NONE)
            if shared[BACKWARD_SEQ]:
                self.backward_t1 = clock() if error is not None else self.backward_t1
                self.close_backward()
        except Exception as fault:
            if error is None and self.owner.stop_run(fault):
                raise
            if not self.owner.stop_run(fault):
                self.owner.fault(fault)

    def waits_for_backward(self) -> bool:
        """Whether an error of a backward can concern this model: one of its hooks ran in it, or a forward with grad of it
        is waiting for its backward."""
        return bool(self.shared[BACKWARD_SEQ] or self.shared[BUSY])

    # -- exceptions ----------------------------------------------------------------------------------------------------
    def note_exception(self, error: BaseException, group: int, unit: int) -> None:
        """Records ``error`` the first time that it leaves a hook or a module of the model, and puts a note on it.

        What rules find in it goes into the note: under ``raise`` too the program's own error is what ends it.
        """
        if self.has_seen(error):
            return
        self.seen_exception, self.seen_noted = id(error), False
        self.shared[BUSY] = 1
        now = clock()
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        about, used = self.look_at(error)
        inside = self.shared[ENTERED]
        if inside and not about:
            about = OUT_OF_REDUCTION if inside % GROUP_UNIT == ev.POST_BACKWARD else OUT_OF_GATHER
        seq = next(self.ids)
        try:
            self.emit(
                ev.EXCEPTION, seq, now, now, group, self.parent(), self.owner.text(name), unit, about,
                used.group if used else ev.NONE, self.owner.text(used.text()) if used else 0,
            )  # fmt: skip
        except Exception as fault:
            if not self.owner.stop_run(fault):
                raise
        self.owner.annotate(error, seq)
        self.seen_noted = has_notes(error)  # not on Python 3.10, on frozen exceptions and those of ours

    def has_seen(self, error: BaseException) -> bool:
        """Whether ``error`` was recorded. Another one may have got the place in memory of one that is gone: it has no note."""
        return id(error) == self.seen_exception and (not self.seen_noted or has_notes(error))

    def look_at(self, error: BaseException) -> tuple[int, Used | None]:
        """What ``error`` is about (a position in :data:`~fsdptrace.events.ABOUT`), and whose parameters were used."""
        return look_at(error, self.units, bool(self.shared[BACKWARD_SEQ]))

    def state_dict_failed(self, model: Any, error: BaseException) -> None:
        """``error`` leaves PyTorch's state-dict code, called for ``model``."""
        try:
            if shares(model, self.units):
                self.note_exception(error, ev.NONE, ev.NONE)
        except Exception as fault:
            self.owner.fault(fault)

    def reset(self) -> None:
        """Forgets whatever was open: recording starts, or an exception left the run half way."""
        stepped = self.shared[STEPPED]
        self.shared[:] = [0] * SIZE
        self.shared[STEPPED] = stepped
        self.shared[CONTEXT] = self.base
        self.seen_exception = 0


def _no_parts(on: bool) -> None:
    pass


def _nothing(seq: int) -> None:
    pass


def _remembered(state: Any) -> tuple[int, int]:
    """What FSDP2 remembers when an outermost forward begins: the bits of the ``start`` field and the length of the order
    list. A grouped unit remembers itself as root while its other modules have not run (torch 2.13), which is legal."""
    if state is None:
        return 0, 0
    shared = state._state_ctx
    root = shared.iter_forward_root
    start = 1 if root is not None and len(root._modules) == 1 else 0
    if shared.post_backward_final_callback_queued:
        start |= 2
    if state._is_root is None:
        start |= 4
    return start, len(getattr(state._comm_ctx, "post_forward_order", ()))  # made at the first forward
