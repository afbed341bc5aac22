"""Getting a batch to the back end, whatever that does: slow, down, refusing, coming back.

What waits, waits in the trace files: a batch that cannot be delivered is tried until it is, and nothing more is read
meanwhile. Only what the back end refuses because of its contents is given up, and counted.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from fsdptrace_exporters.sinks import Settings, Unusable

FIRST_PAUSE = 0.5  # seconds between tries, twice as long each time
LONGEST_PAUSE = 8.0
PATIENCE = 60.0  # seconds that a finished run waits for the back end
TRIES = 3  # of a batch that is refused for what is in it

# Answers that are about the batch. All others (no connection, overload, no rights, no such path) are about the back end.
_REFUSED = {"INVALID_ARGUMENT", "OUT_OF_RANGE", "400", "413", "422"}
_NO_SUCH_SIGNAL = {"UNIMPLEMENTED", "NOT_FOUND", "404", "405", "501"}
_FAULT = "fault "
_CODE = re.compile(r"StatusCode\.([A-Z_]+)|code: (\d{3})\b")


class _Ear(logging.Handler):
    """Hears why an export failed: exporters of the SDK say it to their log only, and in no other way."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:
            return
        found = _CODE.search(text)
        if found:
            self._last.code = found[1] or found[2]
        listener = getattr(self._last, "listener", None)
        if listener is not None and "ransient error" in text:
            listener(found[1] or found[2] if found else "no answer")

    def listen(self, listener: Callable[[str], None] | None) -> None:
        """``listener`` is told of tries that failed and are made again within one export of this thread."""
        self._last.listener = listener

    def take(self) -> str:
        """The last status code heard on this thread, empty without one."""
        code: str = getattr(self._last, "code", "")
        self._last.code = ""
        return code


_ear: list[_Ear] = []


def ear() -> _Ear:
    """Listens to the SDK's loggers, which then print nothing: their lines may hold user info of URLs."""
    if not _ear:
        _ear.append(_Ear())
        root = logging.getLogger("opentelemetry")
        root.addHandler(_ear[0])
        root.propagate = False
        for name in (
            "opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.exporter.otlp.proto.http._log_exporter",
            "opentelemetry.exporter.otlp.common.http",
        ):  # fmt: skip
            logging.getLogger(name).filters.clear()  # they hide what repeats
    return _ear[0]


class NotDelivered(Exception):
    """The process is to end, and the batch is still there."""


class Delivery:
    """Delivers the batches of one signal, one after the other.

    Args:
        signal: ``traces``, ``metrics`` or ``logs``.
        export: takes a batch; True when it was delivered.
        where: the back end, for people: without user info.
        protocol: ``grpc`` or ``http/protobuf``.

    Attributes:
        sent, dropped: items so far.
        off: the back end does not know the signal: everything is dropped.
    """

    def __init__(
        self, signal: str, export: Callable[[Sequence[Any]], bool], where: str, protocol: str, settings: Settings
    ) -> None:
        self.signal = signal
        self._export = export
        self._where = where
        self._protocol = protocol
        self._settings = settings
        self.sent = 0
        self.dropped = 0
        self.off = False
        self._down = 0.0
        self._told: set[str] = set()

    def send(self, batch: Sequence[Any]) -> None:
        """Returns when ``batch`` is delivered, or given up.

        Raises:
            NotDelivered: :attr:`Settings.stop` was set meanwhile.
        """
        tries, pause = 0, FIRST_PAUSE
        while not self.off:
            code = self._try(batch)
            if code is None:
                self._up()
                self.sent += len(batch)
                return
            tries += 1
            fault = code.startswith(_FAULT)
            if fault and tries >= TRIES:
                self._tell(f"cannot be sent some {self.signal} ({code[len(_FAULT) :]}): they are dropped and counted", "fault")
                break
            if code in _REFUSED and tries >= TRIES:
                self._tell(f"refuses some of the {self.signal} ({code}): they are dropped and counted", code)
                break
            if code in _NO_SUCH_SIGNAL and self.signal == "logs":
                self._tell(f"takes no logs ({code}); violations are in the traces too", code)
                self.off = True
                break
            if code not in _REFUSED and not fault:
                self._outage(code)
                if not self._settings.live and time.monotonic() - self._down > PATIENCE:
                    raise Unusable(
                        f"{self._where} took no {self.signal} for {PATIENCE:.0f} s; the same command goes on from here"
                    )
            if self._settings.stop.wait(pause):
                raise NotDelivered
            pause = min(2 * pause, LONGEST_PAUSE)
        self.dropped += len(batch)

    def _try(self, batch: Sequence[Any]) -> str | None:
        """None when it was delivered, else why not, as far as one knows."""
        heard = ear()
        heard.take()
        begun = time.monotonic()

        def again(code: str) -> None:
            # An SDK may try for a minute on its own before it says that it failed.
            if time.monotonic() - begun >= 2:
                self._outage(code)

        heard.listen(again)
        try:
            if self._export(batch):
                return None
        except Unusable:
            raise
        except Exception as error:  # the older HTTP exporters let errors of the connection through
            # Anything else is about the batch: it cannot be encoded, and will not be by waiting.
            connection = isinstance(error, OSError) or type(error).__module__.startswith("grpc")
            return heard.take() or (type(error).__name__ if connection else f"{_FAULT}{type(error).__name__}: {error}")
        finally:
            heard.listen(None)
        return heard.take() or "no answer"

    def _outage(self, code: str) -> None:
        if self._down:
            return
        self._down = time.monotonic()
        hint = ""
        if self._protocol == "grpc" and self._where.endswith(":4318"):
            hint = " (port 4318 speaks HTTP as a rule: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf)"
        elif self._protocol != "grpc" and urlsplit(self._where).port == 4317:
            hint = " (port 4317 speaks gRPC as a rule: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc)"
        elif code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "401", "403"):
            hint = " (see OTEL_EXPORTER_OTLP_HEADERS)"
        self._tell(f"does not take {self.signal} over {self._protocol}: {code}{hint}; they wait in the trace files", "down")

    def _up(self) -> None:
        if self._down:
            seconds = time.monotonic() - self._down
            self._down = 0.0
            self._settings.say(f"note: {self._where} takes {self.signal} again, after {seconds:.0f} s")

    def _tell(self, text: str, about: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._settings.say(f"{self._where} {text}")


def without_user(endpoint: str) -> str:
    """An endpoint as it may be shown: no user info, no query."""
    text = endpoint if "://" in endpoint else f"//{endpoint}"
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "the back end"
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{port}{parts.path}" if parts.scheme else f"{host}{port}{parts.path}"
