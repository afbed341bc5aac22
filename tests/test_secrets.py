"""No secret leaves: a token in the exporter's headers, in argv and in a URL is in no file, log or command line of ours."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

from support.zero_code import TRAINING, command

TOKEN = "geheim-5f1d7c"
PROGRAM = (
    TRAINING
    + """
import logging, os, time
logging.basicConfig(level=logging.DEBUG)
model = build(3)
train(model, 2)
model[1].unshard()
train(model, 1)
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
try:
    model(torch.ones(2, 9))
except RuntimeError:
    pass
model[0].unshard()
optimizer.step()          # a finding
open("ready", "w").close()
while not os.path.exists("go on"):
    time.sleep(0.05)
"""
)


def command_lines() -> dict[int, str]:
    """Those of all processes, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def test_nothing_secret_is_written(tmp_path: Path) -> None:
    before = set(command_lines())
    spool = tmp_path / "tmp"
    spool.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(spool),
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {TOKEN}",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:{TOKEN}@127.0.0.1:9/",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "FSDPTRACE_EXPORT": "otlp",
    }
    arguments = (f"--password={TOKEN}", f"http://me:{TOKEN}@store/model")
    log = tmp_path / "log.txt"
    with log.open("w") as stream:
        child = subprocess.Popen(
            command(tmp_path, PROGRAM, "--on-violation", "warn", arguments=arguments), cwd=tmp_path, env=environment,
            stdout=stream, stderr=stream,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while not (tmp_path / "ready").exists():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.5)  # a heartbeat, and what runs beside the program is there
        lines = {pid: line for pid, line in command_lines().items() if pid not in before}
        (tmp_path / "go on").touch()
        assert child.wait(timeout=60) == 0
    # The launcher and the program have the token on their command lines because it was put there; nobody else has.
    theirs = [line for line in lines.values() if "program.py" in line]
    assert len(theirs) == 2
    assert all(TOKEN in line for line in theirs)
    assert [line for line in lines.values() if TOKEN in line and line not in theirs] == []
    exporters = {pid: line for pid, line in lines.items() if "fsdptrace_exporters" in line or " export " in line}
    assert exporters
    for pid in exporters:
        try:
            os.kill(pid, signal.SIGTERM)  # it would wait for its back end, which there is none of
        except ProcessLookupError:
            pass
    assert "ERROR:fsdptrace:" in log.read_text()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "program.py"]
    assert any(path.suffix == ".jsonl" for path in written)
    for path in written:
        assert TOKEN not in path.read_bytes().decode(errors="replace"), path
    for path in (tmp_path / "out").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
