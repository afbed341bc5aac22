"""What a recording found, as lines that a person can write down; the same rules over the file must find the same."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path
from typing import Any

import fsdptrace
from fsdptrace import Violation
from fsdptrace import events as ev
from fsdptrace.adapters.compat import release_of
from fsdptrace.analysis import check
from fsdptrace.checks import registry
from fsdptrace.checks.engine import Engine
from fsdptrace.events import Texts
from fsdptrace.files import find_files, read_file

OURS = (
    "gather-after-backward", "unpaired-unshard", "pending-gather", "unused-gather", "repeated-gather", "late-reshard",
    "unsharded-budget", "policy-ignored", "illegal-state", "lost-pre-backward", "unclean-start", "wrong-root", "flags-at-step",
    "outside-forward", "stale-weights", "missing-reduction", "optimizer-owns-temporary", "write-to-temporary",
    "uncovered-parameter", "mixed-dtype-unit", "split-tie", "inference-buffer", "comm-dtype", "order-changed",
)  # fmt: skip
"""The rules that these tests are about. The others have tests of their own."""


def line(violation: Violation) -> str:
    """``step severity rule module bytes``; the root is ``(root)``, no module at all ``(model)``, a second model ``name@1``."""
    name = "(model)" if violation.group is None and not violation.fqn else violation.fqn or "(root)"
    name += f"@{violation.model}" if violation.model else ""
    return f"{violation.step} {violation.severity} {violation.rule} {name} {violation.bytes}"


class verdict:  # noqa: N801  (reads as a sentence: verdict(rec).reads("..."))
    """All violations of a recording that has ended. Fails where the rules find something else in its file.

    Args:
        others: rules of other families that the program breaks as well, which are left out.
    """

    def __init__(self, rec: fsdptrace.Recording, others: tuple[str, ...] = ()) -> None:
        assert rec.faults == 0
        assert rec.enabled
        assert not set(OURS) & set(others)
        same_over_the_file(rec)
        self.violations = [violation for violation in rec.violations if violation.rule not in others]
        for violation in self.violations:
            assert violation.message
            assert violation.hint
            assert violation.evidence

    def reads(self, expected: str) -> None:
        """Fails with a diff where the violations are not those of ``expected``, in order; ``#`` begins a comment."""
        wanted = [text.split("  # ")[0].strip() for text in textwrap.dedent(expected).splitlines()]
        wanted = [text for text in wanted if text and not text.startswith("#")]
        got = [line(violation) for violation in self.violations]
        if got != wanted:
            said = "\n".join(f"{v.evidence} {v}" for v in self.violations)
            diff = "\n".join(difflib.unified_diff(wanted, got, "worked out", "found", lineterm="", n=30))
            raise AssertionError(f"{diff}\n{said}")

    def silent(self) -> None:
        """Nothing of severity error or warning."""
        loud = [f"{line(v)}\n{v}" for v in self.violations if v.severity != "info"]
        assert not loud, "\n".join(loud)

    def of(self, rule: str) -> list[Violation]:
        """The violations of ``rule``."""
        return [violation for violation in self.violations if violation.rule == rule]

    def only(self) -> Violation:
        """The one violation there is."""
        assert len(self.violations) == 1, [line(v) for v in self.violations]
        return self.violations[0]


def key(violation: Violation) -> tuple[Any, ...]:
    """What must be the same online and over a file."""
    return (
        violation.rule, violation.severity, violation.model, violation.group, violation.fqn, violation.step,
        violation.evidence, violation.bytes, violation.cause, violation.message, violation.hint,
    )  # fmt: skip


def same_over_the_file(rec: fsdptrace.Recording) -> None:
    """The rules, run over the file of ``rec`` (written with ``detail="full"``), give the verdict of the run."""
    rec.close()
    (path,) = find_files(Path(rec.path).parent)
    found = over_the_file(path, rec.options)
    session = rec._session
    assert session is not None
    online = sorted(map(key, session.violations), key=str)
    again = sorted(map(key, found), key=str)
    assert again == online
    result = check(path.parent)
    assert (result.new, result.gone, result.incomplete) == (0, 0, 0), result.notes
    assert sum(finding.times for finding in result.findings) == len(online)


def over_the_file(path: Path, options: Any) -> list[Violation]:
    """What the rules of ``options`` find in the file."""
    trace = read_file(path)
    assert not trace.damaged
    found: list[Violation] = []
    rules = registry.select(options.checks, budget=options.budget_bytes is not None)
    own = {name: dict(values) for name, values in (options.rule_options or {}).items()}
    if options.budget_bytes is not None:
        own["unsharded-budget"] = {"budget_bytes": options.budget_bytes}
    release = release_of(trace.header["versions"]["torch"])
    texts = Texts()
    engines = {number: Engine(model, rules, found.append, release, own, texts) for number, model in trace.models.items()}
    for event in trace.events:  # in the order of recording
        if event.kind != "violation":
            engines[event.model].feed(ev.encode(event, texts))
    return found
