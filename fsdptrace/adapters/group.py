"""What all wrappers of one param group share: the group, its static picture, and the rare events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdptrace import events as ev
from fsdptrace.adapters.between import LOAD, Look, is_held, version_of
from fsdptrace.adapters.compat import release_of
from fsdptrace.adapters.context import TOP, Context, clock
from fsdptrace.adapters.look import switches_of
from fsdptrace.model_map import GroupInfo, usual_flags

Wrapper = Callable[..., Any]
# A copy that FSDP2 has just made has version 0, and its gathers leave the counter alone (seen in 2.13).
_BORN_AT_0 = release_of(str(torch.__version__)) >= (2, 13)
MANUAL = ev.pack_how(mode=ev.MODES.index("manual"))
FORWARD_PREFETCH = ev.pack_how(direction=1)
BACKWARD_PREFETCH = ev.pack_how(direction=2)
IMPLICIT_MODE = ev.pack_how(mode=1)
EXPLICIT_MODE = ev.pack_how(mode=2)
OPEN, PENDING, DISABLED = 1, 2, 3  # positions in NOOPS
UNSHARDED = 3
POST_FORWARD_STATE = 2
PRE_BACKWARD_STATE = 2
IDLE_OR_POST = 3  # training states from here on: not in a forward or a pre-backward


class GroupBase:
    """One FSDPParamGroup and what its hooks remember.

    Attributes:
        id, info: number and static picture of the group.
        bytes: unsharded bytes of its last gather; ``known`` these and the dtype once measured, ``reduced`` what is known of a
            reduction with all gradients: size, dtype, operator, divide factor, and ``leaves`` the unsharded parameters then.
        flags: its switches as last seen; ``switches`` those of them that a backward uses, as PyTorch has them.
        announced: sets of parameters whose partial reduction was put on disk beforehand.
        others: what somebody else had put on the instance before us, by name.
        left: what shards and copies were like when a pass left the group gathered, ``None`` when none did; ``versions`` the
            version counters of the copies when last seen, empty before.
    """

    def __init__(self, context: Context, group: Any, info: GroupInfo) -> None:
        self.context = context
        self.group = group
        self.info = info
        self.id = info.id
        self.bytes = info.bytes
        self.flags = usual_flags(info)
        self.switches: tuple[Any, ...] = ()
        self.known: list[int] = []
        self.reduced: list[Any] = []
        self.announced: set[int] = set()
        self.leaves: list[Any] = []
        self.shared_with_others = False
        self.others: dict[str, Any] = {}
        self.left: list[Look] | None = None
        self.versions: list[int] = []
        self._loaded = -1
        self.buffers_are_plain = False  # seen not to be of inference_mode

    def method(self, name: str) -> Callable[..., Any]:
        """The method to call with the group as first argument: the class's function, which keeps no group alive, or what
        somebody else put on the instance before us."""
        function: Callable[..., Any] = getattr(type(self.group), name)
        if name not in self.group.__dict__:
            return function
        self.shared_with_others = True
        others = self.others

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            own = others.get(name)
            return function(group, *args, **kwargs) if own is None else own(*args, **kwargs)

        return method

    # -- rare ----------------------------------------------------------------------------------------------------------
    def _discarded(self, seq: int, t0: int) -> None:
        c = self.context
        try:
            frozen = not any(param.sharded_param.requires_grad for param in self.group.fsdp_params)
            c.emit(ev.DISCARD, seq, t0, clock(), self.id, c.parent(), self.bytes, int(frozen))
        except Exception as error:
            if c.owner.stop_run(error):
                raise
            c.owner.fault(error)

    def sample(self, parent: int) -> None:
        """Records what the allocator holds after the event ``parent``; 10 us, so only in steps with all their detail."""
        c = self.context
        if c.timing is not None:
            allocated, reserved = c.timing.memory()
            now = clock()
            c.emit(ev.MEMORY, next(c.ids), now, now, self.id, parent, allocated, reserved)

    def flags_changed(self, flags: int, parent: int = 0) -> None:
        """Records each switch that differs from what was last seen, under the event ``parent`` in which it was used."""
        c = self.context
        now = clock()
        changed, self.flags = flags ^ self.flags, flags
        self.switches, c.polled = switches_of(self.group), None
        for bit in range(len(ev.FLAGS) - 1):
            if changed >> bit & 1:
                c.emit(ev.FLAG, next(c.ids), now, now, self.id, parent or c.shared[TOP], bit, flags >> bit & 1)

    def snapshot(self, unless: tuple[bool, bool, int] | None = None) -> None:
        """Records the group's state as PyTorch has it now, unless it is ``(open, pending, training state)`` already."""
        c, group = self.context, self.group
        now = clock()
        if not self.versions and _BORN_AT_0 and not any("_unsharded_param" in param.__dict__ for param in group.fsdp_params):
            self.versions = [0] * len(group.fsdp_params)
        sharded = group._sharded_state._value_
        pending = group._all_gather_result is not None
        if unless == (sharded == UNSHARDED, pending, group._training_state._value_):
            return
        size = self.bytes if pending or sharded == UNSHARDED else 0
        order = len(getattr(group.comm_ctx, "post_forward_order", ()))
        c.emit(
            ev.STATE, next(c.ids), now, now, self.id, 0,
            sharded, int(pending), group._training_state._value_, order, size,
        )  # fmt: skip

    def see_versions(self) -> None:
        """Takes down the version counters of the copies."""
        copies = [param.__dict__.get("_unsharded_param") for param in self.group.fsdp_params]
        self.versions = [-1 if copy is None else version_of(copy) for copy in copies]

    def state_dict_hook(self, frame: Any) -> None:
        """The hook of a state dict found the group sharded already; ``frame`` is the hook's. One of a load is a change of the
        shards, said once a step, or each time while a gather is pending."""
        c = self.context
        if len(frame.f_locals.get("args", ())) < 4:  # a save gives (module, prefix, keep_vars), a load seven arguments
            return
        if is_held(self.group) or self._loaded != c.step:
            self._loaded = c.step
            try:
                c.between.changed(self, LOAD, self.info.tensors)
            except Exception as error:
                if c.owner.stop_run(error):
                    raise
                c.owner.fault(error)

    def _failed(self, error: BaseException) -> None:
        c = self.context
        try:
            c.note_exception(error, self.id, self.info.unit)
        except Exception as fault:
            if not c.owner.stop_run(fault):
                c.owner.fault(fault)
