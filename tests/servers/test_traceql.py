"""The TraceQL of the dashboards, by the grammar that Grafana's own editor uses."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from dashboards.test_dashboards import BOARDS, panels

from support.servers import CACHE

pytestmark = pytest.mark.servers

PROGRAM = """
import { parser } from '@grafana/lezer-traceql';
const bad = [];
for (const query of JSON.parse(process.argv[2])) {
  parser.parse(query).iterate({ enter: node => { if (node.type.isError) bad.push(query); } });
}
console.log(JSON.stringify(bad));
"""


def test_traceql_is_grammatical() -> None:
    if not shutil.which("npm"):
        pytest.skip("npm is not installed: the grammar is an npm package (@grafana/lezer-traceql)")
    folder = CACHE / "traceql"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.mjs").write_text(PROGRAM)
    if not (folder / "node_modules").exists():
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "@grafana/lezer-traceql@1.0.0"],
            cwd=folder, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"npm cannot install the grammar here: {done.stderr[-300:]}")
    boards = [json.loads(path.read_text()) for path in BOARDS]
    found = [target["query"] for board in boards for panel in panels(board) for target in panel["targets"] if "query" in target]
    found = [query.replace("$run", "run") for query in found]
    assert len(found) >= 5

    def bad(queries: list[str]) -> list[str]:
        done = subprocess.run(
            ["node", "check.mjs", json.dumps(queries)], cwd=folder, capture_output=True, text=True, timeout=60, check=True
        )
        return list(json.loads(done.stdout))

    assert bad(found) == []
    assert bad(["{ name = }"])  # the check can fail
