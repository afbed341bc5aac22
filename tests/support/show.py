"""A trace as lines that a person can write down: one event each, indented under its parent."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from typing import Any

from fsdptrace import Event, ModelMap, Step

_DROP = ("state", "step")
_PASS_OF = {"forward": "forward", "backward": "backward"}
_STATES = {
    "pre_forward": ("idle", "forward"), "post_forward": ("forward", "idle"), "pre_backward": ("idle", "pre_backward"),
    "post_backward": ("pre_backward", "post_backward"),
}  # fmt: skip


def tree(events: Iterable[Event], model_map: ModelMap, drop: Iterable[str] = _DROP) -> str:
    """``events`` in order of ``seq``, one a line.

    The indentation is the parent: every event's parent is the last line above it that is indented less, and the function
    fails where that is not so. A pass is shown, as ``[recompute]``, where it is not its parent's.
    """
    drop = tuple(drop)
    open_: list[Event] = []
    out = []
    for event in sorted(events, key=lambda event: event.seq):
        if event.kind in drop:
            continue
        while open_ and open_[-1].seq != event.parent:
            open_.pop()
        assert open_ or event.parent is None, f"the parent {event.parent} of {event} is not open any more"
        usual = _PASS_OF.get(event.kind) or (open_[-1].pass_ if open_ else "none")
        shown = "" if event.pass_ == usual else f" [{event.pass_}]"
        out.append("    " * len(open_) + show(event, model_map) + shown)
        open_.append(event)
    return "\n".join(out)


class trace:  # noqa: N801  (reads as a sentence: trace(step).reads("..."))
    """The events of a step, or some events with their model map, to be compared with what a person worked out."""

    def __init__(self, events: Step | Iterable[Event], model_map: ModelMap | None = None, drop: Iterable[str] = _DROP) -> None:
        if model_map is None:
            assert isinstance(events, Step)
            model_map = events.map
        self.text = tree(events, model_map, drop)

    def reads(self, expected: str) -> None:
        """Fails with a diff where the events are not those of ``expected``; a comment there begins with two spaces and #."""
        got, wanted = self.text.splitlines(), text(expected).splitlines()
        if got != wanted:
            raise AssertionError("\n".join(difflib.unified_diff(wanted, got, "worked out", "recorded", lineterm="", n=30)))


def show(event: Event, model_map: ModelMap) -> str:
    """One event, with every field of its kind that is not the usual one."""
    d = event.data
    words: list[Any] = [event.kind]
    kind = event.kind
    group = None if event.group is None else model_map.groups[event.group]
    if group is not None:
        words.append(_name(group.fqn))
    if kind in ("unshard", "wait", "reshard", "discard", "reduce_scatter", "all_reduce"):
        words.append(d["bytes"])
    if kind in ("unshard", "reduce_scatter", "all_reduce"):
        assert group is not None
        usual = group.replicate_world if kind == "all_reduce" else group.world
        words += [f"of {d['world']}"] * (d["world"] != usual) + [d["dtype"]] * (d["dtype"] != "float32")
    if kind == "unshard":
        if d.get("issuer") is not None:
            words += ["by", _group(d["issuer"], model_map)]
        words += [d[name] for name in ("direction", "mode", "noop") if name in d]
    elif kind == "reshard":
        words += [d["to"]] * (d["to"] != "sharded") + [d["cause"]] * (d["cause"] != "hook")
    elif kind == "prefetch":
        words += [] if group is not None else ["(none)"]
        words += [">", _group(d["target"], model_map), d["direction"], d["mode"]]
    elif kind in ("reduce_scatter", "all_reduce"):
        words += [d["op"], f"tensors={d['tensors']}"]
    elif kind == "forward":
        words += [_unit(d["root"], model_map)] + ["no_grad"] * (not d["grad"]) + ["inference"] * d["inference"]
    elif kind == "backward":
        words += [] if d["last"] else ["not last"]
    elif kind == "flag":
        words.append(f"{d['flag']}={d['value']}")
    elif kind == "param_change":
        words += [d["cause"], f"tensors={d['tensors']}"]
    elif kind == "optimizer_step":
        words += [d["optimizer"], f"tensors={d['tensors']}", f"groups={d['groups']}"]
        words += [f"{name}={d[name]}" for name in ("temporary", "foreign") if d[name]]
    elif kind == "exception":
        words += [d["type"], "leaves", _unit(d["unit"], model_map)]
    elif kind in ("region", "recompute"):
        words += [d["name"]] + [f"saved={d['saved']}"] * (d["saved"] is not None)
        words += [] if d.get("saved_bytes") is None else [f"bytes={d['saved_bytes']}"]
        words += [] if d.get("end", "returned") == "returned" else [d["end"]]
        words += [d["checkpoint"]] * (d["checkpoint"] != "non_reentrant")
    elif kind == "state":
        words += [d["sharded"], *(["pending"] * d["pending"]), d["training"], f"order={d['order']}", f"bytes={d['bytes']}"]
    elif kind == "step":
        words += [f"{name}={d[name]}" for name in ("unsharded_bytes", "unsharded_peak", "past_backward_bytes", "dropped")]
    if kind == "pre_forward":
        words += [f"input={d['input_grad']}"] + [f"grad={d['grad']}"] * (d["grad"] != "on")
    elif kind == "post_backward":
        words += [f"tensors={d['tensors']}", d["by"]]
    if kind in _STATES and (d["before"], d["after"]) != _STATES[kind]:
        words.append(f"{d['before']}->{d['after']}")
    return " ".join(str(word) for word in words)


def _name(fqn: str) -> str:
    return fqn or "(root)"


def _group(group: int | None, model_map: ModelMap) -> str:
    return "(none)" if group is None else _name(model_map.groups[group].fqn)


def _unit(unit: int | None, model_map: ModelMap) -> str:
    return "the recording" if unit is None else _name(model_map.units[unit].fqn)


def text(expected: str) -> str:
    """``expected`` as written in a test: without its common indentation, blank lines and comments after ``#``."""
    lines = [line.split("  # ")[0].rstrip() for line in textwrap.dedent(expected).splitlines()]
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
