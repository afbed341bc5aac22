"""What lives as long as the process: counters, ring, file and drain thread, shared by every recording that agrees on them."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fsdptrace import events as ev
from fsdptrace import last_words
from fsdptrace._version import __version__
from fsdptrace.checks.base import Violation
from fsdptrace.checks.policy import QuietLog, logger
from fsdptrace.checks.tracker import Tracker
from fsdptrace.disk import TraceWriter, choose_folder, spool_folder
from fsdptrace.drain import Drain
from fsdptrace.exporting import Exporter
from fsdptrace.files import LineFormatter
from fsdptrace.live import Panel
from fsdptrace.model_map import ModelMap
from fsdptrace.options import Options, safe_name
from fsdptrace.rank_order import Order
from fsdptrace.ring import Ring
from fsdptrace.watch import Watch

if TYPE_CHECKING:
    from fsdptrace.adapters.device import Timing

RUN_ID_WAIT = 5.0  # seconds that other ranks wait for rank 0's run id
FILE_WAIT = 0.2  # seconds at most that the first recording waits for its file: a process may abort in its first collective
KEPT_VIOLATIONS = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is in the job."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int

    @classmethod
    def now(cls) -> Identity:
        """From the default process group, else from the launcher's variables."""
        rank, world = _int("RANK"), _int("WORLD_SIZE", 1)
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        attempt = _int("TORCHELASTIC_RESTART_COUNT", _int("SLURM_RESTART_COUNT"))
        return cls(rank, world, _int("LOCAL_RANK", _int("SLURM_LOCALID")), attempt)


def _int(name: str, default: int = 0) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


class Session:
    """Counters, ring, file and drain of one process for one set of file options."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.identity = Identity.now()
        self.pid = os.getpid()
        self.host = safe_name(socket.gethostname().split(".")[0])
        self.ring = Ring()
        self.texts = ev.Texts()
        self.ids = count(1)
        self.threads: dict[int, int] = {}
        self.models: dict[int, ModelMap] = {}
        self.new_models: deque[ModelMap] = deque()
        self.trackers: weakref.WeakValueDictionary[int, Tracker] = weakref.WeakValueDictionary()
        self.recorded: dict[int, weakref.ref[Any]] = {}
        self.installed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.violations: deque[Violation] = deque(maxlen=KEPT_VIOLATIONS)
        self.violation_count = 0
        self.log = QuietLog()
        self.coverage: list[str] = []
        self.coverage_written = 0  # so many of them are in the file
        self.clock = (time.perf_counter_ns(), time.time_ns())
        self.formatter = LineFormatter(self.texts, self.models)
        self.run_id = ""
        self.run_id_source = ""
        self._naming = threading.Lock()
        self.writer: TraceWriter | None = None
        self.shared: dict[int, list[int]] = {}
        self.active_spans: deque[tuple[int, int, str]] = deque(maxlen=1000)
        self._exporter: Exporter | None = None
        self.timings: dict[int, Timing] = {}
        self.device_takers: dict[int, weakref.WeakMethod[Callable[[], bool]]] = {}
        self.live = options.live
        self._panel: Panel | None = None
        self._panel_asked = False
        self.closed = False
        self.ended_by = ""
        self.left_by = ("", 0)  # the last exception that left a model, and the newest event then
        self.found_apart = 0  # events that are not of the training's own doing
        self.at_exit = False
        self._keeping = threading.Lock()
        self.drain = Drain(self)
        self.order = Order()
        self.ring.taker = self.order.take
        self.watch = Watch(self)
        last_words.add(self.drain.last_words)
        atexit.register(self._at_exit)
        _register_finalizer(self)

    # -- models --------------------------------------------------------------------------------------------------------
    def add_model(self, model_map: ModelMap) -> None:
        """A recorded root appeared, or its map is known better now; the drain writes its line before its events. Called by
        the training thread, which waits for no disk."""
        self.models[model_map.model] = model_map
        self.new_models.append(model_map)

    def cannot_show(self, line: str) -> None:
        """Something that this run cannot show came to light: it goes to the file, for every report to repeat."""
        if line not in self.coverage:
            self.coverage.append(line)  # the drain writes it; the training thread waits for no disk

    def next_model(self) -> int:
        """Number for a new root.

        Raises:
            RuntimeError: more than 255 roots in one process.
        """
        number = len(self.models)
        if number >= ev.MAX_MODELS:
            raise RuntimeError(f"fsdptrace records at most {ev.MAX_MODELS} models per process")
        return number

    def take_device_times(self) -> bool:
        """Has the recorded models take what was worked out after their last step; whether there was any."""
        takers = [taker for reference in self.device_takers.values() if (taker := reference()) is not None]
        return sum(taker() for taker in takers) > 0

    # -- the file ------------------------------------------------------------------------------------------------------
    def open_file(self) -> bool:
        """Called by the drain before its first line: opens the file. False when it cannot."""
        opened = not self.writer.failed if self.writer is not None else self._open_file()
        if opened and self.live and not self._panel_asked and self.writer is not None:
            self._panel_asked = True
            run = f"{self.run_id}:{self.identity.attempt}" if self.identity.attempt else self.run_id
            self._panel = Panel.start(self.writer.folder, run, self.identity.local_rank, self.complain)
        return opened

    def _open_file(self) -> bool:
        self.settle_run_id()
        spooled = bool(self.options.exporters) and self.options.out is None
        out = spool_folder() if spooled else self.options.out
        folder = choose_folder(None if out is None else str(out), self.complain) / safe_name(self.run_id)
        role = f"{self.options.role}-" if self.options.role else ""
        name = f"{role}rank{self.identity.rank:05d}.{self.host}-{self.pid}"
        for attempt in range(100):
            writer = TraceWriter(
                folder,
                name if not attempt else f"{name}-{attempt}",
                self.options.max_bytes,
                self._preamble,
                self.complain,
            )
            self.writer = writer
            self.new_models.clear()  # they are in what the file begins with
            try:
                writer.open()
                if self.options.exporters:
                    self._exporter = Exporter(folder, self.options, spooled, self.complain)
                    self._exporter.look_after()
                return True
            except FileNotFoundError:  # an exporter removed the folder of an earlier recording just now
                continue
            except FileExistsError:  # another session of this process, or an old file under the same pid
                continue
            except OSError as error:
                writer.failed = error.strerror or str(error)
                self.complain(f"cannot write to {folder}: {writer.failed}. There is no trace; checks and training go on")
                return False
        return False

    def look_after_exporter(self) -> None:
        """Called by the drain about once a second: an exporter that is gone is started again."""
        if self._exporter is not None:
            self._exporter.look_after()

    def _preamble(self) -> str:
        header = self.header()
        self.coverage_written = len(header["coverage"])
        return _line(header) + "".join(_line(model.to_json()) for model in self.models.values())

    def header(self) -> dict[str, Any]:
        """The first line of the file. Never in it: argv, the environment, anything from a URL."""
        import platform

        import numpy

        from fsdptrace.adapters import compat

        options = self.options
        identity = self.identity
        policy = options.on_violation
        return {
            "schema": ev.SCHEMA,
            "rank": identity.rank,
            "world_size": identity.world_size,
            "local_rank": identity.local_rank,
            "role": options.role,
            "host": self.host,
            "pid": self.pid,
            "run_id": self.run_id,
            "run_id_source": self.run_id_source,
            "attempt": identity.attempt,
            "versions": {
                "fsdptrace": __version__,
                "torch": compat.require().version,
                "python": platform.python_version(),
                "numpy": str(numpy.__version__),
            },
            "options": {
                "checks": list(options.checks) if isinstance(options.checks, tuple) else options.checks,
                "on_violation": policy if isinstance(policy, str) else "function" if callable(policy) else "mapping",
                "detail": options.detail,
                "fingerprint": list(options.fingerprint),
                "checkpoint_detail": options.checkpoint_detail,
                "flush": options.flush,
                "max_bytes": options.max_bytes,
                "budget_bytes": options.budget_bytes,
                "rule_options": _plain(options.rule_options),
                "schedule": options.schedule is not None,
            },
            "clock": {"perf_counter_ns": self.clock[0], "unix_ns": self.clock[1]},
            "coverage": list(self.coverage),
        }

    def settle_run_id(self) -> None:
        """Finds the run's name, once. May wait for rank 0: never called with the drain's lock, which training takes too."""
        with self._naming:
            if not self.run_id:
                self.run_id, self.run_id_source = self._find_run_id()

    def _find_run_id(self) -> tuple[str, str]:
        env = os.environ
        if self.options.run_id:
            return self.options.run_id, "option"
        elastic = env.get("TORCHELASTIC_RUN_ID", "")
        if elastic and elastic != "none":
            return safe_name(elastic), "torchelastic"
        if env.get("SLURM_JOB_ID"):
            parts = [env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_ARRAY_TASK_ID")]
            return safe_name("-".join(part for part in parts if part)), "slurm"
        made = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
        shared = self._agree(made)
        return (shared, "store") if shared else (made, "local")

    def _agree(self, made: str) -> str:
        """Rank 0's id through the default c10d store: polled, never a blocking wait, since a waiting client would hold
        the store's lock against the training thread. Empty when there is no store or it does not answer."""
        from fsdptrace.adapters.store import default_store

        store = default_store()
        if store is None or self.identity.world_size < 2:
            return made if self.identity.world_size > 1 else ""
        key = f"fsdptrace/run_id/{self.identity.attempt}"
        try:
            if self.identity.rank == 0:
                if store.check([key]):
                    return str(store.get(key).decode())
                store.set(key, made)
                return made
            deadline = time.monotonic() + RUN_ID_WAIT
            while time.monotonic() < deadline:
                if store.check([key]):
                    return str(store.get(key).decode())
                time.sleep(0.01)
        except Exception:  # a store that is gone or only pretends (FakeStore): the run is local then
            return ""
        return ""

    def complain(self, message: str) -> None:
        """One clear line to the log."""
        logger().warning(message)

    # -- violations ----------------------------------------------------------------------------------------------------
    def keep(self, violation: Violation) -> int:
        """Keeps ``violation``; the index that its record carries."""
        body = violation.to_json()
        for name in ("model", "group", "step"):
            del body[name]
        with self._keeping:  # rules look on the training thread, those that compare ranks on one of their own
            self.violations.append(violation)
            self.violation_count += 1
            return self.texts.put_once(json.dumps(body))

    def found(self, violation: Violation, say: bool) -> None:
        """A rule that compares ranks was broken, off the training thread: recorded for the model that it names. ``say``: this
        rank speaks for all of them in the log."""
        recorded = self.recorded.get(violation.model)
        target = recorded() if recorded is not None else None
        if target is not None:
            target.found_elsewhere(violation, say)

    # -- end -----------------------------------------------------------------------------------------------------------
    def _at_exit(self) -> None:
        self.ended_by, self.at_exit = last_words.unhandled(), True
        self.close()

    def close(self) -> None:
        """Writes what is left and the end line; called at the end of the process, or by hand. Idempotent."""
        if self.closed or self.pid != os.getpid():
            return
        self.closed = True
        last_words.remove(self.drain.last_words)
        self.watch.close()
        self.drain.close()
        if self._panel is not None:
            self._panel.close()
        where = str(self.writer.folder) if self.writer is not None else ""
        self.log.close(where)
        _sessions.pop(self.options.file_key(), None)
        _closed.append(self.tally())
        atexit.unregister(self._at_exit)

    def tally(self) -> dict[str, Any]:
        """What it saw, for ``fsdptrace run``: models, steps, violations, path."""
        # A model that was let go, or a recording that an exception left, has a last step that nobody ended: it counts.
        running = self.ring.running.items()
        return {
            "models": len({model for model, step in running if step.step or step.records}),
            "steps": sum(step.step + bool(step.records) for _, step in running),
            "errors": sum(v.severity == "error" for v in self.violations),
            "warnings": sum(v.severity == "warning" for v in self.violations),
            "rules": sorted({v.rule for v in self.violations if v.severity != "info"}),
            "path": str(self.writer.path) if self.writer is not None else "",
        }

    def forget(self) -> None:
        """In a forked child: nothing of the parent's is ours; the child starts its own when it records."""
        self.closed = True
        self.ring.clear()
        if self.writer is not None:
            self.writer.abandon()


def _plain(options: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
    """Options of rules as JSON can carry them; what it cannot is left out, and the rule's own value is used by `check`."""
    if not options:
        return None
    return {
        rule: {key: value for key, value in values.items() if isinstance(value, (str, int, float, bool, type(None)))}
        for rule, values in options.items()
    }


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"


_closed: list[dict[str, Any]] = []


def total() -> dict[str, Any]:
    """The tallies of all sessions of the process, closed ones too; the path is the first one's."""
    tallies = [*_closed, *(session.tally() for session in _sessions.values())]
    out: dict[str, Any] = {key: sum(t[key] for t in tallies) for key in ("models", "steps", "errors", "warnings")}
    out["rules"] = sorted({rule for t in tallies for rule in t["rules"]})
    out["path"] = next((t["path"] for t in tallies if t["path"]), "")
    return out


_sessions: dict[tuple[Any, ...], Session] = {}
_guard = threading.Lock()


def session_for(options: Options) -> Session:
    """The process's session for ``options``, made when first asked for."""
    with _guard:
        key = options.file_key()
        session = _sessions.get(key)
        if session is not None and session.writer is not None and not session.writer.path.exists():
            session.close()  # its folder was deleted under it: what it wrote is gone, and so would be what it writes
        if session is None or session.closed:
            session = _sessions[key] = Session(options)
        session.live = session.live or options.live
        return session


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    for session in list(_sessions.values()):
        session.forget()
    _sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _register_finalizer(session: Session) -> None:
    """multiprocessing ends forked children by ``os._exit``, past atexit; its own finalizers do run."""
    try:
        from multiprocessing.util import Finalize
    except ImportError:
        return
    Finalize(session, Session.close, args=(session,), exitpriority=100)
