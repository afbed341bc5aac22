"""The event schema: kinds, fields, units. The only definition.

Everything that writes, reads, checks or documents events takes it from here; ``docs/events.md`` is generated from it.

On the training thread an event is :data:`WIDTH` small integers appended to one flat list (no tuple, no object, no
string: a retained flat list of integers costs no garbage collection). The same integers are what a rule sees, online
and when it reads a file, so that both give the same verdict. :class:`Event` is the readable form.

Times are ``time.perf_counter_ns`` of the host, in ns; the header of a file maps them to Unix time. Bytes are whole bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SCHEMA: Final = "fsdptrace/1"

# Event kinds. The numbers live in memory only; files carry the names.
UNSHARD: Final = 1
WAIT: Final = 2
RESHARD: Final = 3
DISCARD: Final = 4
PREFETCH: Final = 5
PRE_FORWARD: Final = 6
POST_FORWARD: Final = 7
PRE_BACKWARD: Final = 8
POST_BACKWARD: Final = 9
REDUCE_SCATTER: Final = 10
ALL_REDUCE: Final = 11
FORWARD: Final = 12
BACKWARD: Final = 13
REGION: Final = 14
RECOMPUTE: Final = 15
STATE: Final = 16
FLAG: Final = 17
PARAM_CHANGE: Final = 18
OPTIMIZER_STEP: Final = 19
EXCEPTION: Final = 20
STEP: Final = 21
VIOLATION: Final = 22
PARAM: Final = 23
DEVICE: Final = 24
MEMORY: Final = 25
MISMATCH: Final = 26

#: Names of the kinds, by number. Index 0 is unused.
KINDS: Final[tuple[str, ...]] = (
    "", "unshard", "wait", "reshard", "discard", "prefetch", "pre_forward", "post_forward", "pre_backward",
    "post_backward", "reduce_scatter", "all_reduce", "forward", "backward", "region", "recompute", "state", "flag",
    "param_change", "optimizer_step", "exception", "step", "violation", "param", "device", "memory", "mismatch",
)  # fmt: skip
KIND_NUMBER: Final[Mapping[str, int]] = {name: number for number, name in enumerate(KINDS) if name}

# Positions in a record of the ring.
KIND: Final = 0
SEQ: Final = 1
T0: Final = 2
T1: Final = 3
GROUP: Final = 4
PARENT: Final = 5
CONTEXT: Final = 6
A: Final = 7
WIDTH: Final = 12
"""Integers per record: kind, seq, t0, t1, group, parent, context, then five that depend on the kind."""

NONE: Final = -1
"""Stands for "no group", "no unit" in a record."""

# The context packs pass, model and thread: pass + 4 * model + 1024 * thread.
PASS_NONE: Final = 0
PASS_FORWARD: Final = 1
PASS_BACKWARD: Final = 2
PASS_RECOMPUTE: Final = 3
PASSES: Final[tuple[str, ...]] = ("none", "forward", "backward", "recompute")
MODEL_UNIT: Final = 4
THREAD_UNIT: Final = 1024
MAX_MODELS: Final = THREAD_UNIT // MODEL_UNIT

# Enumerations of the kinds' own fields.
NOOPS: Final[tuple[str, ...]] = ("", "open", "pending", "disabled")
DIRECTIONS: Final[tuple[str, ...]] = ("", "forward", "backward")
MODES: Final[tuple[str, ...]] = ("", "implicit", "explicit", "manual")
RESHARD_TO: Final[tuple[str, ...]] = ("sharded", "post_forward")
RESHARD_CAUSES: Final[tuple[str, ...]] = ("hook", "manual", "state_dict", "reset")
#: FSDP2's ``TrainingState`` by its value (the same in torch 2.6 to 2.15).
TRAINING_STATES: Final[tuple[str, ...]] = ("", "forward", "pre_backward", "post_backward", "idle")
#: ``ShardedState`` of _fsdp_param by its value (the same in 2.6 to 2.15).
SHARDED_STATES: Final[tuple[str, ...]] = ("", "sharded", "post_forward", "unsharded")
INPUT_GRAD: Final[tuple[str, ...]] = ("none", "hooked", "unhooked", "unknown", "integer")
GRAD_MODES: Final[tuple[str, ...]] = ("off", "on", "paused")
BY: Final[tuple[str, ...]] = ("autograd", "final_callback", "user")
OPS: Final[tuple[str, ...]] = ("avg", "sum", "premul_sum")
FLAGS: Final[tuple[str, ...]] = (
    "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "reshard_after_forward",
    "unshard_in_backward", "is_last_backward",
)  # fmt: skip
#: Ways to checkpoint: ``use_reentrant=False``, ``use_reentrant=True``, and the former with contexts that save some operators' results.
CHECKPOINTS: Final[tuple[str, ...]] = ("non_reentrant", "reentrant", "selective")
#: How a recomputation ended. Early stop: PyTorch ended it once the last tensor that was saved in the forward was there again.
ENDS: Final[tuple[str, ...]] = ("returned", "early_stop", "error")
MISMATCHES: Final[tuple[str, ...]] = ("count", "metadata", "values")
CHANGE_CAUSES: Final[tuple[str, ...]] = ("optimizer_step", "load", "write")
ABOUT: Final[tuple[str, ...]] = ("", "freed", "state_dict", "all_gather", "reduction")
#: What was seen of a single parameter, and why it matters.
PARAM_FACTS: Final[tuple[str, ...]] = (
    "", "copy_in_optimizer", "outside_in_optimizer", "outside_with_gradient", "requires_grad_of_copy", "hooks_of_copy",
    "copy_written", "gradient_of_copy", "dtype", "tied", "inference_buffer", "ignored_with_gradient",
    "outside", "ignored", "original_in_optimizer", "old_shard_in_optimizer",
)  # fmt: skip
#: dtype names by the number a record carries; unknown ones are 0.
DTYPES: Final[tuple[str, ...]] = (
    "unknown", "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "uint8", "int8",
    "complex64", "complex128", "int32", "int64", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
DTYPE_NUMBER: Final[Mapping[str, int]] = {name: number for number, name in enumerate(DTYPES)}

# `how` of an unshard or prefetch packs three enumerations: noop + 4 * direction + 16 * mode.
DIRECTION_UNIT: Final = 4
MODE_UNIT: Final = 16

# `op` of a reduction packs the operator and, where not every parameter took part, which did: operator + 4 * which.
OP_UNIT: Final = 4
WHICH_BITS: Final = 56
"""Parameters of a group that ``which`` tells one by one; of a larger group it is a hash with bit 56 set."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a kind.

    ``codec`` says how the integer of the record becomes a value: ``int``, ``bytes`` (an int, in bytes), ``ns`` (an int, in ns), ``group`` and
    ``unit`` (an id, ``None`` for -1), ``bool``, ``enum`` (an index into ``names``), ``dtype``, ``how`` (the three
    packed enumerations noop, direction, mode), ``op`` (operator and which parameters took part), ``text`` (an index into the
    session's table of strings), ``json`` (such an index; the text is JSON), ``count`` (an int, ``None`` for -1), ``derived``
    (not in the record: worked out from the others and the model map by :func:`decode`).

    ``usual`` is the value that a file leaves out: an integer of the record, or ``"model"`` for what the group's entry
    in the ``model`` line says.
    """

    name: str
    codec: str
    doc: str
    names: tuple[str, ...] = ()
    usual: int | str | None = None


@dataclass(frozen=True, slots=True)
class KindSpec:
    """One kind of event: when it is recorded and what it adds to the common fields."""

    number: int
    name: str
    when: str
    fields: tuple[FieldSpec, ...]


def _f(name: str, codec: str, doc: str, names: tuple[str, ...] = (), usual: int | str | None = None) -> FieldSpec:
    return FieldSpec(name, codec, doc, names, usual)


def _states(before: int, after: int) -> tuple[FieldSpec, FieldSpec]:
    return (
        _f("before", "enum", "training state at the begin of the hook", TRAINING_STATES, before),
        _f("after", "enum", "training state at its end", TRAINING_STATES, after),
    )


_BYTES_COMM = (
    _f("bytes", "bytes", "size of the collective's input on this rank, padding of uneven shards included"),
    _f("world", "int", "ranks in the collective's process group"),
    _f("dtype", "dtype", "dtype on the wire"),
    _f("tensors", "int", "parameters that really had a gradient"),
    _f("op", "op", "op: reduction operator; which: the parameters that had a gradient", OPS, 0),
    _f("wire_bytes", "derived", "what this rank receives"),
)

SPECS: Final[Mapping[int, KindSpec]] = {
    spec.number: spec
    for spec in (
        KindSpec(
            UNSHARD, "unshard", "an all-gather is issued, or was asked for and not needed",
            (
                _f("bytes", "bytes", "unsharded bytes, padding of uneven shards included; 0 for a no-op"),
                _f("world", "int", "ranks gathered from", usual="model"),
                _f("dtype", "dtype", "dtype that is gathered; uint8 where dtypes are mixed", usual="model"),
                _f("issuer", "group", "the group in whose hook another group's gather was asked for"),
                _f("how", "how", "noop: why nothing was issued (open, pending, disabled); direction and mode of a "
                   "prefetch; mode manual for a call of the user's"),
                _f("tensors", "derived", "parameters in the group"),
                _f("wire_bytes", "derived", "what this rank receives; 0 at world size 1"),
            ),
        ),
        KindSpec(
            WAIT, "wait", "the group becomes usable: the gather is waited for and copied out",
            (_f("bytes", "bytes", "unsharded bytes"),),
        ),
        KindSpec(
            RESHARD, "reshard", "the group is freed, by whatever way",
            (
                _f("bytes", "bytes", "unsharded bytes freed"),
                _f("to", "enum", "fully sharded, or resharded to the smaller post-forward mesh", RESHARD_TO, 0),
                _f("cause", "enum", "an FSDP hook, a call of the user's, a state-dict hook, reset_iter_state",
                   RESHARD_CAUSES, 0),
                _f("tensors", "derived", "parameters in the group"),
            ),
        ),
        KindSpec(
            DISCARD, "discard", "a pending gather is thrown away at the end of a backward, or by reset_iter_state",
            (
                _f("bytes", "bytes", "unsharded bytes that were gathered for nothing"),
                _f("frozen", "bool", "none of its parameters requires grad now", usual=0),
            ),
        ),
        KindSpec(
            PREFETCH, "prefetch", "the call that issues unshards for another group (it is their parent); the event's "
            "group is the source, null where a unit without parameters asks",
            (
                _f("target", "group", "the group that is gathered ahead"),
                _f("how", "how", "direction and mode"),
            ),
        ),
        KindSpec(
            PRE_FORWARD, "pre_forward", "the group's pre-forward hook",
            (*_states(4, 1), _f("input_grad", "enum", "whether an input carries grad and is hooked for the "
                                "post-backward; unhooked: hidden in an object; integer: no tensor of floating point went in", INPUT_GRAD, 1),
             _f("grad", "enum", "grad mode: off, on, or paused: off inside an outermost forward that has it on (as in "
                "reentrant checkpointing)", GRAD_MODES, 1)),
        ),
        KindSpec(POST_FORWARD, "post_forward", "the group's post-forward hook", _states(1, 4)),
        KindSpec(PRE_BACKWARD, "pre_backward", "the group's pre-backward hook (first of a pass)", _states(4, 2)),
        KindSpec(
            POST_BACKWARD, "post_backward", "the group's post-backward",
            (
                *_states(2, 3),
                _f("by", "enum", "who ran it", BY, 0),
                _f("tensors", "int", "parameters with an unsharded gradient, accumulated ones included"),
            ),
        ),
        KindSpec(
            REDUCE_SCATTER, "reduce_scatter", "gradients of the group are reduce-scattered; times are those of the "
            "enclosing post_backward (host issue time)", _BYTES_COMM,
        ),
        KindSpec(ALL_REDUCE, "all_reduce", "gradients of the group are all-reduced (HSDP, replicate)", _BYTES_COMM),
        KindSpec(
            FORWARD, "forward", "an outermost forward",
            (
                _f("root", "unit", "the unit whose forward it is"),
                _f("grad", "bool", "grad mode is enabled"),
                _f("inference", "bool", "inference mode is on"),
                _f("start", "int", "what FSDP2 remembered when it began, as bits: 1 an earlier forward's root, 2 a final "
                   "callback marked queued, 4 the unit was not initialised yet, so that this makes it the root", usual=0),
                _f("order", "int", "length of the shared post-forward order list when it began", usual=0),
            ),
        ),
        KindSpec(
            BACKWARD, "backward", "the outermost autograd graph task; its last final callback ends it",
            (
                _f("last", "bool", "is_last_backward was set: pending gathers and the order list were cleared"),
                _f("finished", "bool", "the root's final callback ran; false after an error", usual=1),
            ),
        ),
        KindSpec(
            REGION, "region", "a checkpointed function's forward, with grad; the event's group is that of the unit it lies in",
            (
                _f("region", "int", "number of the region: the `seq` of this event"),
                _f("saved", "count", "tensors that autograd saved for its backward; null where PyTorch does not tell (reentrant)"),
                _f("saved_bytes", "bytes", "what they would take, each counted by itself; null where PyTorch keeps no metadata"),
                _f("checkpoint", "enum", "which kind of checkpointing", CHECKPOINTS, 0),
                _f("name", "text", "the module's name, or the function's with that of the module it belongs to"),
            ),
        ),
        KindSpec(
            RECOMPUTE, "recompute", "a checkpointed function's recomputation, from the call of the function to its end",
            (
                _f("region", "int", "`seq` of the region's `region` event"),
                _f("saved", "count", "tensors that it saved"),
                _f("end", "enum", "how it ended; early_stop: the last tensor that was needed was there", ENDS, 1),
                _f("checkpoint", "enum", "which kind of checkpointing", CHECKPOINTS, 0),
                _f("name", "text", "as in the `region` event"),
            ),
        ),
        KindSpec(
            STATE, "state", "snapshot of a group when recording starts, and after reset_iter_state",
            (
                _f("sharded", "enum", "where the parameters are", SHARDED_STATES),
                _f("pending", "bool", "a gather is issued and not waited for"),
                _f("training", "enum", "training state", TRAINING_STATES),
                _f("order", "int", "length of the shared post-forward order list"),
                _f("bytes", "bytes", "unsharded bytes of the group when open or pending"),
            ),
        ),
        KindSpec(
            FLAG, "flag", "a switch of the group was seen changed, when it was used or at a step",
            (
                _f("flag", "enum", "which", FLAGS),
                _f("value", "bool", "its new value"),
            ),
        ),
        KindSpec(
            PARAM_CHANGE, "param_change", "the group's shards changed",
            (
                _f("cause", "enum", "an optimizer's step, a load, a write", CHANGE_CAUSES),
                _f("tensors", "int", "parameters concerned, as far as known"),
                _f("unreduced", "int", "of an optimizer's step: parameters whose gradient lay on the gathered copy, not reduced", usual=0),
                _f("taken", "int", "of an optimizer's step: parameters without a gradient that have a post-accumulate-grad hook", usual=0),
            ),
        ),
        KindSpec(
            OPTIMIZER_STEP, "optimizer_step", "an optimizer that holds parameters of the model stepped",
            (
                _f("optimizer", "text", "class name and number"),
                _f("tensors", "int", "its parameters that are shards of the model"),
                _f("groups", "int", "in how many groups"),
                _f("temporary", "int", "its parameters that are gathered copies, not shards"),
                _f("foreign", "int", "its parameters that are in no group of the model"),
            ),
        ),
        KindSpec(
            EXCEPTION, "exception", "an exception leaves a hooked module, a group's hook, state-dict code or the recording",
            (
                _f("type", "text", "qualified class name"),
                _f("unit", "unit", "the unit it leaves"),
                _f("about", "enum", "freed: its text is that of a use of parameters that are not gathered; state_dict: it came "
                   "out of state-dict code; all_gather, reduction: out of the group's collective", ABOUT, 0),
                _f("used", "group", "whose parameters were used, where that was not in a forward of its unit"),
                _f("through", "text", "and through what: `module:method`, names as in the model line", usual=0),
            ),
        ),
        KindSpec(
            STEP, "step", "a step boundary",
            (
                _f("unsharded_bytes", "bytes", "open or pending now"),
                _f("unsharded_peak", "bytes", "peak since the previous boundary"),
                _f("past_backward_bytes", "bytes", "open or pending now although the backward is over"),
                _f("dropped", "int", "events dropped so far"),
                _f("past_backward_peak", "bytes", "at most of that since the previous boundary: the curve of a leak", usual=0),
                _f("counts", "derived", "events of the step by kind"),
            ),
        ),
        KindSpec(
            VIOLATION, "violation", "a rule was broken",
            (_f("violation", "text", "rule, severity, module, message, hint and evidence, as JSON"),),
        ),
        KindSpec(
            PARAM, "param", "something was seen of a single parameter that breaks a rule; never of a healthy one",
            (
                _f("fact", "enum", "what: a gathered copy, a parameter of no group, or one that the model no longer has (of before "
                   "fully_shard, or a shard that was replaced) is held by an optimizer or got a gradient; "
                   "a copy was changed (requires_grad, hooks, values, gradient) though FSDP2 gathers it anew; trainable "
                   "parameters of one group differ in dtype; it was tied to one in another group; its buffers were made under "
                   "inference_mode", PARAM_FACTS),
                _f("name", "text", "the parameter, as the recorded model names it"),
                _f("other", "group", "the group that the parameter it is tied to lies in"),
                _f("detail", "text", "what differs: a dtype, an optimizer, the name of the tied parameter"),
                _f("bytes", "bytes", "of the parameter, whole", usual=0),
            ),
        ),
        KindSpec(
            DEVICE, "device", "what the device did in an earlier step, as soon as its timing events had completed; t0 and t1 are "
            "the time at which that was known",
            (
                _f("of_step", "int", "the step"),
                _f("gather_ns", "ns", "time that all-gathers ran on their stream"),
                _f("reduce_ns", "ns", "time that reduce-scatters and all-reduces ran on theirs"),
                _f("exposed_ns", "ns", "time that compute waited for them"),
                _f("span_ns", "ns", "device time of the whole step; null when its events never completed"),
            ),
        ),
        KindSpec(
            MEMORY, "memory", "the accelerator's allocator after the wait or post-backward that is its parent, in steps that are "
            "timed and written with all their events",
            (
                _f("allocated", "bytes", "given out to tensors"),
                _f("reserved", "bytes", "held from the device"),
            ),
        ),
        KindSpec(
            MISMATCH, "mismatch", "a recomputation did not match the forward of its region; the event's group is the region's",
            (
                _f("region", "int", "`seq` of the `region` event"),
                _f("what", "enum", "what does not match: the count of saved tensors, their metadata, or values", MISMATCHES),
                _f("recompute", "int", "`seq` of the `recompute` event"),
                _f("detail", "json", "the first tensors that differ, what is known of the cause, what was not recorded"),
            ),
        ),
    )
}  # fmt: skip

#: Fields of a kind that a record has, in its order: all but those that are worked out.
WRITTEN: Final[Mapping[int, tuple[FieldSpec, ...]]] = {
    number: tuple(field for field in spec.fields if field.codec != "derived") for number, spec in SPECS.items()
}

#: The common fields of every event and what they mean, for the docs.
COMMON_FIELDS: Final[tuple[tuple[str, str], ...]] = (
    ("seq", "number of the event in this process, given when the call begins: children have higher numbers than "
            "their parent"),
    ("kind", "one of the kinds below"),
    ("t0", "begin, ns of `time.perf_counter_ns`"),
    ("t1", "end, ns"),
    ("step", "number of the step, counted per recorded root"),
    ("pass", "`forward`, `backward`, `recompute` or `none`; left out in a file when `none`"),
    ("parent", "`seq` of the event in which this one happened; left out when there is none"),
    ("model", "0, 1, … in the order in which recorded roots appeared; left out when 0"),
    ("group", "id of the param group in the `model` line; left out when there is none"),
    ("thread", "0, 1, … in the order in which threads appeared; left out when 0"),
)  # fmt: skip


def pack_how(noop: int = 0, direction: int = 0, mode: int = 0) -> int:
    """The integer for ``how`` from the positions in :data:`NOOPS`, :data:`DIRECTIONS` and :data:`MODES`."""
    return noop + DIRECTION_UNIT * direction + MODE_UNIT * mode


def unpack_how(how: int) -> tuple[str, str, str]:
    """``(noop, direction, mode)`` as names; empty strings where nothing is to say."""
    return NOOPS[how % 4], DIRECTIONS[how // DIRECTION_UNIT % 4], MODES[how // MODE_UNIT]


def pack_which(present: Sequence[bool]) -> int:
    """``which`` for the parameters of a group, in the group's order, of which some take part in a reduction; 0 for all."""
    if all(present):
        return 0
    bits = sum(1 << i for i, there in enumerate(present) if there)
    if len(present) <= WHICH_BITS:
        return bits
    return 1 << WHICH_BITS | zlib.crc32(bits.to_bytes(len(present) // 8 + 1, "little"))


def which_text(which: int) -> str:
    """``which`` as a file has it: positions such as ``0-1,4``, or ``#`` and a hash; empty for all parameters."""
    if which >> WHICH_BITS:
        return f"#{which & 0xFFFFFFFF:08x}"
    parts: list[str] = []
    for i in range(which.bit_length()):
        if which >> i & 1 and not (i and which >> (i - 1) & 1):
            last = i
            while which >> (last + 1) & 1:
                last += 1
            parts.append(str(i) if last == i else f"{i}-{last}")
    return ",".join(parts)


def read_which(text: str) -> int:
    """The inverse of :func:`which_text`.

    Raises:
        ValueError: the text is none of its.
    """
    if text.startswith("#"):
        return 1 << WHICH_BITS | int(text[1:], 16) & 0xFFFFFFFF
    which = 0
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < WHICH_BITS:
            raise ValueError(f"no parameters {part!r}")
        which |= (1 << high + 1) - (1 << low)
    return which


@dataclass(frozen=True, slots=True)
class Event:
    """One event, readable. ``data`` holds the fields of its kind (see :data:`SPECS`), by name.

    ``pass_`` is ``forward``, ``backward``, ``recompute`` or ``none``. ``parent`` and ``group`` are ``None`` without one.
    """

    seq: int
    kind: str
    t0: int
    t1: int
    step: int
    pass_: str
    parent: int | None
    model: int
    group: int | None
    thread: int
    data: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Field ``name`` of the kind; ``KeyError`` when the kind has no such field."""
        return self.data[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Field ``name`` of the kind, or ``default``."""
        return self.data.get(name, default)


class Texts:
    """The session's table of strings: records carry the index. Grows only with new strings.

    One-off texts (violations, the counts of a step) are put with :meth:`put_once` and forgotten when read.
    """

    __slots__ = ("_index", "_once", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._index: dict[str, int] = {"": 0}
        self._once: dict[int, str] = {}

    def put(self, text: str) -> int:
        """Index of ``text``, new or known."""
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self._texts)
            self._texts.append(text)
        return index

    def put_once(self, text: str) -> int:
        """A negative index for a text that will hardly come again; at most 4,096 are kept."""
        index = -(len(self._once) + 1) if not self._once else min(self._once) - 1
        self._once[index] = text
        if len(self._once) > 4096:
            del self._once[max(self._once)]
        return index

    def get(self, index: int) -> str:
        """The text of ``index``; empty when it has been forgotten."""
        if index < 0:
            return self._once.get(index, "")
        return self._texts[index] if index < len(self._texts) else ""


def wire_bytes(kind: int, size: int, world: int) -> int:
    """Bytes that one rank receives for a collective of ``size`` bytes over ``world`` ranks.

    All-gather and reduce-scatter: every rank receives all parts but its own. All-reduce: both, one after the other.
    """
    if world <= 1:
        return 0
    part = size // world * (world - 1)
    return 2 * part if kind == ALL_REDUCE else part


def decode(record: Sequence[int], step: int, texts: Texts, tensors: Mapping[int, int] | Sequence[int] | None = None) -> Event:
    """The :class:`Event` of :data:`WIDTH` integers. ``tensors`` maps a group's id to its number of parameters."""
    kind, seq, t0, t1, group, parent, context = record[:A]
    data: dict[str, Any] = {}
    position = A
    for spec in SPECS[kind].fields:
        if spec.codec == "derived":
            if spec.name == "wire_bytes":
                data["wire_bytes"] = wire_bytes(kind, record[A], record[A + 1])
            elif tensors is not None and group >= 0:
                data["tensors"] = tensors[group]
            continue
        value = record[position]
        position += 1
        if spec.codec == "how":
            for name, text in zip(("noop", "direction", "mode"), unpack_how(value), strict=True):
                if text:
                    data[name] = text
        elif spec.codec == "op":
            data["op"] = OPS[value % OP_UNIT]
            if value >= OP_UNIT:
                data["which"] = which_text(value // OP_UNIT)
        else:
            data[spec.name] = _decode_value(spec, value, texts)
    if kind == UNSHARD and data.get("issuer") is None:
        del data["issuer"]
    return Event(
        seq, KINDS[kind], t0, t1, step, PASSES[context % 4], parent or None,
        context % THREAD_UNIT // MODEL_UNIT, group if group >= 0 else None, context // THREAD_UNIT, data,
    )  # fmt: skip


def _decode_value(spec: FieldSpec, value: int, texts: Texts) -> Any:
    codec = spec.codec
    if codec == "enum":
        return spec.names[value]
    if codec == "dtype":
        return DTYPES[value]
    if codec == "bool":
        return bool(value)
    if codec in ("group", "unit"):
        return value if value >= 0 else None
    if codec == "text":
        return texts.get(value)
    if codec == "json":
        return json.loads(texts.get(value) or "null")
    if codec in ("bytes", "ns", "count") and value < 0:
        return None
    return value


def encode(event: Event, texts: Texts) -> tuple[int, ...]:
    """The integers of ``event``: the inverse of :func:`decode`, for rules that run over a file."""
    kind = KIND_NUMBER[event.kind]
    data = event.data
    payload: list[int] = []
    for spec in WRITTEN[kind]:
        if spec.codec == "how":
            payload.append(
                pack_how(
                    NOOPS.index(data.get("noop", "")),
                    DIRECTIONS.index(data.get("direction", "")),
                    MODES.index(data.get("mode", "")),
                )
            )
        elif spec.codec == "op":
            payload.append(OPS.index(data.get("op", OPS[0])) + OP_UNIT * read_which(data.get("which", "")))
        else:
            payload.append(_encode_value(spec, data.get(spec.name), texts))
    payload += [0] * (WIDTH - A - len(payload))
    context = PASSES.index(event.pass_) + MODEL_UNIT * event.model + THREAD_UNIT * event.thread
    group = NONE if event.group is None else event.group
    return (kind, event.seq, event.t0, event.t1, group, event.parent or 0, context, *payload)


def _encode_value(spec: FieldSpec, value: Any, texts: Texts) -> int:
    codec = spec.codec
    if codec == "enum":
        return spec.names.index(value) if value is not None else 0
    if codec == "dtype":
        return DTYPE_NUMBER.get(value, 0)
    if codec in ("group", "unit"):
        return NONE if value is None else int(value)
    if codec == "text":
        return texts.put_once(value or "")
    if codec == "json":
        return texts.put_once(json.dumps(value))
    if codec in ("bytes", "ns", "count") and value is None:
        return NONE
    return int(value or 0)
