"""From lines to records: the integers that rules and summaries read, straight from a line's data; and what they say.

The same as ``events.encode(files.read_event(...))`` without the :class:`~fsdptrace.events.Event` in between, which would
be most of the time that a large trace takes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsdptrace import events as ev
from fsdptrace.model_map import ModelMap, show_name


def _decoder() -> tuple[Callable[[bytes], Any], tuple[type[Exception], ...]]:
    """The fastest JSON parser that is installed, and what it raises on text that is none."""
    try:
        msgspec = importlib.import_module("msgspec")
        return msgspec.json.decode, (msgspec.DecodeError, ValueError, RecursionError)
    except ImportError:
        pass
    try:
        return importlib.import_module("orjson").loads, (ValueError, RecursionError)
    except ImportError:
        return json.loads, (ValueError, RecursionError)


parse, PARSE_ERRORS = _decoder()

_PASS_NUMBER = {name: number for number, name in enumerate(ev.PASSES)}
_NOOP = {name: number for number, name in enumerate(ev.NOOPS)}
_DIRECTION = {name: number for number, name in enumerate(ev.DIRECTIONS)}
_MODE = {name: number for number, name in enumerate(ev.MODES)}

_Read = Callable[[Mapping[str, Any], "ModelMap | None", int, ev.Texts], int]


def _reader(spec: ev.FieldSpec) -> _Read:
    """How the field's integer is had from a line."""
    name = spec.name
    usual = spec.usual
    if spec.codec == "how":
        return lambda data, model, group, texts: (
            _NOOP[data.get("noop", "")]
            + ev.DIRECTION_UNIT * _DIRECTION[data.get("direction", "")]
            + ev.MODE_UNIT * _MODE[data.get("mode", "")]
        )
    if spec.codec == "op":
        operators = {text: number for number, text in enumerate(spec.names)}
        return lambda data, model, group, texts: (
            operators[data.get("op", spec.names[0])] + ev.OP_UNIT * (ev.read_which(data["which"]) if "which" in data else 0)
        )
    if spec.codec == "enum":
        numbers = {text: number for number, text in enumerate(spec.names)}
        default = spec.names[usual] if isinstance(usual, int) else spec.names[0]
        return lambda data, model, group, texts: numbers[data.get(name, default)]
    if spec.codec == "dtype":
        return lambda data, model, group, texts: ev.DTYPE_NUMBER.get(
            data[name] if name in data else _of_model(model, group, "dtype"), 0
        )
    if spec.codec in ("group", "unit"):
        return lambda data, model, group, texts: _id(data.get(name), model, spec.codec)
    if spec.codec == "text":
        return lambda data, model, group, texts: texts.put(str(data.get(name, "")))
    if spec.codec == "json":
        return lambda data, model, group, texts: texts.put_once(json.dumps(data.get(name)))
    if usual == "model":
        return lambda data, model, group, texts: int(data[name] if name in data else _of_model(model, group, name) or 1)
    missing = usual if isinstance(usual, int) else 0
    if spec.codec in ("bytes", "ns", "count"):
        return lambda data, model, group, texts: _bytes(data.get(name, missing))
    return lambda data, model, group, texts: int(data.get(name, missing))


def _id(value: Any, model: ModelMap | None, codec: str) -> int:
    if value is None:
        return ev.NONE
    if model is None or not 0 <= value < len(model.groups if codec == "group" else model.units):
        raise IndexError(f"no {codec} {value}")
    return int(value)


def _bytes(value: Any) -> int:
    return ev.NONE if value is None else int(value)


def _of_model(model: ModelMap | None, group: int, name: str) -> Any:
    return getattr(model.groups[group], name) if model is not None and group >= 0 else None


_OF_A_GROUP = frozenset(ev.KINDS[kind] for kind in (
    ev.UNSHARD, ev.WAIT, ev.RESHARD, ev.DISCARD, ev.PRE_FORWARD, ev.POST_FORWARD, ev.PRE_BACKWARD, ev.POST_BACKWARD,
    ev.REDUCE_SCATTER, ev.ALL_REDUCE, ev.STATE, ev.FLAG, ev.PARAM_CHANGE,
))  # fmt: skip
_PLANS: Mapping[str, tuple[int, tuple[_Read, ...], tuple[int, ...]]] = {
    spec.name: (
        spec.number,
        tuple(_reader(field) for field in ev.WRITTEN[spec.number]),
        (0,) * (ev.WIDTH - ev.A - len(ev.WRITTEN[spec.number])),
    )
    for spec in ev.SPECS.values()
    if spec.number != ev.VIOLATION
}


def record_of(data: Mapping[str, Any], model: ModelMap | None, texts: ev.Texts) -> tuple[int, ...]:
    """The record of an event line (violations have none).

    Raises:
        KeyError, ValueError, TypeError: the line lacks a common field, or a value is none of ours.
        IndexError: it names a group or unit that the model has not.
    """
    number, readers, rest = _PLANS[data["kind"]]
    if number == ev.FORWARD and data.get("root") is None:
        raise KeyError("root")
    group = data.get("group")
    if group is None:
        if data["kind"] in _OF_A_GROUP:
            raise KeyError("group")
        group = ev.NONE
    elif model is None or not 0 <= group < len(model.groups):
        raise IndexError(f"no group {group}")
    context = (
        _PASS_NUMBER[data.get("pass", "none")]
        + ev.MODEL_UNIT * int(data.get("model", 0))
        + ev.THREAD_UNIT * int(data.get("thread", 0))
    )
    payload = [read(data, model, group, texts) for read in readers]
    return (number, data["seq"], data["t0"], data["t1"], group, data.get("parent") or 0, context, *payload, *rest)


_CODECS = {number: {field.name: field.codec for field in spec.fields} for number, spec in ev.SPECS.items()}


def fields_of(record: Sequence[int], model: ModelMap, texts: ev.Texts) -> Iterator[tuple[str, str, Any]]:
    """``(name, codec, value)`` of what a record says of its kind, for a reader: names of units for their numbers (the root as
    ``(root)``), yes and no; what says nothing is left out."""
    codecs = _CODECS[record[ev.KIND]]
    for name, value in ev.decode(record, 0, texts, model.tensors).data.items():
        codec = codecs.get(name, "")
        if value is None or value == "":
            continue
        if codec == "group":
            value = show_name(model.fqn(value))
        elif codec == "unit":
            value = show_name(model.units[value].fqn)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        yield name, codec, value
