"""The file of one process on disk: opened exclusively, rotated, bounded, and never training's problem.

Only the drain thread writes, but for ``flush="collective"``, where the training thread does so under the same lock.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fsdptrace.files import tail_of

_PARTS = 8  # max_bytes is kept by dropping detail from one of so many parts at a time
_PREAMBLE_LINE = re.compile(rb'"kind":"model"|"schema":')
_KEPT_LINE = re.compile(rb'"kind":"(?:step|violation|model|end|exception|signal)"|"schema":')


@dataclass(slots=True)
class _Part:
    path: Path
    size: int = 0
    thinned: bool = False
    bare: bool = False


@dataclass(slots=True)
class TraceWriter:
    """Writes lines to ``folder/{name}.jsonl``.

    Args:
        folder: the run's folder; made 0700 with its parents where it does not exist.
        name: file name without suffix.
        max_bytes: bytes of all parts and the tail together. Before they are exceeded the oldest part is cut down to its
            ``step``, ``violation`` and ``exception`` lines; when all are, the oldest goes. The header and the models stay.
        preamble: gives the lines that the first part begins with (header, models); the first of them begins the others.
        complain: called once with one clear line when writing stops.

    Attributes:
        failed: why writing stopped, empty while it goes on.
    """

    folder: Path
    name: str
    max_bytes: int
    preamble: Callable[[], str]
    complain: Callable[[str], None]
    failed: str = ""
    written: int = 0
    lost: int = 0
    _parts: list[_Part] = field(default_factory=list)
    _opened: int = 0
    _fd: int = -1
    _tail_fd: int = -1
    _tailed: bool = False  # there is something in it

    @property
    def path(self) -> Path:
        """The first file."""
        return self.folder / f"{self.name}.jsonl"

    def open(self) -> None:
        """Makes the folder and the first part.

        Raises:
            OSError: that cannot be done.
        """
        made = not self.folder.exists()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if made:
            os.chmod(self.folder, 0o700)
        self._open_part()

    def write(self, text: str) -> bool:
        """Appends ``text`` (whole lines). False when it could not, now or before; training never notices."""
        if self.failed or self._fd < 0:
            self.lost += text.count("\n")
            return False
        data = text.encode("utf-8", "backslashreplace")
        try:
            if self._parts[-1].size + len(data) > self.max_bytes // _PARTS and self._parts[-1].size > 4096:
                self._open_part()
            self._make_room(len(data))
            self._put(data)
        except OSError as error:
            self._fail(error)
            self.lost += text.count("\n")
            return False
        return True

    def write_tail(self, text: str) -> None:
        """Replaces what is known of a step that is running and will be kept only if something goes wrong in it."""
        if self.failed or self._fd < 0:
            return
        try:
            if self._tail_fd < 0:
                self._tail_fd = os.open(tail_of(self.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._tail_fd, 0)
            data = text.encode("utf-8", "backslashreplace")
            if len(data) > self.max_bytes // _PARTS:  # whole lines, the newest
                data = data[data.find(b"\n", len(data) - self.max_bytes // _PARTS) + 1 :]
            self._tailed = True
            _write_all(self._tail_fd, data, 0)
        except OSError as error:
            self._fail(error)

    def empty_tail(self) -> None:
        """The step of the tail ended well, or is in the file."""
        if self._tailed:
            self._tailed = False
            try:
                os.ftruncate(self._tail_fd, 0)
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """Closes the files; the tail has no use after an orderly end."""
        try:
            if self._tail_fd >= 0:
                os.close(self._tail_fd)
                os.unlink(tail_of(self.path))
            if self._fd >= 0:
                os.close(self._fd)
        except OSError:
            pass
        self._fd = self._tail_fd = -1

    def abandon(self) -> None:
        """Closes the descriptors without touching the files (in a forked child)."""
        for fd in (self._fd, self._tail_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._tail_fd = -1

    # -- inside --------------------------------------------------------------------------------------------------------
    def _open_part(self) -> None:
        number = self._opened
        path = self.path if not number else self.folder / f"{self.name}.{number}.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._opened += 1
        self._parts.append(_Part(path))
        preamble = self.preamble()
        self._put((preamble.partition("\n")[0] + "\n" if number else preamble).encode("utf-8", "backslashreplace"))

    def _put(self, data: bytes) -> None:
        part = self._parts[-1]
        before = part.size
        try:
            _write_all(self._fd, data)
        except OSError:
            # A torn line would make the next one unreadable too: take back what a full disk let through.
            try:
                os.ftruncate(self._fd, before)
            except OSError:
                pass
            raise
        part.size += len(data)
        self.written += len(data)

    def _make_room(self, needed: int) -> None:
        # An exporter may have removed what it delivered.
        self._parts[:-1] = [part for part in self._parts[:-1] if _still_there(part)]
        limit = self.max_bytes - self.max_bytes // _PARTS  # the rest is for the tail
        while sum(part.size for part in self._parts) + needed > limit:
            old = self._parts[:-1]
            if full := next((part for part in old if not part.thinned), None):
                self._rewrite(full, lambda line: _KEPT_LINE.search(line, 0, 120) is not None, told=True)
                full.thinned = True
            elif thin := next((part for part in old if not part.bare), None):
                if thin is self._parts[0] and thin.path == self.path:
                    self._rewrite(thin, lambda line: _PREAMBLE_LINE.search(line, 0, 120) is not None)
                    thin.bare = True
                else:
                    os.unlink(thin.path)
                    self._parts.remove(thin)
            else:
                return

    def _rewrite(self, part: _Part, wanted: Callable[[bytes], bool], told: bool = False) -> None:
        """Cuts a part down to the lines that are ``wanted``; ``told`` adds a line with the number of events that went."""
        temporary = part.path.with_suffix(".thin")
        with open(part.path, "rb") as source:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            size = gone = 0
            try:
                for line in source:
                    if wanted(line):
                        _write_all(fd, line)
                        size += len(line)
                    else:
                        gone += line.startswith(b'{"seq":')
                if told and gone:
                    line = b'{"kind":"thinned","events":%d}\n' % gone
                    _write_all(fd, line)
                    size += len(line)
            finally:
                os.close(fd)
        os.replace(temporary, part.path)
        part.size = size

    def _fail(self, error: OSError) -> None:
        self.failed = error.strerror or str(error)
        self.complain(f"cannot write {self.path}: {self.failed}. The trace stops here; checks and training go on.")


def _still_there(part: _Part) -> bool:
    try:
        part.size = os.stat(part.path).st_size
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _write_all(fd: int, data: bytes, offset: int | None = None) -> None:
    view = memoryview(data)
    while view:
        count = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        view = view[count:]
        if offset is not None:
            offset += count


def spool_folder() -> Path:
    """Where files go that only an exporter wants: a folder of the user's own under the temporary folder, on this node."""
    return Path(tempfile.gettempdir()) / f"fsdptrace-spool-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def choose_folder(out: str | None, complain: Callable[[str], None]) -> Path:
    """The folder for runs: ``out``, else ``./fsdptrace-out``, else one under the temporary folder, with a line that says so."""
    wanted = Path(out) if out else Path("fsdptrace-out")
    reason = _unwritable(wanted)
    if not reason:
        return wanted.absolute()
    fallback = Path(tempfile.gettempdir()) / f"fsdptrace-out-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    complain(f"cannot write to {wanted}: {reason}; files go to {fallback} instead (set out=... or FSDPTRACE_OUT)")
    return fallback


def _unwritable(folder: Path) -> str:
    try:
        made = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if made:
            os.chmod(folder, 0o700)
        probe = folder / f".probe-{os.getpid()}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(probe)
    except OSError as error:
        return error.strerror or str(error)
    return ""
