"""``outside-forward``: parameters of a closed unit were used past its forward, and PyTorch failed on them."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.illegal_state import freed_in_its_backward
from fsdptrace.checks.state import GroupState
from fsdptrace.checks.text import size
from fsdptrace.model_map import show_name

_FREED = ev.ABOUT.index("freed")
_BY_HAND = ev.MODES.index("manual")


class OutsideForward(Rule):
    name: ClassVar[str] = "outside-forward"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "an exception about parameters that are not gathered comes out of a module whose group is closed: they were used through "
        "a method that is no forward of the unit"
    )
    explanation: ClassVar[str] = (
        "FSDP2 gathers a unit when the unit is called, and only then. Work through another method (`generate`, `hidden`, a fused "
        "loss), a direct call of `.forward`, a part called by itself, a hook that runs before FSDP2's or after it, code of a "
        "backward, or a read of another unit's weight finds the shards "
        "instead: `got mixed torch.Tensor and DTensor`, or a storage of size 0. It may work by accident while the root is still "
        "open after an eval pass. The finding is on the exception as a note; under `raise` too the exception is the program's own."
    )
    example: ClassVar[str] = (
        "class Net(nn.Module):\n"
        "    def hidden(self, ids):              # no forward: nothing is gathered for it\n"
        "        return self.block(self.emb(ids))\n"
        "fully_shard(net)\n"
        "net.hidden(ids)"
    )
    mend: ClassVar[str] = (
        'Once after fully_shard: `register_fsdp_forward_method(net, "hidden")` (torch.distributed.fsdp). Call modules, not '
        "their `.forward`. Where another module needs the weights: one unit for both, or `unit.unshard()` before and "
        "`unit.reshard()` after."
    )
    silent: ClassVar[str] = (
        "methods that were registered, units that are open, a failing forward or recomputation of the unit itself, state dicts and "
        "optimizers, a plain read of a weight in code of no module, errors that are not about freed or sharded parameters"
    )
    cost: ClassVar[str] = "nothing until an exception"

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        tracker = self.tracker
        if c != _FREED or d < 0 or freed_in_its_backward(tracker, d, context % 4):
            return
        state = tracker.groups[d]
        if state.open:
            return
        module, _, function = tracker.texts.get(e).partition("|")
        if function:
            message, hint = self._words_of_function(seq, state, module, function, context % 4)
        else:
            message, hint = self._words(seq, state, *module.rpartition(":")[::2])
        total = state.bytes or tracker.map.groups[d].bytes
        evidence = (state.freed, seq) if state.freed else (seq,)
        freed = f" (freed at event {state.freed})" if state.freed else ""
        if state.pending:
            who = tracker.asked_by(state.opened_how, state.opened_by, "unshard(async_op=True)")
            freed = f" (a gather is pending: {who} issued it at event {state.opened}, and nobody has waited for it)"
            if state.opened_how // ev.MODE_UNIT == _BY_HAND:
                hint = "Call wait() on what unshard(async_op=True) returns before the parameters are used outside a forward."
            evidence = (state.opened, seq)
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, d, state.fqn, tracker.step_number,
                f"{message} while they were not gathered{freed}; gathered they are {size(total)}.", hint,
                evidence, 0, tracker.texts.get(e),
            )
        )  # fmt: skip

    def _words(self, seq: int, state: GroupState, module: str, method: str) -> tuple[str, str]:
        """Message and hint for a use through ``method`` of ``module``."""
        unit = self.tracker.map.groups[state.id].modules
        call = state.fqn.partition("#")[0] or "model"
        if module in unit and method == "forward":
            return (
                f"{state.name} was called as .forward(), past FSDP2's hooks, and used its parameters (event {seq})",
                f"Call {call}(...) and not {call}.forward(...): only the call gathers.",
            )
        if module in unit:
            return (
                f"{method}() of {state.name}, which is no forward of it, used its parameters (event {seq})",
                f'Once after fully_shard: register_fsdp_forward_method({call}, "{method}"), from torch.distributed.fsdp; or do that '
                "work in the forward. If it is to change the shards: give it DTensors (distribute_tensor).",
            )
        if any(module.startswith(f"{name}." if name else "") for name in unit) and not self._is_unit(module):
            what = module if method == "forward" else f"{method}() of {module}"
            too = "" if method == "forward" else f' and register_fsdp_forward_method({module}, "{method}")'
            return (
                f"{what}, a part of {state.name}, ran outside a forward of {state.name} and used its parameters (event {seq})",
                f"Call it in the forward of {call}, or in a method given to register_fsdp_forward_method({call}, ...); or make it a "
                f"unit of its own: fully_shard({module}){too}.",
            )
        return (
            f"{method}() of {show_name(module)} used parameters of {state.name} (event {seq}), outside a forward of {state.name},",
            f"Let {call} compute with them itself; or call {call}.unshard() before and {call}.reshard() after. Weights that two "
            "modules share (tied ones) belong into one unit: fully_shard([one, other]).",
        )

    def _words_of_function(self, seq: int, state: GroupState, module: str, function: str, pass_: int) -> tuple[str, str]:
        """Message and hint for a use by a function of no module of the model, ``hook|name at file`` or ``function|...``."""
        kind, _, name = function.partition("|")
        call = state.fqn.partition("#")[0] or "model"
        by_hand = f"call {call}.unshard() before and {call}.reshard() after."
        if kind == "hook":
            what, hint = f"a hook of {show_name(module)} ({name})", f"Do that in the forward of {call}; or {by_hand}"
            if module in self.tracker.map.groups[state.id].modules:
                hint = (
                    f"Register it before fully_shard({call}): FSDP2 gathers {call} after pre-hooks that were prepended since, and "
                    f"frees it before forward hooks that were registered since. Or {by_hand}"
                )
        else:
            what = f"{name}, run in the backward,"
            hint = f"Keep what it needs of them from the forward (ctx.save_for_backward); or {by_hand}"
            if state.uses and not state.touched:
                what = f"{name}, run in the backward before the pre-backward of {state.name}, which gathers it,"
                hint += f" If it is a part of the backward of {state.name} itself: its hook was lost, as lost-pre-backward explains."
        return f"{what} used parameters of {state.name} (event {seq}), outside a forward of {state.name},", hint

    def _is_unit(self, module: str) -> bool:
        return any(module in unit.modules for unit in self.tracker.map.units)
