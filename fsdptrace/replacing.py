"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@contextmanager
def replaced(path: str | Path) -> Iterator[IO[bytes]]:
    """A stream whose content takes the place of ``path`` once all of it is written; else nothing is left behind.

    A link stays one, and what it leads to is written. A file that is there keeps its permissions; a new one has those of
    any new file. A device or a pipe (``/dev/stdout``) is written into: nothing could take its place.

    Raises:
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    try:
        there: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        there = None
    try:
        if there is not None and not stat.S_ISREG(there.st_mode):
            with open(path, "wb") as stream:
                yield stream
        else:
            with _beside(Path(os.path.realpath(path)), there) as stream:
                yield stream
    except OSError as error:
        if error.filename is None and error.errno in FULL:  # what is written to a stream does not say to which
            error.filename = os.fspath(path)
        raise


@contextmanager
def _beside(target: Path, there: os.stat_result | None) -> Iterator[IO[bytes]]:
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.part")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        error.filename = os.fspath(target)
        raise
    try:
        with os.fdopen(handle, "wb") as stream:
            if there is not None:
                with suppress(PermissionError):  # some network file systems have none to set
                    os.fchmod(handle, stat.S_IMODE(there.st_mode))
            yield stream
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
