"""Puts the page together: data, scripts and styles in one file, which may load nothing from anywhere.

Names of modules are the user's data: they stand in a JSON block and reach the page as text, never as markup. Should one
slip through all the same, the page's own policy lets no script run but those written here (by their hashes).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

from fsdptrace.analysis import Run
from fsdptrace.analysis.workers import Progress
from fsdptrace.html.choice import MAX_EVENTS
from fsdptrace.html.data import page_data
from fsdptrace.replacing import replaced

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = (
    # What the first look needs, then the rest: a browser may show the page in between.
    ("format.js", "lanes.js", "labels.js", "painter.js", "controls.js", "timeline.js", "page.js"),
    ("uPlot.iife.min.js", "charts.js", "rest.js"),
)  # fmt: skip
_STYLES = ("uPlot.min.css", "page.css")


def render(run: Run, limit: int = MAX_EVENTS, progress: Progress | None = None) -> str:
    """The page of ``run``; ``limit`` bounds the events on its time axis, those of interest first; ``progress`` is told now and
    then how many bytes of the files were read, and of how many."""
    return assemble(page_data(run, limit, progress))


def write(run: Run, path: str | Path, limit: int = MAX_EVENTS, progress: Progress | None = None) -> Path:
    """Writes the page that :func:`render` makes to ``path``; a file that is there is replaced only when all is written.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = Path(path)
    data = render(run, limit, progress).encode("utf-8")
    with replaced(path) as stream:
        stream.write(data)
    return path


def assemble(data: dict[str, Any]) -> str:
    """The page of ``data``, as :func:`fsdptrace.html.data.page_data` makes it."""
    scripts = ["\n".join(_read(name) for name in names) for names in _SCRIPTS]
    style = "\n".join(_read(name) for name in _STYLES)
    licence = "uPlot, in this file:\n" + _read("uPlot.LICENSE")
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = "; ".join((
        "default-src 'none'", f"script-src {hashes}", f"style-src '{_hash(style)}'", "img-src data:", "base-uri 'none'",
        "form-action 'none'",
    ))  # fmt: skip
    elements = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>fsdptrace: {html.escape(str(data['run']['label']))}</title>\n"
        f"<!--\n{licence.replace('--', '- -')}-->\n"
        f"<style>{style}</style></head>\n"
        f"<body>\n{_read('page.html')}\n"
        f'<script type="application/json" id="data">{_json(data)}</script>\n'
        f"{elements}"
        "</body></html>\n"
    )


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(data: dict[str, Any]) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII: lone surrogates of a damaged name stay escapes
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
