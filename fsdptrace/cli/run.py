"""``fsdptrace run -- CMD``: records every Python process that the command starts, and says at the end what was seen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrace.checks.text import count
from fsdptrace.files import NotATrace, find_files, read_file


@dataclass(slots=True)
class Seen:
    """What the processes of a command left.

    Attributes:
        processes: Python processes in which fsdptrace was ready; ``recording`` those that had an FSDP2 model.
        models, steps: recorded models and steps, over all processes.
        errors, warnings: violations of that severity; ``rules`` the rules that found them.
        folders: where the files are.
    """

    processes: int = 0
    recording: int = 0
    models: int = 0
    steps: int = 0
    errors: int = 0
    warnings: int = 0
    rules: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)

    def line(self) -> str:
        """One line for the end of a run."""
        if not self.processes:
            return "fsdptrace: no Python process with fsdptrace in it was started; install it in the environment of the command"
        if not self.models:
            return f"fsdptrace: 0 FSDP2 models in {count(self.processes, 'process')}"
        found = "no errors or warnings"
        if self.errors or self.warnings:
            found = f"{count(self.errors, 'error')}, {count(self.warnings, 'warning')} ({', '.join(sorted(self.rules))})"
        where = ", ".join(sorted(self.folders)) or "nowhere"
        look = f"; look with: fsdptrace report {sorted(self.folders)[0]}" if self.folders else ""
        return (
            f"fsdptrace: {count(self.models, 'FSDP2 model')} in {self.recording} of {count(self.processes, 'process')}, "
            f"{count(self.steps, 'step')}; {found}; files in {where}{look}"
        )

    def add(self, body: dict[str, Any]) -> None:
        """What one process said when it ended, or what its file says."""
        self.recording += bool(body["models"])
        self.models += body["models"]
        self.steps += body["steps"]
        self.errors += body["errors"]
        self.warnings += body["warnings"]
        self.rules.update(body["rules"])
        if body["path"]:
            self.folders.add(str(Path(body["path"]).parent))


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, Seen | None]:
    """Runs ``command`` with ``environment`` on top of ours; its return code (negative: ended by that signal) and what was
    seen, ``None`` under ``FSDPTRACE=0``.

    Raises:
        OSError: the command cannot be started.
    """
    if os.environ.get("FSDPTRACE", "").strip().lower() in ("0", "false", "off", "no"):
        return _child(command, dict(os.environ)), None
    tally = Path(tempfile.mkdtemp(prefix="fsdptrace-run-"))
    out = Path(environment.get("FSDPTRACE_OUT") or os.environ.get("FSDPTRACE_OUT") or "fsdptrace-out").absolute()
    try:
        code = _child(
            command,
            {**os.environ, **environment, "FSDPTRACE": "1", "FSDPTRACE_OUT": str(out), "FSDPTRACE_TALLY": str(tally)},
        )
        return code, _count(tally, out)
    finally:
        shutil.rmtree(tally, ignore_errors=True)


def _child(command: Sequence[str], environment: dict[str, str]) -> int:
    child = subprocess.Popen(list(command), env=environment)
    # Ctrl-C reaches the child by itself, as it is in our process group; what is sent to us alone is passed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, frame: child.send_signal(got))
    return child.wait()


def _count(tally: Path, out: Path) -> Seen:
    seen = Seen()
    silent = []
    for path in sorted(tally.iterdir()):
        seen.processes += 1
        try:
            seen.add(json.loads(path.read_text()))
        except (ValueError, KeyError, OSError):
            silent.append(path.name)
    if silent:
        _ask_files(seen, set(silent), out)
    return seen


def _ask_files(seen: Seen, pids: set[str], out: Path) -> None:
    """Processes that ended without a word (killed, aborted from C++) left a file all the same, or had no model."""
    try:
        files = find_files(out)
    except NotATrace:
        return
    for path in files:
        if path.stem.rpartition("-")[2] not in pids and path.stem.split("-")[-2:-1] not in [[pid] for pid in pids]:
            continue
        try:
            trace = read_file(path)
        except (NotATrace, OSError):
            continue
        found = [event["violation"] for event in trace.events if event.kind == "violation"]
        # The last step of each model ended with the process.
        steps: set[tuple[Any, Any]] = {(event.model, event.step) for event in trace.events}
        steps.update((line.get("model", 0), line.get("step")) for line in trace.summaries)
        seen.add(
            {
                "models": len(trace.models), "steps": len(steps), "path": str(path),
                "errors": sum(v.get("severity") == "error" for v in found),
                "warnings": sum(v.get("severity") == "warning" for v in found),
                "rules": [v.get("rule", "") for v in found if v.get("severity") != "info"],
            }
        )  # fmt: skip


def end_like(code: int) -> None:
    """Ends this process as the command ended: its status, or its signal."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), -code)
    raise SystemExit(code)
