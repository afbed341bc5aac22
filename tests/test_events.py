"""The schema: every kind goes into integers, into a line, and back, unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdptrace import events as ev
from fsdptrace.events import Event, Texts, decode, encode
from fsdptrace.files import LineFormatter, read_event, step_line
from fsdptrace.model_map import GroupInfo, ModelMap, UnitInfo, clean_name


def group(number: int) -> GroupInfo:
    return GroupInfo(
        id=number, fqn=f"layers.{number}", unit=number, modules=(f"layers.{number}",), params=(), tensors=number + 2,
        bytes=288, sharded_bytes=72, dtype="bfloat16", reduce_dtype="float32", world=4, post_forward_world=4,
        replicate_world=1, mesh={"dp": 4}, reshard_after_forward=True, auto_policy=True, trainable=2, offload=False,
    )  # fmt: skip


UNITS = tuple(UnitInfo(i, f"layers.{i}", (f"layers.{i}",), (i,), True) for i in range(3))
MAP = ModelMap(0, "Net", UNITS, tuple(group(i) for i in range(3)))


def value_of(spec: ev.FieldSpec, variant: int) -> Any:
    if spec.codec == "enum":
        return spec.names[variant % len(spec.names)]
    if spec.codec == "bool":
        return bool(variant % 2)
    if spec.codec == "dtype":
        return ev.DTYPES[1 + variant % (len(ev.DTYPES) - 1)]
    if spec.codec in ("group", "unit"):
        return (None, 0, 2)[variant % 3]
    if spec.codec == "text":
        return ("", "SGD#1", 'a "quoted"\nname \u2603')[variant % 3]
    if spec.codec == "bytes":
        return (288, 0, 1 << 40)[variant % 3]
    return (0, 1, 4, 123456)[variant % 4]


def make(kind: str, variant: int, with_group: bool = True) -> Event:
    """An event of ``kind`` with fields that vary; derived ones as the formulae say."""
    spec = ev.SPECS[ev.KIND_NUMBER[kind]]
    data: dict[str, Any] = {}
    for field in spec.fields:
        if field.codec == "how":
            noop, direction, mode = ev.NOOPS[variant % 4], ev.DIRECTIONS[variant % 3], ev.MODES[variant % 4]
            data.update({name: text for name, text in (("noop", noop), ("direction", direction), ("mode", mode)) if text})
        elif field.codec == "op":
            data["op"] = ev.OPS[variant % 3]
            if which := ("", "0-1,4", "#0001f3a2")[variant % 3]:
                data["which"] = which
        elif field.codec != "derived":
            data[field.name] = value_of(field, variant)
    if kind == "unshard" and data["issuer"] is None:
        del data["issuer"]
    if "world" in data:
        data["world"] = (4, 1, 2)[variant % 3]
    names = [field.name for field in spec.fields if field.codec == "derived"]
    if "wire_bytes" in names:
        world = data["world"]
        part = data["bytes"] // world * (world - 1)
        data["wire_bytes"] = 2 * part if kind == "all_reduce" else part
    number = variant % 3 if with_group and kind != "step" else None
    if "tensors" in names and number is not None:
        data["tensors"] = number + 2
    return Event(
        seq=17 + variant, kind=kind, t0=10**15 + 1, t1=10**15 + 99, step=3, pass_=ev.PASSES[variant % 4],
        parent=None if variant % 2 else 5, model=variant % 2, group=number, thread=variant % 3, data=data,
    )  # fmt: skip


KINDS = [kind for kind in ev.KIND_NUMBER if kind != "violation"]


@pytest.mark.parametrize("kind", KINDS)
def test_records_and_back(kind: str) -> None:
    for variant in range(12):
        texts = Texts()
        event = make(kind, variant)
        record = encode(event, texts)
        assert len(record) == ev.WIDTH
        assert all(type(number) is int for number in record)
        assert decode(record, event.step, texts, MAP.tensors) == event


@pytest.mark.parametrize("kind", KINDS)
def test_lines_and_back(kind: str) -> None:
    models = {0: MAP, 1: MAP}
    for variant in range(12):
        texts = Texts()
        event = make(kind, variant)
        formatter = LineFormatter(texts, models)
        record = encode(event, texts)
        for _ in range(2):  # the second time from its caches
            line = formatter.lines(record, 0, ev.WIDTH, event.step)
            assert line.endswith("}\n")
            assert line.count("\n") == 1
            got = read_event(json.loads(line), models[event.model])
            assert got == event if kind != "step" else got.data == {**event.data, **got.data}


def test_violation_line() -> None:
    texts = Texts()
    body = {"rule": "gather-after-backward", "severity": "error", "fqn": "layers.0", "message": 'a "b"', "hint": "",
            "evidence": [3, 9], "bytes": 288, "cause": "x"}  # fmt: skip
    record = (ev.VIOLATION, 20, 5, 5, 1, 9, 2, texts.put_once(json.dumps(body)), 0, 0, 0, 0)
    line = json.loads(LineFormatter(texts, {0: MAP}).lines(record, 0, ev.WIDTH, 7))
    assert {name: line[name] for name in body} == body
    assert (line["kind"], line["group"], line["step"], line["parent"], line["pass"]) == ("violation", 1, 7, 9, "backward")
    event = read_event(line, MAP)
    assert event["violation"]["evidence"] == [3, 9]


def test_usual_values_are_left_out() -> None:
    texts = Texts()
    formatter = LineFormatter(texts, {0: MAP})
    # A gather as most are: of the group's world and dtype, by its own hook, in a forward, with a parent.
    record = (ev.UNSHARD, 6, 100, 200, 1, 5, ev.PASS_FORWARD, 288, 4, ev.DTYPE_NUMBER["bfloat16"], -1, 0)
    assert json.loads(formatter.lines(record, 0, ev.WIDTH, 2)) == {
        "seq": 6, "kind": "unshard", "pass": "forward", "group": 1, "t0": 100, "t1": 200, "step": 2, "parent": 5, "bytes": 288,
    }  # fmt: skip
    # The same over a smaller mesh, in another dtype, prefetched.
    how = ev.pack_how(0, 2, 1)
    record = (ev.UNSHARD, 6, 100, 200, 1, 5, ev.PASS_FORWARD, 288, 2, ev.DTYPE_NUMBER["uint8"], 2, how)
    line = json.loads(formatter.lines(record, 0, ev.WIDTH, 2))
    assert (line["world"], line["dtype"], line["issuer"], line["direction"], line["mode"]) == (
        2,
        "uint8",
        2,
        "backward",
        "implicit",
    )
    # An ordinary post-backward needs to say nothing but its number of gradients.
    record = (ev.POST_BACKWARD, 9, 1, 2, 0, 3, ev.PASS_BACKWARD, 2, 3, 0, 4, 0)
    assert set(json.loads(formatter.lines(record, 0, ev.WIDTH, 0))) == {
        "seq", "kind", "pass", "group", "t0", "t1", "step", "parent", "tensors",
    }  # fmt: skip


def test_step_line_counts() -> None:
    texts = Texts()
    records: list[int] = []
    for number, kind in enumerate((ev.FORWARD, ev.UNSHARD, ev.UNSHARD, ev.WAIT, ev.STEP), 1):
        records += (kind, number, 1, 2, -1, 0, 0, 0, 1, 0, 0, 0)
    line = json.loads(step_line(LineFormatter(texts, {}), records, 4, 3))
    assert line["counts"] == {"unshard": 2, "wait": 1, "forward": 1}
    assert (line["kind"], line["step"], line["step_dropped"]) == ("step", 4, 3)


def test_wire_bytes() -> None:
    # All-gather of 288 bytes over 4: three of four parts. Over 1: none. All-reduce: a reduce-scatter and an all-gather.
    assert ev.wire_bytes(ev.UNSHARD, 288, 4) == 216
    assert ev.wire_bytes(ev.REDUCE_SCATTER, 288, 4) == 216
    assert ev.wire_bytes(ev.ALL_REDUCE, 288, 4) == 432
    assert ev.wire_bytes(ev.UNSHARD, 288, 1) == 0


def test_every_kind_fits_a_record() -> None:
    assert [spec.name for spec in ev.SPECS.values()] == list(ev.KINDS[1:])
    for spec in ev.SPECS.values():
        assert len([field for field in spec.fields if field.codec != "derived"]) <= ev.WIDTH - ev.A, spec.name
        assert all(field.doc for field in spec.fields)
        assert spec.when


def test_texts() -> None:
    texts = Texts()
    assert texts.put("a") == texts.put("a") == 1
    assert texts.put("b") == 2
    assert [texts.get(i) for i in (0, 1, 2, 9)] == ["", "a", "b", ""]
    once = [texts.put_once(str(i)) for i in range(5000)]
    assert all(index < 0 for index in once)
    assert len(set(once)) == 5000
    # The newest 4,096 are kept.
    assert texts.get(once[-1]) == "4999"
    assert texts.get(once[5000 - 4096]) == "904"
    assert texts.get(once[0]) == ""


def test_model_line_and_back() -> None:
    line = json.loads(json.dumps(MAP.to_json()))
    assert ModelMap.from_json(line) == MAP
    # A later version adds fields: they are ignored.
    line["groups"][0]["colour"] = "blue"
    line["more"] = 1
    assert ModelMap.from_json(line) == MAP
    del line["groups"][0]["world"]
    with pytest.raises(TypeError):
        ModelMap.from_json(line)


def test_clean_name() -> None:
    assert clean_name("layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert clean_name("_orig_mod.layers._fsdp_wrapped_module.0") == "layers.0"
    assert clean_name("my_layer._own.x") == "my_layer._own.x"
    assert clean_name("_orig_mod") == ""
