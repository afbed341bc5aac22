"""Starts the process that exports a run's files: one per node and run, by whichever process takes the lock first.

Encoding spans holds the GIL far too long for a thread beside training, so that another interpreter does it. It is spawned,
never forked, belongs to no process group of the launcher's, and holds the lock for as long as it lives: when it dies, the
next look of any rank starts another one, which goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdptrace.options import Options

PERIOD = 5.0  # seconds between looks at the lock
STARTS = 5  # exporters that one process starts before it gives up: one that cannot run would be started for ever
LOG = "exporter.log"
TROUBLE = "fsdptrace export: "  # lines of the log that begin so are for people

# As `python -m fsdptrace_exporters`, but nothing in the folder that training was started from gets in the way of an import.
_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from fsdptrace_exporters.__main__ import main; sys.exit(main())"

_started: list[subprocess.Popen[bytes]] = []  # they outlive their recordings: kept, so that nothing warns of them


class Exporter:
    """The exporter of one run's folder on this node, seen from a process that records.

    Args:
        folder: the run's folder.
        options: names the exporters.
        remove: files go once they are delivered.
        complain: called with one clear line when there is no exporter, and with the first line that it has for people.
    """

    def __init__(self, folder: Path, options: Options, remove: bool, complain: Callable[[str], None]) -> None:
        self._folder = folder
        self._options = options
        self._remove = remove
        self._complain = complain
        self._next = 0.0
        self._starts = 0
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None

    def look_after(self) -> None:
        """Starts an exporter where none runs. At most every :data:`PERIOD` seconds, and a few times in all."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PERIOD
        if self._process is not None:
            self._process.poll()  # leave no zombie
        try:
            self._tell()
            if self._starts < STARTS:
                self._start()
        except Exception as error:  # a full table of processes, no fcntl, no interpreter: training goes on without
            self._starts = STARTS
            self._complain(
                f"no exporter could be started ({type(error).__name__}: {error}); the files are there, send them with: "
                f"fsdptrace export {self._folder} --to {self._options.exporters[0]}"
            )

    def _start(self) -> None:
        import fcntl

        lock = os.open(lock_path(self._folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # one runs
                return
            self._starts += 1
            with self._log() as log:
                # The open file, and with it the lock, goes over to the child.
                self._process = subprocess.Popen(
                    self._command(lock), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True, pass_fds=(lock,),
                )  # fmt: skip
            _started.append(self._process)
        finally:
            os.close(lock)

    def _command(self, lock: int) -> list[str]:
        if not sys.executable:
            raise RuntimeError("this interpreter does not know its own path")
        command = [sys.executable, "-c", _PROGRAM, str(self._folder), "--follow", "--spawned", f"--lock={lock}"]
        command += [f"--to={name}" for name in self._options.exporters]
        ranks = self._options.detail_ranks
        if ranks is not None:
            command.append(f"--detail-ranks={ranks if isinstance(ranks, str) else ','.join(map(str, ranks)) or 'none'}")
        return [*command, "--remove"] if self._remove else command

    def _log(self) -> Any:
        fd = os.open(self._folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return os.fdopen(fd, "wb")

    def _tell(self) -> None:
        """Hands the exporter's first word to people on to this process's log, once."""
        if self._process is None or self._read < 0:
            return
        try:
            with open(self._folder / LOG, "rb") as stream:
                stream.seek(self._read)
                text = stream.read(1 << 16)
        except OSError:
            return
        self._read += len(text)
        for line in text.decode("utf-8", "replace").splitlines():
            if line.startswith(TROUBLE):
                self._read = -1
                self._complain(f"{line[len(TROUBLE) :]} (more in {self._folder / LOG})")
                return


def lock_path(folder: Path) -> Path:
    """The lock of the exporter of ``folder`` on this node, in a folder that nobody else can write to.

    Raises:
        PermissionError: somebody else made that folder.
    """
    own = Path(tempfile.gettempdir()) / f"fsdptrace-{os.getuid()}"  # of the node, where the files may be on a shared disk
    try:
        own.mkdir(mode=0o700)
    except FileExistsError:
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{own} is not this user's own folder") from None
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=12).hexdigest()
    return own / f"export-{name}.lock"


def environment() -> dict[str, str]:
    """The environment of the exporter: ours, but recording and auto-instrumentation are off in it."""
    env = {name: value for name, value in os.environ.items() if name not in ("FSDPTRACE_TALLY", "PYTHONSTARTUP")}
    env["FSDPTRACE"] = "0"
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [path for path in paths if not path.rstrip("/").endswith("opentelemetry/instrumentation/auto_instrumentation")]
    # An interpreter that was given its paths by its host, and not by the environment, hands them on.
    env["PYTHONPATH"] = os.pathsep.join(kept)
    if not env["PYTHONPATH"]:
        del env["PYTHONPATH"]
    return env
