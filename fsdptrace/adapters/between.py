"""What happens to parameters between passes: shards that are written, gathered copies that are written to and then lost.

FSDP2 gives nobody a hook for that. Between two passes nothing of a model runs, so that it is enough to look at the few groups
that a pass left gathered: what their shards and copies are like when the pass ends (or a call of ``unshard()`` returns), and
again when the next forward begins, or the copy is freed. Presence, identity, flags and version counters, never values. Writes
through ``.data`` and PyTorch's ``_foreach`` functions leave no trace on a DTensor (2.13); optimizers, which use them, are seen
by their hooks.
"""

from __future__ import annotations

from itertools import compress, repeat
from operator import ne
from typing import TYPE_CHECKING, Any

from fsdptrace import events as ev
from fsdptrace.adapters.context import BACKWARD_SEQ, Context, clock
from fsdptrace.adapters.look import held_of

if TYPE_CHECKING:
    from fsdptrace.adapters.group import GroupBase

MOST = 8
"""So many groups are looked at when a pass in training leaves them open. With ``reshard_after_forward=False`` all are, until
the backward: looking at them would cost a large model a millisecond a step, for a moment in which nobody writes."""

WRITE = ev.CHANGE_CAUSES.index("write")
LOAD = ev.CHANGE_CAUSES.index("load")
_REQUIRES_GRAD, _HOOKS, _WRITTEN, _GRADIENT = (
    ev.PARAM_FACTS.index(name) for name in ("requires_grad_of_copy", "hooks_of_copy", "copy_written", "gradient_of_copy")
)

Look = tuple[int, int, bool, int, bool]
"""What one parameter is like: its shard (identity and versions), then of its copy: version (-1 without one), requires_grad,
number of hooks, whether it has a gradient."""


def version_of(tensor: Any) -> int:
    """Its version counter; -1 where it has none (made under inference_mode)."""
    return -1 if tensor.is_inference() else int(tensor._version)


def hooks_of(tensor: Any) -> int:
    """How many hooks of the user's a leaf has."""
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def look(param: Any) -> Look:
    """An FSDPParam as it is now."""
    shard = param.sharded_param
    stamp = id(shard) + version_of(shard) + version_of(shard._local_tensor)
    copy = param.__dict__.get("_unsharded_param")
    if copy is None:
        return stamp, -1, False, 0, False
    return stamp, version_of(copy), copy.requires_grad, hooks_of(copy), copy.grad is not None


class Between:
    """Looks at the groups of one model between its passes."""

    def __init__(self, context: Context, groups: list[Any]) -> None:
        self._context = context
        self._groups = groups
        self.objects: list[Any] = []  # PyTorch's param groups, while the hooks are on
        self._nothing = (type(groups[0].group._sharded_state).SHARDED if groups else None, None)
        self.left: list[GroupBase] = []
        self.loads = 0  # of state dicts, as far as they are recorded: one with assign=True exchanges shards

    def leave(self, training: bool) -> None:
        """A pass ends; in ``training``, a forward with grad or a backward."""
        # As is_held() has it, without a call: all groups are looked at twice a step.
        held = list(compress(self._groups, map(ne, map(held_of, self.objects), repeat(self._nothing))))
        if training and len(held) > MOST:
            held = []
        earlier, self.left = self.left, held
        for hooks in held:
            now = [look(param) for param in hooks.group.fsdp_params]
            if hooks.left is not None:  # the same copy as before this pass: what was changed on it since is still to be told
                now = [(fresh[0], *was[1:4], fresh[4]) for was, fresh in zip(hooks.left, now, strict=True)]
            hooks.left = now
        for hooks in earlier:
            if hooks not in held:
                hooks.left = None

    def opened_by_hand(self, hooks: GroupBase) -> None:
        """The user asked for the group's gather."""
        hooks.left = [look(param) for param in hooks.group.fsdp_params]
        if hooks not in self.left:
            self.left.append(hooks)

    def waited(self, hooks: GroupBase) -> None:
        """The copies that the user asked for are there: only now they are as FSDP2 gives them."""
        assert hooks.left is not None
        now = [look(param) for param in hooks.group.fsdp_params]
        hooks.left = [(was[0], *fresh[1:]) for was, fresh in zip(hooks.left, now, strict=True)]

    def stepped(self, hooks: GroupBase) -> None:
        """An optimizer changed the group's shards, which is an event of its own."""
        if hooks.left is not None:
            now = [look(param) for param in hooks.group.fsdp_params]
            hooks.left = [(fresh[0], *was[1:]) for was, fresh in zip(hooks.left, now, strict=True)]

    def arrive(self) -> None:
        """A forward begins: shards of what was left gathered that were written meanwhile."""
        for hooks in self.left:
            if hooks.left is None:
                continue
            now = [look(param) for param in hooks.group.fsdp_params]
            written = sum(was[0] != fresh[0] for was, fresh in zip(hooks.left, now, strict=True))
            if written:
                hooks.left = [(fresh[0], *was[1:]) for was, fresh in zip(hooks.left, now, strict=True)]
                self.changed(hooks, WRITE, written)

    def changed(self, hooks: GroupBase, cause: int, tensors: int) -> None:
        """Records that the group's shards were written or loaded."""
        c = self._context
        self.loads += cause == LOAD
        now = clock()
        c.emit(ev.PARAM_CHANGE, next(c.ids), now, now, hooks.id, c.parent(), cause, tensors)

    def closed(self, hooks: GroupBase, left: list[Look], seq: int) -> None:
        """The copies of a group that was left gathered are freed at event ``seq``: what was changed on them is lost."""
        hooks.left = None
        backward = self._context.shared[BACKWARD_SEQ]
        facts: list[tuple[int, int, str]] = []
        for index, (param, was) in enumerate(zip(hooks.group.fsdp_params, left, strict=True)):
            _, version, requires_grad, hooked, gradient = look(param)
            _, version_then, requires_grad_then, hooked_then, gradient_then = was
            if version < 0:
                continue
            if requires_grad not in (requires_grad_then, param.sharded_param.requires_grad):
                facts.append((_REQUIRES_GRAD, index, str(requires_grad)))
            if hooked > hooked_then:
                facts.append((_HOOKS, index, ""))
            if version_then >= 0 and version > max(version_then, hooks.versions[index] if hooks.versions else -1):
                facts.append((_WRITTEN, index, ""))
            if gradient != gradient_then and not backward:
                facts.append((_GRADIENT, index, "set" if gradient else "cleared"))
        hooks.see_versions()
        for fact, index, detail in facts:
            self.tell(hooks, fact, index, detail, seq)

    def written_in_passes(self) -> None:
        """Copies that the model itself wrote to in a forward: looked at in the first steps and then now and then."""
        for hooks in self._groups:
            if hooks.left is not None:  # looked at when it is freed
                continue
            before = hooks.versions
            hooks.see_versions()
            for index, version in enumerate(hooks.versions):
                if index < len(before) and version > before[index] >= 0:
                    self.tell(hooks, _WRITTEN, index, "in a forward or backward", 0)

    def tell(self, hooks: GroupBase, fact: int, index: int, detail: str, parent: int) -> None:
        """Records a fact of the group's parameter ``index``."""
        c = self._context
        now = clock()
        info = hooks.info.params[index]
        c.emit(
            ev.PARAM, next(c.ids), now, now, hooks.id, parent or c.parent(),
            fact, c.owner.text(info.name), ev.NONE, c.owner.text(detail), info.bytes,
        )  # fmt: skip


def is_held(group: Any) -> bool:
    """Whether something gathered is there: copies, a pending gather, or the copy on a smaller mesh."""
    return group._sharded_state._value_ != 1 or group._all_gather_result is not None
