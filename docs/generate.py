"""Writes docs/events.md and docs/rules.md from the code: ``--write``, or ``--check`` that they are up to date.

The event schema and the rules say everything themselves; these pages only lay it out. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule
from fsdptrace.checks.registry import RULES

DOCS: Final = Path(__file__).resolve().parent
NOTE: Final = "<!-- Written by docs/generate.py (make docs). Change the code, not this page. -->\n"

_CODECS: Final[Mapping[str, str]] = {
    "int": "int", "ns": "int, ns",
    "bytes": "int, bytes", "bool": "bool", "group": "group id", "unit": "unit id", "dtype": "dtype name",
    "text": "text", "derived": "int", "count": "int", "json": "object",
}  # fmt: skip

_FILES: Final = """\
## Lines of a file

A process writes `DIR/{run_id}/rank{rank}.{host}-{pid}.jsonl`, one JSON object a line; readers go by the header, never by the
name. When a file grows it is continued in `….1.jsonl`, `….2.jsonl`, each of which begins with the header and the models
again. `….tail` holds the newest events of a running step that is not written in full, for the case that the process dies.

| line | when | what it holds |
|---|---|---|"""

_LINES: Final = (
    (
        "header",
        "first line of every part; it is the one with `schema`",
        f"`schema` (`{ev.SCHEMA}`), `rank`, `world_size`, `local_rank`, `role`, `host`, `pid`, `run_id`, `run_id_source`, "
        "`attempt`, `versions`, `options`, `clock` (one moment as `perf_counter_ns` and `unix_ns`), `coverage` (what this run "
        "cannot show)",
    ),
    (
        "`model`",
        "before the first event of a recorded root, and again when more is known of it",
        "`model`, `root` (class), `units` (id, fqn, modules, groups), `groups` (id, fqn, params with shapes and dtypes, "
        "tensors, bytes, dtype, world, mesh, policies), `uncovered` (parameters in no group)",
    ),
    ("an event", "see below", "the common fields and those of its kind; what is usual is left out"),
    (
        "`step`",
        "a step ended",
        "the fields of `step`, and `counts`: events of the step by kind. Of steps that are not written in full this line and "
        "the violations are all there is. `step_dropped`: events of it that did not fit in memory. `comm`: by mesh, gathers "
        "by pass (`gathers_forward`, …), `noops`, `wasted` (freed unused), reductions, bytes gathered and received "
        "(`…_wire_bytes`); zeros are left out",
    ),
    (
        "`heartbeat`",
        "about once a second",
        "`t` (ns), `last` (newest `seq`), `step` (the running one; `steps` by model where there are several), `collective` "
        "(`kind`, `model`, `group`, `which`: entered and not left), `dropped`, `drain_ns` (CPU time of the drain thread). "
        "Where nothing was begun since the heartbeat before: `moved` (ns, since when), and in the first and each tenth of them "
        "`at` (newest event), `held` (bytes and "
        "groups, open or pending, by model), `stack` (innermost frame of the training thread, and of the program's own code)",
    ),
    (
        "`entered`",
        'before a collective, with `flush="collective"`, and the first times that a reduction lacks gradients',
        "`t`, `what` (kind), `model`, `group`, `which`",
    ),
    (
        "`signal`",
        "the process was told to end, by SIGTERM or SIGABRT",
        "`signal` (name), `t`, `last`, `at`, `held`, `stack`, `collective`",
    ),
    (
        "`active_span`",
        "with exporters: a step began under an OpenTelemetry span of the program's own",
        "`model`, `step`, `traceparent` (W3C)",
    ),
    ("`thinned`", "the part was cut down, as `max_bytes` demands", "`events`: how many of it went"),
    (
        "`device_times`",
        "when the timing events of a step have completed, on an accelerator",
        "`model`, `step`, `span` (ns of device time of the step); by position `seq`, `what` (kind), `pass` (0 none, 1 forward, "
        "2 backward, 3 recompute), `group` (-1 without), `t0` (ns after `base`, on the host's clock), `ns` (how long) and "
        "`exposed` (ns that compute waited for it; -1 not known), which a reader gives to the events as `device_t0`, "
        "`device_t1`, `exposed`; `missing` (timings that never completed)",
    ),
    ("`coverage`", "something that this run cannot show came to light after the header", "`line`"),
    (
        "`end`",
        "the process closed its file; a file without it is of one that died or still runs",
        "`events`, `dropped`, `violations`, `t`, `drain_ns` (CPU time of the drain thread), `exception` (type and place of the "
        "one that ended the program)",
    ),
)


def events_page() -> str:
    """docs/events.md."""
    parts = [
        "# Events\n", NOTE,
        f"Schema `{ev.SCHEMA}`. One record per call, made when the call ends; `seq` is given when it begins, so that children "
        "have higher numbers than their `parent`, and a file, which is in the order of ends, is not sorted by `seq`. Times are "
        "`time.perf_counter_ns` of the host, in ns; the header maps them to Unix time. Bytes are whole bytes. Names of modules "
        "stand in the `model` line; events carry ids.\n",
        _FILES,
        *(f"| {line} | {when} | {holds} |" for line, when, holds in _LINES),
        "\nLines of other kinds are of a later version; readers skip them.\n",
        "## Fields of every event\n",
        "| field | meaning |\n|---|---|",
        *(f"| `{name}` | {_cell(doc)} |" for name, doc in ev.COMMON_FIELDS),
        "\n## Kinds\n",
        *(_kind(spec) for spec in ev.SPECS.values()),
        _values(),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def _kind(spec: ev.KindSpec) -> str:
    lines = [f"### `{spec.name}`\n", f"{spec.when[0].upper()}{spec.when[1:]}.\n"]
    if spec.number == ev.VIOLATION:
        lines.append(
            "In a file its fields stand in the line itself: `rule`, `severity`, `fqn`, `message`, `hint`, `evidence` (the "
            "`seq` numbers that prove it, the last one being where it was seen), `bytes`, `cause`.\n"
        )
        return "\n".join(lines)
    lines.append("| field | type | meaning | left out when |\n|---|---|---|---|")
    for field in spec.fields:
        lines += _field(field)
    return "\n".join(lines) + "\n"


def _field(field: ev.FieldSpec) -> list[str]:
    if field.codec == "how":
        return [
            f"| `{name}` | {_names(names)} | {meaning} | there is none |"
            for name, names, meaning in (
                ("noop", ev.NOOPS, "why nothing was issued; `disabled`: not needed in this backward"),
                ("direction", ev.DIRECTIONS, "of a prefetch"),
                ("mode", ev.MODES, "of a prefetch; `manual`: a call of the user's"),
            )
        ]
    if field.codec == "op":
        return [
            f"| `op` | {_names(field.names)} | reduction operator | `{field.names[0]}` |",
            "| `which` | text | the parameters that took part, as positions in the group's `params` (`0-1,4`), or `#` and a "
            f"hash where the group has more than {ev.WHICH_BITS} | all did |",
        ]
    kind = _names(field.names) if field.codec == "enum" else _CODECS[field.codec]
    return [f"| `{field.name}` | {kind} | {_cell(field.doc)} | {_usual(field)} |"]


def _usual(field: ev.FieldSpec) -> str:
    if field.codec == "derived":
        return "worked out when read" if field.name != "counts" else ""
    if field.usual == "model":
        return "as in the `model` line"
    if field.codec in ("group", "unit"):
        return "there is none"
    if not isinstance(field.usual, int):
        return ""
    if field.codec == "enum":
        return f"`{field.names[field.usual]}`" if field.names[field.usual] else "it is neither"
    if field.codec == "text":
        return "it is empty"
    return f"`{str(bool(field.usual)).lower()}`" if field.codec == "bool" else str(field.usual)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _values() -> str:
    return "\n".join(
        [
            "## Values\n",
            f"* passes: {_names(ev.PASSES)}",
            f"* dtypes: {_names(ev.DTYPES)}",
            f"* training states (as PyTorch names them): {_names(ev.TRAINING_STATES)}",
            f"* sharded states: {_names(ev.SHARDED_STATES)}",
            f"* switches of `flag`: {_names(ev.FLAGS)}",
        ]
    )


_JUDGED = """\
## Misses and false alarms

Counted on 2026-12-01, torch 2.13. 23 programs after public bug reports, on two to four gloo ranks under `fsdptrace run`:
none of the faults is missed by its rule; that of ranks whose reductions differ in size is named by `check` and `postmortem`
and not while training, since gloo aborts the process in its first collective. `tests/gallery` has further ways to break
each rule and 163 legal programs (accumulation, several forwards, several models, frozen parts, eval between steps, chunked
losses, HSDP, prefetch lists, checkpoints, a trainer by reinforcement and so on), run as one recording and step by step: no
miss and no false alarm is known in them. Known to be missed: a parameter or a module below a unit that is exchanged by an
assignment after the first forward (FSDP2 overwrites the one and does not shard the other), and shards that are written between
a forward and its backward, which then computes with other weights. Found and mended while looking for some:
`repeated-gather` on torchtitan's chunked loss ([tried.md](tried.md) has what other people's programs ran),
`illegal-state` on a registered `generate` that calls the
module itself, `unused-gather` as a warning on units frozen by `requires_grad_` while training, `recompute-units` in a pass that
began on units which an exception had left half done, `outside-forward` on a model whose method called another one, and
`lost-pre-backward` where the program itself read a closed weight. Missed until then: optimizers of before `fully_shard`.
"""


_EXCEPTIONS = """\
## On exceptions

An exception that leaves a recorded model carries notes (`add_note`; on Python 3.10 they are logged), which survive pickling.
They say what was gathered, and:

| the exception came out of | the note |
|---|---|
| a unit that was freed in the middle of its forward, recomputation or backward, or not gathered for its backward | \
`illegal-state`: the unit, the event, who freed it |
| a module, a hook or code of a backward that used parameters of a closed unit past the unit's forward, or a copy of them that \
was kept; whose they are is read off the expression that failed | \
`outside-forward`: the unit, the event that freed it, or the gather that nobody waited for |
| a backward whose pre-backward was lost | `lost-pre-backward`: the unit, the event that freed it |
| a pass that began on units which an earlier exception had left half done | `unclean-start`: that exception and its step, \
the units, the state that they are in since, the gather they are open with, and whether it is older than their parameters |
| state-dict code, while a unit was open | `unpaired-unshard`: the unit and who opened it |

Where all units are as they should be nothing more is said: the error is the program's own.
"""


def rules_page() -> str:
    """docs/rules.md."""
    rules = list(RULES.values())
    parts = [
        "# Rules\n", NOTE,
        "A rule reads events and nothing else, so that it says the same online and over files (`fsdptrace check DIR`). All are "
        "on unless marked opt-in; `checks=[...]` selects, `on_violation={\"rule\": \"raise\"}` sets what happens per rule. "
        "`error` raises under `on_violation=\"raise\"`, `warning` and `info` never do. Each violation is reported once per "
        "group and cause in a step.\n",
        "| rule | severity | broken when |\n|---|---|---|",
        *(f"| [`{rule.name}`](#{rule.name}) | {_severity(rule)} | {_cell(rule.summary)} |" for rule in rules),
        "",
        _JUDGED,
        _EXCEPTIONS,
        *(_rule(rule) for rule in rules),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def _severity(rule: type[Rule]) -> str:
    return f"{rule.severity}, opt-in" if rule.opt_in else rule.severity


def _rule(rule: type[Rule]) -> str:
    return "\n\n".join(
        [
            f"## {rule.name}",
            f"*{_severity(rule)}.* Broken when {rule.summary}.",
            rule.explanation,
            f"```python\n{rule.example}\n```",
            f"**What to change.** {rule.mend}",
            f"**Silent on** {rule.silent}.",
            *([f"**Not seen:** {rule.unseen}."] if rule.unseen else []),
            f"**Cost:** {rule.cost}.\n",
        ]
    )


PAGES: Final[Mapping[str, Callable[[], str]]] = {"events.md": events_page, "rules.md": rules_page}


def stale() -> list[str]:
    """Names of pages that are missing or not what the code says."""
    return [
        name for name, page in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text("utf-8") != page()
    ]  # fmt: skip


def main() -> int:
    """0 when all is up to date or was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the pages")
    what.add_argument("--check", action="store_true", help="exit status 1 when a page is not up to date")
    if parser.parse_args().write:
        for name, page in PAGES.items():
            (DOCS / name).write_text(page(), "utf-8")
        return 0
    old = stale()
    if old:
        print(f"not up to date: {', '.join(old)}; run `make docs`", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main())
