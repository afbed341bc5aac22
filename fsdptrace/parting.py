"""Where two ranks part ways: comparing what :mod:`fsdptrace.rank_order` keeps of each, and naming the first difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fsdptrace import events as ev
from fsdptrace.model_map import show_name
from fsdptrace.rank_order import START, Item, common_mark, positions


@dataclass(frozen=True, slots=True)
class Marks:
    """What a rank says of one sequence: ``label``, ``count``, ``marks`` as hexadecimal text (see :meth:`Order.state`)."""

    label: str
    count: int
    marks: str

    def at(self, index: int) -> str:
        """The checksum at place ``index`` of :func:`positions`."""
        return self.marks[8 * index : 8 * index + 8]


def differ(a: Marks, b: Marks) -> tuple[int, int] | None:
    """Between which positions two sequences of one label begin to differ, as ``(agree up to, differ at or before)``; None while
    nothing says that they do."""
    if a.count > b.count:
        a, b = b, a
    common = common_mark(a.count, b.count)
    if common is None or a.at(common[0]) == b.at(common[1]):
        return None
    mine = {position: a.at(i) for i, position in enumerate(positions(a.count))}
    other = {position: b.at(i) for i, position in enumerate(positions(b.count))}
    both = sorted(mine.keys() & other.keys())
    agree = max((position for position in both if mine[position] == other[position]), default=0)
    return agree, min(position for position in both if position > agree)


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where two ranks differ: what each issued there, with the step and ``seq`` (0: entered and not left)."""

    position: int
    mine: Item
    other: Item
    my_step: int
    other_step: int
    my_seq: int
    other_seq: int

    def __post_init__(self) -> None:
        assert self.mine != self.other


def parting(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Parting | None:
    """The first difference of two excerpts (see :meth:`Order.excerpt`); None where one just ends before the other, or where
    they do not overlap or record different parts of the run."""
    tables = [[Item(*row) for row in excerpt["table"]] for excerpt in (mine, other)]
    start = max(mine["first"], other["first"])
    stop = min(mine["first"] + len(mine["items"]), other["first"] + len(other["items"]))
    for position in range(start, stop):
        i, j = position - mine["first"], position - other["first"]
        a, b = tables[0][mine["items"][i]], tables[1][other["items"][j]]
        if a == b == START and mine["seqs"][i] != other["seqs"][j]:
            return None
        if a != b:
            return Parting(position, a, b, mine["steps"][i], other["steps"][j], mine["seqs"][i], other["seqs"][j])
    return None


_WHAT: Final = {
    "unshard": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "wait": "wait for the all-gather",
    "post_backward": "reduce-scatter",
}  # fmt: skip


def collective_name(kind: str) -> str:
    """``all-gather`` for ``unshard``, and so on: the name that other tools have for it."""
    return _WHAT.get(kind, kind)


def item_text(item: Item, params: Sequence[str] = ()) -> str:
    """``the all-gather of layers.0``; ``params`` are the names of the group's parameters, for those that took part."""
    text = f"the {collective_name(item.kind)} of {show_name(item.fqn)}"
    return f"{text} with gradients of {which_names(item.which, params)}" if item.which else text


def which_names(which: str, params: Sequence[str]) -> str:
    """The parameters of ``which`` by name, at most eight; by position where names are not known."""
    if which.startswith("#"):
        return f"some of its parameters ({which})"
    bits = ev.read_which(which)
    chosen = [i for i in range(bits.bit_length()) if bits >> i & 1]
    names = [params[i] if i < len(params) else f"parameter {i}" for i in chosen]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
