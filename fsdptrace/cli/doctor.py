"""``fsdptrace doctor``: whether recording works here, and what was found of PyTorch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdptrace._version import __version__
from fsdptrace.cli.output import Screen, clean

_PACKAGES = ("torch", "numpy", "structlog", "opentelemetry-sdk", "opentelemetry-exporter-otlp", "typer", "rich", "duckdb",
             "msgspec", "orjson")  # fmt: skip
_EXTRAS = {"cli": ("typer", "rich"), "analysis": ("duckdb",)}
_NEEDED = ("torch", "numpy", "structlog")  # to record


@dataclass(slots=True)
class Diagnosis:
    """What was found. ``problems`` make recording impossible, ``notes`` are good to know.

    ``versions`` maps packages to versions, ``None`` where one is not installed; ``extras`` says which extras are complete.
    """

    python: str = platform.python_version()
    fsdptrace: str = __version__
    versions: dict[str, str | None] = field(default_factory=dict)
    extras: dict[str, bool] = field(default_factory=dict)
    exporters: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    folder: str = ""
    environment: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def examine() -> Diagnosis:
    """Looks at this Python; changes nothing and leaves nothing behind."""
    out = Diagnosis()
    out.versions = {name: _version(name) for name in _PACKAGES}
    out.extras = {extra: all(out.versions[name] for name in names) for extra, names in _EXTRAS.items()}
    out.exporters = sorted(point.name for point in importlib.metadata.entry_points(group="fsdptrace.exporters"))
    _torch(out)
    _environment(out)
    _folder(out)
    return out


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(out: Diagnosis) -> None:
    for name in _NEEDED:
        if out.versions[name] is None:
            out.problems.append(f"{name} is not installed: pip install {name}. Reports of existing files work without it")
    if out.versions["torch"] is None:
        return
    from fsdptrace.adapters import compat

    try:
        report = compat.examine()
        import torch.distributed as dist
    except Exception as error:  # a torch that cannot be imported fails in many ways
        out.problems.append(f"torch {out.versions['torch']} cannot be imported: {type(error).__name__}: {error}")
        return
    out.versions["torch"] = report.version
    out.found, out.missing = list(report.found), list(report.missing)
    out.notes += [f"torch {report.version}: {note}" for note in report.notes]
    if report.missing:
        out.problems.append(
            f"torch {report.version} lacks {', '.join(report.missing)}; "
            f"torch {_release(compat.TESTED[0])} to {_release(compat.TESTED[1])} are supported"
        )
    if not dist.is_available():
        out.problems.append("this build of torch has no torch.distributed, which FSDP2 needs")


def _release(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _environment(out: Diagnosis) -> None:
    """Options in the environment: whether they can be used, and whether they switch recording off."""
    from fsdptrace.options import Options, check_environment, unknown_variables

    out.environment = sorted(name for name in os.environ if name.startswith("FSDPTRACE"))
    out.notes += unknown_variables()
    if not Options().enabled:
        out.problems.append("FSDPTRACE=0 is set: every record() is switched off; unset it to record")
    if out.versions["structlog"] is None:
        return
    try:
        check_environment({})
    except ValueError as error:
        out.problems.append(f"an option in the environment cannot be used: {error}")


def _folder(out: Diagnosis) -> None:
    wanted = Path(os.environ.get("FSDPTRACE_OUT", "").strip() or "fsdptrace-out").absolute()
    out.folder = str(wanted)
    if _writable(wanted):
        return
    fallback = Path(tempfile.gettempdir())
    if _writable(fallback):
        out.notes.append(f"{wanted} cannot be written; files would go under {fallback} (set out=... or FSDPTRACE_OUT)")
    else:
        out.problems.append(f"neither {wanted} nor {fallback} can be written; set out=... or FSDPTRACE_OUT")


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def show(screen: Screen, out: Diagnosis) -> None:
    """The whole diagnosis."""
    screen.line(("fsdptrace ", "bold"), f"{out.fsdptrace}, Python {out.python}")
    for name, version in out.versions.items():
        screen.line(f"  {name:<28}", (version, "") if version else ("not installed", "dim"))
    for extra, there in out.extras.items():
        mend = "" if there else f"pip install 'fsdptrace[{extra}]'"
        screen.line(f"  extra {extra:<22}", ("complete", "green") if there else (f"missing: {mend}", "dim"))
    screen.line(f"  {'exporters':<28}", ", ".join(clean(name) for name in out.exporters) or ("none", "dim"))
    screen.line(f"  {'files go to':<28}", clean(out.folder))
    if out.environment:
        screen.line(f"  {'set in the environment':<28}", clean(", ".join(out.environment)))
    screen.line(f"  {'PyTorch names that are used':<28}", f"{len(out.found)} found, {len(out.missing)} missing")
    for name in out.missing:
        screen.line("    missing ", (clean(name), "red"))
    for note in out.notes:
        screen.item(clean(note))
    screen.line()
    if not out.problems:
        screen.prose("recording works here", style="bold green")
        return
    screen.prose("recording is impossible here:", style="bold red")
    for problem in out.problems:
        screen.item(clean(problem), "red")
