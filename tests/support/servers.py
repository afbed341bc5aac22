"""Real servers for tests, each on free ports of 127.0.0.1 and ended with its test; what cannot be had skips with the reason."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fsdptrace.exporting import lock_path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".nox" / "servers"  # what was downloaded stays: unpacked Debian packages


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(done: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Waits until ``done()`` is true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := done():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


def wait_for_exporter(folder: Path, seconds: float = 60) -> str:
    """Waits until the exporter of a run's folder is gone; what it logged."""
    import fcntl

    fd = os.open(lock_path(folder), os.O_RDWR)
    try:

        def free() -> bool:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            return True

        until(free, f"the exporter of {folder} ends", seconds)
    finally:
        os.close(fd)
    log = folder / "exporter.log"
    return log.read_text() if log.exists() else ""


class Server:
    """A process that serves."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        self._command = command
        self._environment = {**os.environ, **environment}
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as stream:
            self.process = subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )

    def ready(self, *ports: int, seconds: float = 60) -> Server:
        for port in ports:
            until(lambda port=port: self._listens(port), f"{self._command[0]} listens; it said: {self.tail()}", seconds)  # type: ignore[misc]
        return self

    def _listens(self, port: int) -> bool:
        assert self.process.poll() is None, f"{self._command[0]} ended: {self.tail()}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()


class Receiver:
    """Takes what a relay sends on over OTLP/HTTP, and keeps the decoded requests by signal."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.got: dict[str, list[Any]] = {"traces": [], "metrics": [], "logs": []}
        self.status = 200
        self.refused = 0
        classes = {
            "traces": ExportTraceServiceRequest,
            "metrics": ExportMetricsServiceRequest,
            "logs": ExportLogsServiceRequest,
        }
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                signal_name = self.path.rpartition("/")[2]
                status = receiver.status
                if status == 200:
                    request = classes[signal_name]()
                    request.ParseFromString(body)
                    receiver.got[signal_name].append(request)
                else:
                    receiver.refused += 1
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """``(resource attributes, span)`` of all traces so far."""
        return [
            (values(resource.resource.attributes), span)
            for request in self.got["traces"] for resource in request.resource_spans
            for scope in resource.scope_spans for span in scope.spans
        ]  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP attributes as a dict."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value") for item in attributes}


@contextmanager
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def rotel(folder: Path, sink: str) -> Iterator[tuple[Server, int, int]]:
    """The Rust collector between us and ``sink`` (an OTLP/HTTP URL): itself, its gRPC and its HTTP port."""
    found = importlib.util.find_spec("rotel")
    agent = Path(found.origin).with_name("rotel-agent") if found is not None and found.origin else None
    if agent is None or not agent.exists():
        pytest.skip("rotel is not installed: there is no wheel of it for this Python or platform (pip install rotel)")
    grpc, http = free_port(), free_port()
    server = Server(
        [
            str(agent), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}",
            "--exporter", "otlp", "--otlp-exporter-protocol", "http", "--batch-timeout", "100ms",
            "--otlp-exporter-traces-endpoint", f"{sink}/v1/traces", "--otlp-exporter-metrics-endpoint", f"{sink}/v1/metrics",
            "--otlp-exporter-logs-endpoint", f"{sink}/v1/logs",
        ],
        folder / "rotel.log",
    )  # fmt: skip
    try:
        yield server.ready(grpc, http), grpc, http
    finally:
        server.stop()


def get(url: str, **query: str) -> Any:
    """JSON from a server's API."""
    full = f"{url}?{urllib.parse.urlencode(query)}" if query else url
    with urllib.request.urlopen(full, timeout=20) as answer:
        return json.load(answer)


# -- Debian's packages -------------------------------------------------------------------------------------------------
def debian(program: str, package: str, suite: str = "") -> str:
    """The path of a program: installed, or out of a package that is downloaded and unpacked, nothing installed.

    ``suite`` is tried where the system's own has no such package (newer suites of the same mirror).
    """
    installed = shutil.which(program)
    if installed and not suite:
        return installed
    folder = CACHE / package
    path = folder / "usr" / "bin" / program
    if path.exists():
        return str(path)
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip(f"{program} is neither installed nor, without apt-get, to be had (on Debian: apt-get install {package})")
    folder.mkdir(parents=True, exist_ok=True)
    options = debian_suite(folder, suite) if suite else []
    try:
        if suite:
            subprocess.run(["apt-get", *options, "update"], cwd=folder, capture_output=True, timeout=120, check=True)
        done = subprocess.run(
            ["apt-get", *options, "download", package], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode and not suite:
            subprocess.run(["apt-get", "update"], capture_output=True, timeout=120, check=False)
            done = subprocess.run(
                ["apt-get", "download", package], cwd=folder, capture_output=True, text=True, timeout=120, check=False
            )
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, timeout=120, check=True)
        archive.unlink()
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        pytest.skip(f"{package} cannot be downloaded here: {error}")
    if not path.exists():
        pytest.skip(f"{package} holds no {program}")
    return str(path)


def debian_suite(folder: Path, suite: str) -> list[str]:
    """Options of apt-get for another suite of the mirror that this system uses; its own lists stay untouched."""
    listed = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(path.read_text() for path in listed if path.is_file())
    lines = [line.split() for line in text.splitlines() if line.startswith(("URIs:", "deb "))]
    mirrors = [word for words in lines for word in words if "://" in word and "security" not in word]
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if not mirrors or not keyring.exists():
        pytest.skip("no Debian mirror is set up here")
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={keyring}] {mirrors[0]} {suite} main\n")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return [
        "-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=-", "-o", f"Dir::State::lists={folder / 'lists'}",
        "-o", f"Dir::Cache={folder / 'cache'}", "-o", "APT::Sandbox::User=root",
    ]  # fmt: skip


def stop_exporter(folder: Path) -> None:
    """Ends the exporter of a run's folder that lives on for its last numbers to be scraped."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or []):
            process.terminate()
            process.wait(20)


# -- heavy ones, for `nox -s servers` ----------------------------------------------------------------------------------
MLFLOW = "3.17.2"


@contextmanager
def mlflow(folder: Path) -> Iterator[tuple[str, str]]:
    """MLflow's tracking server, which stores traces that come over OTLP: its address and the id of an experiment.

    It is installed (a minute, 380 MB) into an environment of its own, without what its server does not need.
    """
    venv = CACHE / f"mlflow-{MLFLOW}"
    python = venv / "bin" / "python"
    if not (venv / ".installed").exists():
        needed = [
            f"mlflow-skinny=={MLFLOW}", f"mlflow-tracing=={MLFLOW}", "alembic", "sqlalchemy", "flask", "flask-cors", "graphene",
            "pandas", "huey", "aiohttp", "cryptography",
        ]  # fmt: skip
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True, timeout=120)
            for arguments in (needed, ["--no-deps", f"mlflow=={MLFLOW}"]):
                subprocess.run(
                    [str(python), "-m", "pip", "install", "-q", *arguments], check=True, timeout=900, capture_output=True
                )
        except subprocess.SubprocessError as error:
            pytest.skip(f"MLflow cannot be installed here: {error}")
        (venv / ".installed").touch()
    port = free_port()
    server = Server(
        [str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
         "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "artifacts")],
        folder / "mlflow.log", MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
    )  # fmt: skip
    try:
        server.ready(port, seconds=150)
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{url}/health"), "MLflow answers", 120)
        made = post(f"{url}/api/2.0/mlflow/experiments/create", {"name": "fsdptrace"})
        yield url, str(made["experiment_id"])
    finally:
        server.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: Any) -> Any:
    """JSON to a server's API, and its answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def victoria_metrics(folder: Path) -> Iterator[str]:
    """VictoriaMetrics, which takes metrics over OTLP and answers PromQL: its address."""
    program = debian("victoria-metrics", "victoria-metrics", "forky")
    port = free_port()
    server = Server(
        [program, f"-storageDataPath={folder / 'victoria'}", f"-httpListenAddr=127.0.0.1:{port}", "-search.latencyOffset=1s",
         "-retentionPeriod=100y", "-opentelemetry.usePrometheusNaming"], folder / "victoria.log",
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{server.ready(port) and port}"
    finally:
        server.stop()
