"""What a rule is, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

from fsdptrace import events as ev
from fsdptrace.checks.tracker import Tracker

SEVERITIES: Final[tuple[str, ...]] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken.

    Attributes:
        rule: name of the rule.
        severity: ``error`` (raises under ``on_violation="raise"``), ``warning`` or ``info`` (never raise).
        model, group, fqn: where; ``group`` is ``None`` and ``fqn`` empty for the model as a whole.
        step: step of the model in which it happened.
        message: which module, what happened, at which event, how many bytes or steps it costs.
        hint: what to change, with the PyTorch call to use.
        evidence: ``seq`` numbers of the events that prove it, the last one being where it was seen.
        bytes: bytes concerned, 0 where none are.
        cause: what kind of cause it is; violations of one group and cause in one step are reported once.
    """

    rule: str
    severity: str
    model: int
    group: int | None
    fqn: str
    step: int
    message: str
    hint: str
    evidence: tuple[int, ...]
    bytes: int = 0
    cause: str = ""

    @property
    def seq(self) -> int:
        """The event at which it was seen."""
        return self.evidence[-1] if self.evidence else 0

    def to_json(self) -> dict[str, Any]:
        """Plain data, as in a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Violation:
        """The inverse of :meth:`to_json`; unknown keys are ignored.

        Raises:
            KeyError: a field is missing.
        """
        return cls(
            data["rule"], data["severity"], data.get("model", 0), data.get("group"), data.get("fqn", ""),
            data.get("step", 0), data["message"], data.get("hint", ""), tuple(data.get("evidence", ())),
            data.get("bytes", 0), data.get("cause", ""),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}\n  {self.hint}" if self.hint else f"{self.rule}: {self.message}"


class InvariantViolation(RuntimeError):
    """A rule of severity ``error`` was broken under ``on_violation="raise"``; raised at the event that broke it.

    ``violation`` is the :class:`Violation`. Survives pickling into another process.
    """

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation)
        self.violation = violation

    def __str__(self) -> str:
        return f"fsdptrace: {self.violation}"


Report = Callable[[Violation], None]


class Rule:
    """Base of all rules. A rule has one method per kind of event that it reads, named as the kind. What comes with nearly every
    gather, forward and backward it is told by the tracker instead, when there is something to it (``Tracker.told``).

    Methods take ``(seq, group, context, a, b, c, d, e)``: the integers of the event (see
    :data:`fsdptrace.events.SPECS` for what ``a`` to ``e`` are). The tracker has seen the event before the rule does.

    Args:
        tracker: the state that the events so far imply.
        report: called with each violation; raises under ``on_violation="raise"``.
        options: the rule's own options, by name.
    """

    name: ClassVar[str]
    severity: ClassVar[str]
    summary: ClassVar[str]
    """When it is broken, one sentence."""
    explanation: ClassVar[str]
    """What it means and why it costs, a paragraph."""
    example: ClassVar[str]
    """A few lines of code that break it."""
    mend: ClassVar[str]
    """What to change."""
    silent: ClassVar[str]
    """Legal things that look like it."""
    unseen: ClassVar[str] = ""
    """What breaks it and leaves no trace: every file says so (`coverage`), where the rule is on."""
    cost: ClassVar[str] = "per event, a comparison or two"
    opt_in: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, tracker: Tracker, report: Report, options: Mapping[str, Any] | None = None) -> None:
        self.tracker = tracker
        self.report = report
        self.configure({**self.options, **(options or {})})

    def configure(self, options: Mapping[str, Any]) -> None:
        """Takes the rule's own options."""

    def since(self, major: int, minor: int) -> bool:
        """Whether the torch that ran is ``major.minor`` or newer (or not known): a hint names what that release has."""
        release = self.tracker.release
        return release >= (major, minor) or release == (0, 0)

    @property
    def torch(self) -> str:
        """The torch that ran, for a message."""
        major, minor = self.tracker.release
        return f"torch {major}.{minor}" if major else "this torch"

    def kinds(self) -> list[int]:
        """The kinds that the rule reads: those that it has a method for."""
        return [number for number, name in enumerate(ev.KINDS) if name and hasattr(self, name)]
