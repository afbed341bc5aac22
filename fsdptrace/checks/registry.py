"""Which rules there are and which of them a recording runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdptrace.checks.base import Rule
from fsdptrace.checks.comm_dtype import CommDtype
from fsdptrace.checks.exposed_communication import ExposedCommunication
from fsdptrace.checks.flags_at_step import FlagsAtStep
from fsdptrace.checks.gather_after_backward import GatherAfterBackward
from fsdptrace.checks.illegal_state import IllegalState
from fsdptrace.checks.late_reshard import LateReshard
from fsdptrace.checks.lost_pre_backward import LostPreBackward
from fsdptrace.checks.missing_reduction import MissingReduction
from fsdptrace.checks.optimizer_owns_temporary import OptimizerOwnsTemporary
from fsdptrace.checks.order_changed import OrderChanged
from fsdptrace.checks.outside_forward import OutsideForward
from fsdptrace.checks.pending_gather import PendingGather
from fsdptrace.checks.policy_ignored import PolicyIgnored
from fsdptrace.checks.rank_order import RankOrder, RankStall
from fsdptrace.checks.recompute_units import RecomputeUnits
from fsdptrace.checks.recompute_values import RecomputeValues
from fsdptrace.checks.repeated_gather import RepeatedGather
from fsdptrace.checks.saved_tensors import SavedTensorCount, SavedTensorMetadata
from fsdptrace.checks.stale_weights import StaleWeights
from fsdptrace.checks.unclean_start import UncleanStart
from fsdptrace.checks.uncovered_parameter import UncoveredParameter
from fsdptrace.checks.unpaired_unshard import UnpairedUnshard
from fsdptrace.checks.unsharded_budget import UnshardedBudget
from fsdptrace.checks.unused_gather import UnusedGather
from fsdptrace.checks.wrap_rules import InferenceBuffer, MixedDtypeUnit, SplitTie
from fsdptrace.checks.write_to_temporary import WriteToTemporary
from fsdptrace.checks.wrong_root import WrongRoot

_ALL: tuple[type[Rule], ...] = (
    GatherAfterBackward, UnpairedUnshard, PendingGather, UnusedGather, RepeatedGather, LateReshard, UnshardedBudget,
    StaleWeights, PolicyIgnored, IllegalState, LostPreBackward, UncleanStart, WrongRoot, OutsideForward,
    MissingReduction, FlagsAtStep, OptimizerOwnsTemporary, WriteToTemporary, UncoveredParameter,
    MixedDtypeUnit, SplitTie, InferenceBuffer, CommDtype, OrderChanged, ExposedCommunication,
    SavedTensorCount, SavedTensorMetadata, RecomputeUnits, RecomputeValues,
    RankOrder, RankStall,
)  # fmt: skip
RULES: Mapping[str, type[Rule]] = {rule.name: rule for rule in _ALL}
"""All rules by name, in the order in which they see an event."""


def select(checks: Sequence[str] | bool | None, budget: bool = False) -> tuple[type[Rule], ...]:
    """The rules for ``checks``: ``None`` or ``True`` the default ones, ``False`` or an empty list none, else by name.

    A name with a leading ``-`` takes that rule away from the default ones; ``"all"`` is every rule, opt-in ones too.
    ``budget`` says that ``budget_bytes`` is given, which opts in to ``unsharded-budget``.

    Raises:
        ValueError: a name is no rule's.
    """
    defaults = [rule for rule in RULES.values() if not rule.opt_in or (budget and rule.name == "unsharded-budget")]
    if checks is None or checks is True:
        return tuple(defaults)
    if checks is False:
        return ()
    names = [checks] if isinstance(checks, str) else list(checks)
    check_names((name.removeprefix("-") for name in names if name != "all"), "checks")
    chosen = list(RULES.values()) if "all" in names else []
    if not chosen and any(name.startswith("-") for name in names):
        chosen = defaults
    chosen = [*chosen, *(RULES[name] for name in names if name in RULES and RULES[name] not in chosen)]
    return tuple(rule for rule in chosen if f"-{rule.name}" not in names)


def check_names(names: Iterable[str], where: str) -> None:
    """Raises ``ValueError`` with all unknown names of ``names`` and the known ones."""
    unknown = [name for name in names if name not in RULES]
    if unknown:
        raise ValueError(f"{where}: no rule named {', '.join(map(repr, unknown))}; there are {', '.join(RULES)}")


def options_of(given: Mapping[str, Any] | None, budget_bytes: int | None) -> dict[str, dict[str, Any]]:
    """Options by rule name: ``rule_options`` as given, with ``budget_bytes`` where ``unsharded-budget`` has none of its own."""
    own = {name: dict(values) for name, values in (given or {}).items() if isinstance(values, Mapping)}
    if budget_bytes is not None and "unsharded-budget" in RULES:
        own.setdefault("unsharded-budget", {}).setdefault("budget_bytes", budget_bytes)
    return own


def unknown_options(given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per option that its rule does not have."""
    return [
        f"rule_options: {rule} has no option {key!r}, so it changes nothing; "
        + (f"there is {', '.join(RULES[rule].options)}" if RULES[rule].options else "it has none")
        for rule, values in given.items()
        for key in values
        if key not in RULES[rule].options
    ]


def make(rules: Sequence[type[Rule]], tracker: Any, report: Any, options: Mapping[str, Mapping[str, Any]]) -> list[Rule]:
    """One object per rule for one model."""
    return [rule(tracker, report, options.get(rule.name)) for rule in rules]
