"""A recomputation that did not match, in words: who, what, the first tensor that differs, the cause as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdptrace.checks.text import count, size
from fsdptrace.checks.tracker import Tracker
from fsdptrace.model_map import show_name

# What can be looked at, and how it is called. Order: what comes first causes what follows.
KINDS: Mapping[str, str] = {
    "params": "gathered parameters", "inputs": "inputs", "rng": "random number state", "context": "global state",
    "module": "state kept in modules", "units": "units used", "gathers": "gathers inside the region",
}  # fmt: skip


def describe(tracker: Tracker, group: int, region: int, detail: Mapping[str, Any]) -> tuple[str, str]:
    """``(message, hint)`` for a mismatch. ``detail`` is that of the ``mismatch`` event; the recomputation is the last one."""
    return f"{_what(tracker, group, region, detail)} {_where(detail)} {_cause(tracker, region, detail)}", _hint(detail)


def units_differ(forward: Sequence[int], again: Sequence[int], returned: bool) -> int | None:
    """The first position at which the units of a recomputation are not those of the forward; ``None`` where they are. A
    recomputation that did not run to its end may lack the last ones."""
    for i, (one, other) in enumerate(zip(forward, again, strict=False)):
        if one != other:
            return i
    if len(again) > len(forward) or (returned and len(again) < len(forward)):
        return min(len(forward), len(again))
    return None


def called(tracker: Tracker, region: int, name: str) -> str:
    """``layers.3.mlp (call 2 of it in step 7)``."""
    state = tracker.regions.known.get(region)
    if state is None or not state.call:
        return f"{name} (region {region})"
    return f"{name} (call {state.call} of it in step {state.step})"


def where(tracker: Tracker, group: int) -> str:
    """The unit that a region lies in and whether it is gathered."""
    if group < 0:
        return "in no unit with parameters"
    state = tracker.groups[group]
    how = "gathered" if state.open else "being gathered" if state.pending else "not gathered"
    return f"in unit {state.name}, which is {how}" + (f" ({size(state.bytes)})" if state.open or state.pending else "")


def tensor(item: Mapping[str, Any] | None) -> str:
    """``(5, 64) bfloat16 on cuda:0 saved by layers.0.mlp``."""
    if item is None:
        return "none"
    text = f"({', '.join(map(str, item['shape']))}) {item['dtype']} on {item['device']}" if "shape" in item else "one"
    return text + (f" saved by {item['by']}" if item.get("by") else "")


def _what(tracker: Tracker, group: int, region: int, detail: Mapping[str, Any]) -> str:
    forward, again = detail.get("forward", 0), detail.get("recompute", 0)
    saved = f"saved {count(forward, 'tensor')} in its forward"
    if detail["more"]:
        text = f"{saved} and was about to save more, at least {again:,}, in its recomputation"
    elif forward != again:
        text = f"{saved} and {again:,} in its recomputation"
    else:
        text = f"{saved} and as many in its recomputation, {detail['differ']:,} of them of another shape, dtype or device"
    return f"{called(tracker, region, detail['name'])}, {where(tracker, group)}, {text}."


def _where(detail: Mapping[str, Any]) -> str:
    parts: list[str] = []
    first = detail.get("first")
    if first is not None:
        one, other = first["forward"], first["recompute"]
        parts.append(
            f"First difference: position {first['position']}, "
            + (f"{tensor(one)} in the forward" if one else "past the forward's last")
            + (
                f", {tensor(other)} in the recomputation."
                if other
                else "."
                if not one
                else ", which the recomputation did not reach."
            )
        )
    repeat = detail.get("repeat")
    if repeat is not None:
        by = repeat.get("by") or detail["name"]
        if repeat["open"]:
            parts.append(
                f"{count(repeat['tensors'], 'tensor')} × more: the loop in {by} ran {count(repeat['forward'], 'time')} in the "
                f"forward, and on in the recomputation, which early stop ended in it."
            )
        else:
            fewer = repeat["forward"] - repeat["recompute"]
            parts.append(
                f"{count(repeat['tensors'], 'tensor')} × {fewer:,} fewer: the loop in {by} ran "
                f"{count(repeat['recompute'], 'time')} instead of {repeat['forward']:,}."
            )
    elif detail.get("rows_only"):
        parts.append("Only the number of rows differs (the first dimension), as when a router sends tokens elsewhere.")
    if not detail.get("known", True):
        parts.append('PyTorch keeps no metadata here (determinism_check="none"), so that positions are not known.')
    return " ".join(parts)


def causes(tracker: Tracker, region: int, detail: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(kind, text)`` of all that is known to differ between what the forward and the recomputation began with."""
    out = []
    for kind in KINDS:
        for item in detail["differs"]:
            if item["kind"] == kind:
                out.append(
                    (kind, f"{item['what']}: {item['forward']} in the forward, {item['recompute']} in the recomputation")
                )
        if kind == "units":
            state = tracker.regions.known.get(region)
            again = tracker.regions.again
            at = None if state is None else units_differ(state.units, again, detail["end"] == "returned")
            if state is not None and at is not None:
                out.append((kind, sequences(tracker, state.units, again, at)))
        if kind == "gathers" and detail.get("checkpoint") == "selective":
            out += [(kind, text) for text in _gathers(tracker, region, detail["end"] == "returned")]
    return out


def _gathers(tracker: Tracker, region: int, returned: bool) -> list[str]:
    """Selective checkpointing counts every operator, FSDP2's own ones too (torch 2.13): where a gather is copied out inside the
    region in one of both only, it takes the wrong ones."""
    state = tracker.regions.known.get(region)
    gathered = tracker.regions.gathered
    if state is None:
        return []
    # One that early stop ended may not have come to all units.
    forward = [group for group in state.gathers if returned or group in tracker.regions.again]
    if forward == list(gathered):
        return []
    one, other = (", ".join(tracker.name(group) for group in groups) or "none" for groups in (forward, gathered))
    return [
        f"{one} in the forward, {other} in the recomputation, whose operators selective checkpointing counts like any others"
    ]


def failure(tracker: Tracker, group: int, region: int, detail: Mapping[str, Any]) -> str:
    """What is to be said of another exception that left a recomputation."""
    text = f"this came out of the recomputation of {called(tracker, region, detail['name'])}, {where(tracker, group)}."
    return f"{text} {_cause(tracker, region, detail)}" if causes(tracker, region, detail) else text


def sequences(tracker: Tracker, forward: Sequence[int], again: Sequence[int], at: int) -> str:
    """Both orders of units around the first difference."""

    def show(groups: Sequence[int]) -> str:
        begin = max(0, at - 2)
        names = [show_name(tracker.map.fqn(group)) for group in groups[begin : at + 2]]
        names = ["…"] * (begin > 0) + names + ["…"] * (len(groups) > at + 2)
        return ", ".join(names) if len(groups) > at else ", ".join([*names, "the end"])

    return f"unit {at + 1}: {show(forward)} in the forward, {show(again)} in the recomputation"


def _cause(tracker: Tracker, region: int, detail: Mapping[str, Any]) -> str:
    known = causes(tracker, region, detail)
    if known:
        parts: list[str] = []
        for kind in dict.fromkeys(kind for kind, _ in known):
            texts = [text for own, text in known if own == kind]
            more = f" (and {len(texts) - 2} more)" if len(texts) > 2 else ""
            verb = "differs" if "state" in KINDS[kind] else "differ"
            parts.append(f"{KINDS[kind]} {verb}: {'; '.join(texts[:2])}{more}")
        return f"Cause: {'. Also '.join(parts)}."
    same = [KINDS[kind] for kind in KINDS if kind in (*detail["same"], "units")]
    missing = [KINDS[kind] for kind in KINDS if kind in detail["missing"]]
    first = detail.get("value")
    if missing:
        return f"Cause unknown: {_list(same)} are the same, {_list(missing)} were not recorded."
    where_ = f" {_first_value(first)}" if first else ""
    return (
        f"Cause: none of what was recorded ({_list(same)} are the same): an operator that is not deterministic, or state that "
        f"lies outside of the modules (a global variable, the environment, a generator of its own).{where_}"
    )


def _first_value(item: Mapping[str, Any]) -> str:
    by = f", saved by {item['by']}" if item.get("by") else ""
    return f"The first saved tensor whose value differs: position {item['position']}, {item['tensor']}{by}."


def describe_values(tracker: Tracker, group: int, region: int, detail: Mapping[str, Any]) -> tuple[str, str]:
    """``(message, hint)`` for a recomputation that PyTorch let pass although values differ."""
    who = f"{called(tracker, region, detail['name'])}, {where(tracker, group)}"
    if detail["differs"]:
        parts = []
        for kind in dict.fromkeys(item["kind"] for item in detail["differs"]):
            names = [item["what"] for item in detail["differs"] if item["kind"] == kind]
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            parts.append(f"{KINDS[kind]} differ: {', '.join(names[:2])}{more}")
        text = f"{who}, was recomputed from other values than its forward began with: {'; '.join(parts)}."
        return text + (f" {_first_value(detail['value'])}" if detail["value"] else ""), _hint(detail)
    text = f"{who}, computed other values in its recomputation than in its forward. {_first_value(detail['value'])}"
    return text, (
        "Gradients are those of the recomputation. If gathered parameters and inputs were looked at as well "
        '(fingerprint="all") and are the same: an operator is not deterministic (torch.use_deterministic_algorithms(True)), '
        "draws random numbers, or depends on state that is not looked at."
    )


def _hint(detail: Mapping[str, Any]) -> str:
    kinds = {item["kind"] for item in detail["differs"]}
    if "params" in kinds:
        return (
            "Look for what wrote into the gathered parameters between the forward and the recomputation: a buffer that is "
            "shared, an in-place change, a stream that was not waited for."
        )
    if "inputs" in kinds:
        return (
            "The recomputation was given another input. Of another dtype: torch before 2.13 skips FSDP2's input cast in the "
            "recomputation (pytorch PR #182580): upgrade, put fully_shard outside of the checkpoint, or cast the input before it. "
            "Of another value: look for an in-place change of it, or a cache that the forward fills (past_key_values)."
        )
    if "rng" in kinds:
        return (
            "Leave preserve_rng_state=True, and draw from torch's own generators: checkpoint brings back no other (random, numpy, "
            "a torch.Generator of the module)."
        )
    if detail.get("checkpoint") == "selective" and not kinds:
        return (
            "Let the unit be gathered in both or in neither: the same reshard_after_forward for units inside of the region and one "
            "forward per backward, or put fully_shard around the checkpoint instead of inside of it."
        )
    if "context" in kinds:
        return "Set the same global state around backward() as around the forward; checkpoint brings back autocast only."
    if "module" in kinds:
        return (
            "Leave what the forward depends on as it was until its backward is over: update such state outside of the checkpointed "
            "function (after the optimizer's step; eval(), freezing and exchanging modules as well), or leave the part that does it "
            "(a router) out of the checkpoint."
        )
    wanted = [name for name in ("inputs", "params") if name in detail["missing"]]
    if wanted or "rng" in detail["missing"]:
        return (
            f"Run again with FSDPTRACE_FINGERPRINT={','.join(wanted or ['inputs'])} to be told which of them differs, or call "
            "fsdptrace.diagnose(error) where the error is caught."
        )
    return (
        "Run fsdptrace.diagnose(error) where the CheckpointError is caught: it runs the region again and names the operator and "
        "its line. Or set torch.use_deterministic_algorithms(True)."
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
