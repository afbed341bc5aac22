"""Every option of a recording, as a keyword of ``record`` and as an environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

DETAILS = ("auto", "full", "summary")
FLUSHES = ("none", "collective")
DEVICE_TIMINGS = ("auto", "always", "off")
FINGERPRINTS = ("params", "inputs", "saved")
CHECKPOINT_DETAILS = ("counts", "modules")
_OFF = ("0", "false", "off", "no")
_OURS = (
    "FSDPTRACE_JOBS",
    "FSDPTRACE_TALLY",
    "FSDPTRACE_METRIC_MODULES",
    "FSDPTRACE_DEBUG",
)  # of the command, not of a recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a recording. Each is a keyword of :func:`fsdptrace.record` and ``FSDPTRACE_<NAME>`` in the environment
    (``exporters`` is ``FSDPTRACE_EXPORT``); a keyword beats the environment.

    Attributes:
        out: folder for the files; default ``./fsdptrace-out``, or one under the temporary folder where that cannot be
            written. Files go to ``out/{run_id}/``.
        exporters: names of the entry-point group ``fsdptrace.exporters`` (``"otlp"``, ``"prometheus"``); they run in one
            process of their own per node, which follows the files. Without ``out`` these lie in a spool folder on the node
            and are removed when everything is delivered.
        detail_ranks: ranks whose units exporters show one by one (``"all"`` for every one), beside those with a violation;
            rank 0 when not given.
        checks: rules to run: ``None`` the default ones, names to choose, ``"-name"`` to leave one out, ``False`` none.
        on_violation: ``"warn"`` (errors at once, the rest in one line at the end), ``"record"``, ``"raise"`` (severity
            ``error`` only), a function of the violation (what it raises stops the run), or a mapping of these by rule name
            with ``"*"`` for the rest.
        raise_until_step: under ``raise``, later steps only warn.
        budget_bytes: limit in bytes for parameters that are unsharded at one time.
        schedule: ``step -> torch.profiler.ProfilerAction``, for instance ``torch.profiler.schedule(...)``: which steps are
            written with all their events. Checks see every event of every step.
        detail: ``"auto"`` (all events of the first 10 steps, of every 100th and of each with a violation, one line for the
            others), ``"full"`` or ``"summary"``.
        flush: ``"none"``: lines reach the file within a second; ``"collective"``: also before each collective is entered.
        max_bytes: disk per rank, in bytes; the oldest detail goes first.
        stall_seconds: after so long without progress of any rank, ``rank-stall`` says where each of them stands.
        run_id: name of the run; see docs/design.md for what is taken when it is not given.
        role: prefix of the file names where one process per role has rank 0.
        rule_options: options of rules, by rule name.
        device_timing: ``"auto"``: on an accelerator, the steps that are written with all their events are also timed on the
            device, and allocator memory is read at unit boundaries in them; ``"always"``: every step is timed; ``"off"``.
        fingerprint: what of checkpointed regions is compared by value between forward and recomputation, on the device:
            ``"params"`` (gathered parameters), ``"inputs"`` (what the function is given, states of random generators and of
            modules), ``"saved"`` (tensors saved for the backward), several of them, or ``"all"``. See docs/recompute.md for
            what it costs.
        checkpoint_detail: ``"counts"``; ``"modules"``: which submodule and line saved each tensor is recorded too.
        live: shows the run at the lower edge of the terminal while it goes on (needs ``fsdptrace[cli]``): step, gathered bytes,
            open units, last finding, by rank. A process of its own draws it. Without a terminal, ``fsdptrace top`` shows it.
    """

    out: str | None = None
    exporters: tuple[str, ...] = ()
    detail_ranks: tuple[int, ...] | str | None = None
    checks: tuple[str, ...] | bool | None = None
    on_violation: str | Callable[..., None] | Mapping[str, Any] = "warn"
    raise_until_step: int | None = None
    budget_bytes: int | None = None
    schedule: Callable[[int], Any] | None = None
    detail: str = "auto"
    flush: str = "none"
    max_bytes: int = 1 << 30
    stall_seconds: float = 300.0
    run_id: str | None = None
    role: str | None = None
    rule_options: Mapping[str, Mapping[str, Any]] | None = None
    device_timing: str = "auto"
    fingerprint: tuple[str, ...] = ()
    checkpoint_detail: str = "counts"
    live: bool = False

    @property
    def enabled(self) -> bool:
        """False under ``FSDPTRACE=0``, which beats everything."""
        return os.environ.get("FSDPTRACE", "").strip().lower() not in _OFF

    def file_key(self) -> tuple[Any, ...]:
        """What decides where and how a process writes; recordings that agree in it share their files."""
        return (
            self.out,
            self.run_id,
            self.role,
            self.max_bytes,
            self.stall_seconds,
            self.detail,
            self.schedule,
            self.flush,
            self.exporters,
            self.detail_ranks,
            self.device_timing,
        )


def resolve(**given: Any) -> Options:
    """Options from keywords and the environment, checked.

    Raises:
        ValueError: a value cannot be used; the message names the option, where it came from and what is allowed.
        TypeError: an unknown keyword.
    """
    names = {field.name for field in fields(Options)}
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TypeError(f"record() has no option {unknown[0]!r}; there are {', '.join(sorted(names))}")
    values = _from_environment()
    values.update({name: value for name, value in given.items() if value is not None})
    if values.get("fingerprint") in ("all", ("all",), ["all"]):
        values["fingerprint"] = FINGERPRINTS
    for name in ("exporters", "checks", "fingerprint"):
        value = values.get(name)
        if name == "fingerprint" and isinstance(value, str):
            values[name] = _names(value)
        elif isinstance(value, str):
            values[name] = (value,)
        elif isinstance(value, Sequence):
            values[name] = tuple(value)
    ranks = values.get("detail_ranks")
    if isinstance(ranks, int):
        values["detail_ranks"] = (ranks,)
    elif ranks is not None and ranks != "all":
        values["detail_ranks"] = tuple(ranks)
    if values.get("out") is not None:
        if not isinstance(values["out"], (str, os.PathLike)):
            raise ValueError(f"out: {values['out']!r} is not a path")
        values["out"] = os.fspath(values["out"])
    for name in ("budget_bytes", "max_bytes"):
        value = values.get(name)
        if isinstance(value, str):
            try:
                values[name] = parse_bytes(value)
            except ValueError as error:
                raise ValueError(f"{name}: {value!r}: {error}") from None
        elif isinstance(value, float) and value.is_integer():
            values[name] = int(value)
    options = Options(**values)
    _check(options)
    _tell([*unknown_variables(), *_unknown_rule_options(options)])
    return options


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One line per variable that is named as an option of ours and is none: most often a slip of the finger."""
    import difflib

    known = ["FSDPTRACE", *_OURS, *(f"FSDPTRACE_{suffix}" for suffix, _ in _readers().values())]
    lines = []
    for name in sorted(environment):
        if name.startswith("FSDPTRACE_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            lines.append(
                f"{name} is no option of fsdptrace and changes nothing" + (f"; did you mean {near[0]}?" if near else "")
            )
    return lines


def _unknown_rule_options(options: Options) -> list[str]:
    from fsdptrace.checks import registry

    return registry.unknown_options(options.rule_options or {})


_told: set[str] = set()


def _tell(lines: Sequence[str]) -> None:
    """Each line once in a process, and of a launched job on rank 0 only."""
    new = [line for line in lines if line not in _told]
    _told.update(new)
    if new and os.environ.get("RANK", "0") == "0":
        from fsdptrace.checks.policy import logger

        for line in new:
            logger().warning(line)


def check_environment(changes: Mapping[str, str]) -> None:
    """Whether recording could start with ``changes`` on top of this process's environment; for a launcher.

    Raises:
        ValueError: a value cannot be used.
    """
    _check(Options(**_from_environment({**os.environ, **changes})))


def _from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, (suffix, read) in _readers().items():
        text = environment.get(f"FSDPTRACE_{suffix}", "").strip()
        if text:
            try:
                values[name] = read(text)
            except ValueError as error:
                raise ValueError(f"FSDPTRACE_{suffix}={text!r}: {error}") from None
    return values


def _readers() -> dict[str, tuple[str, Callable[[str], Any]]]:
    """Of each option that the environment can set: the end of the variable's name, and how its text is read."""
    return {
        "out": ("OUT", str),
        "exporters": ("EXPORT", _names),
        "detail_ranks": ("DETAIL_RANKS", _ranks),
        "checks": ("CHECKS", _checks),
        "on_violation": ("ON_VIOLATION", _policy),
        "raise_until_step": ("RAISE_UNTIL_STEP", int),
        "budget_bytes": ("BUDGET_BYTES", parse_bytes),
        "schedule": ("SCHEDULE", _schedule),
        "detail": ("DETAIL", str),
        "flush": ("FLUSH", str),
        "max_bytes": ("MAX_BYTES", parse_bytes),
        "stall_seconds": ("STALL_SECONDS", float),
        "run_id": ("RUN_ID", str),
        "role": ("ROLE", str),
        "device_timing": ("DEVICE_TIMING", str),
        "fingerprint": ("FINGERPRINT", _names),
        "checkpoint_detail": ("CHECKPOINT_DETAIL", str),
        "live": ("LIVE", _switch),
    }


def _check(options: Options) -> None:
    from fsdptrace.checks import policy, registry

    registry.select(options.checks)
    policy.check_policy(options.on_violation)
    one_of = {
        "detail": DETAILS, "flush": FLUSHES, "device_timing": DEVICE_TIMINGS, "checkpoint_detail": CHECKPOINT_DETAILS,
    }  # fmt: skip
    unknown = [kind for kind in options.fingerprint if kind not in FINGERPRINTS]
    if unknown:
        raise ValueError(f"fingerprint: {unknown[0]!r} is none of {', '.join(FINGERPRINTS)}, all")
    for name, allowed in one_of.items():
        if getattr(options, name) not in allowed:
            raise ValueError(f"{name}: {getattr(options, name)!r} is none of {', '.join(allowed)}")
    for name in ("max_bytes", "budget_bytes", "raise_until_step"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{name}: {value!r} is not a whole number of 0 or more")
    if options.max_bytes < 1 << 16:
        raise ValueError(f"max_bytes: {options.max_bytes} is less than 64 KiB, which holds no step")
    stall: Any = options.stall_seconds
    if isinstance(stall, bool) or not isinstance(stall, (int, float)) or not stall > 0:
        raise ValueError(f"stall_seconds: {options.stall_seconds!r} is not a number of seconds above 0")
    if options.schedule is not None and not callable(options.schedule):
        raise ValueError("schedule: not a function of a step number; use torch.profiler.schedule(wait=..., active=...)")
    if options.exporters:
        check_exporters(options.exporters)
    ranks = options.detail_ranks
    if ranks is not None and ranks != "all":
        if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
            raise ValueError(f"detail_ranks: {ranks!r} is neither 'all' nor some ranks such as (0, 8)")
    if options.rule_options:
        registry.check_names(options.rule_options, "rule_options")
    for name in ("run_id", "role"):
        value = getattr(options, name)
        if value is not None and safe_name(value) != value:
            raise ValueError(f"{name}: {value!r} cannot be part of a path; use letters, digits, '.', '_' and '-'")


def check_exporters(names: tuple[str, ...]) -> None:
    """Whether there are exporters of these names.

    Raises:
        ValueError: there is none of one of them; the message names those that are installed.
    """
    from importlib.metadata import entry_points

    known = sorted(entry.name for entry in entry_points(group="fsdptrace.exporters"))
    unknown = [name for name in (name.partition(":")[0] for name in names) if name not in known]
    if unknown:
        there = f"installed are {', '.join(known)}" if known else "none is installed"
        raise ValueError(
            f"exporters: no exporter named {', '.join(map(repr, unknown))}; {there} (entry points of fsdptrace.exporters)"
        )


def safe_name(text: str) -> str:
    """``text`` as a part of a path: other characters than letters, digits, ``._-`` become ``_``; never empty or hidden."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")[:128] or "_"


def parse_bytes(text: str) -> int:
    """``1073741824``, ``64MiB``, ``1.5 GB``.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError("not a number of bytes such as 1073741824 or 64MiB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,\s]+", text) if part)


def _ranks(text: str) -> tuple[int, ...] | str:
    if text == "all":
        return text
    if text == "none":
        return ()
    return tuple(int(part) for part in _names(text))


def _switch(text: str) -> bool:
    if text.lower() in _OFF:
        return False
    if text.lower() in ("1", "true", "on", "yes"):
        return True
    raise ValueError("neither 1 nor 0")


def _checks(text: str) -> tuple[str, ...] | bool:
    return False if text.lower() in (*_OFF, "none") else _names(text)


def _policy(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    return dict(part.split("=", 1) for part in _names(text) if "=" in part)


def _schedule(text: str) -> Callable[[int], Any]:
    """``wait=2,warmup=1,active=3,repeat=0,skip_first=10`` as for ``torch.profiler.schedule``."""
    values = {}
    for part in _names(text):
        name, _, value = part.partition("=")
        if name not in ("wait", "warmup", "active", "repeat", "skip_first") or not value.isdigit():
            raise ValueError("use wait=2,warmup=1,active=3,repeat=0,skip_first=10, as for torch.profiler.schedule")
        values[name] = int(value)
    from torch.profiler import schedule

    made: Callable[[int], Any] = schedule(**{"wait": 0, "warmup": 0, "active": 1, **values})
    return made
