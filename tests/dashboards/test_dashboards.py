"""Dashboards and rules: as generated, valid, about metrics that there are, and with data in them from a real run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml
from gallery.models import checkpointed_layers, data, sgd
from torch.distributed.device_mesh import init_device_mesh

import fsdptrace
from fsdptrace.adapters import legacy
from fsdptrace_exporters.metrics import COUNTERS, GAUGES, HISTOGRAMS
from support.ranks import run_ranks
from support.servers import ROOT, Server, debian, free_port, get, stop_exporter, until

FOLDER = ROOT / "dashboards"
BOARDS = sorted((FOLDER / "grafana").glob("*.json"))
RULES = FOLDER / "prometheus" / "fsdptrace.rules.yml"
# The panel that a run on CPUs leaves empty, and says so.
EMPTY_ON_CPU = {"Memory of the device's allocator"}
ON_DEVICE = re.compile(r"allgather_duration|reduction_duration|device_duration|exposed|allocated|reserved")
UNITS = {"s": "_seconds", "By": "_bytes"}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """``(panel, PromQL)`` of all boards."""
    return [
        (panel["title"], target["expr"])
        for path in BOARDS for panel in panels(json.loads(path.read_text())) for target in panel["targets"] if "expr" in target
    ]  # fmt: skip


def filled(text: str, run: str = "run") -> str:
    """A query with Grafana's variables filled in."""
    return text.replace("$__rate_interval", "1m").replace("$rank", ".*").replace("$run", run)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def metric_names() -> set[str]:
    """What the metrics are called in Prometheus."""
    out = set()
    for name, (unit, *_) in {**GAUGES, **COUNTERS, **HISTOGRAMS}.items():
        full = name.replace(".", "_") + UNITS.get(unit, "")
        if name in HISTOGRAMS:
            out |= {f"{full}_{part}" for part in ("bucket", "sum", "count")}
        else:
            out.add(f"{full}_total" if name in COUNTERS else full)
    return out


@pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None, reason="grafana-foundation-sdk needs Python 3.11"
)
def test_files_are_as_generated() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "generate.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_are_valid(path: Path) -> None:
    """Against the JSON schema of Grafana's own types (@grafana/schema 13.2.3, Apache-2.0)."""
    schema = json.loads((Path(__file__).parent / "grafana-schema.json").read_text())
    board = json.loads(path.read_text())
    jsonschema.Draft7Validator(schema).validate(board)
    assert board["uid"] == path.stem
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    for panel in panels(board):
        for ref in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert variables[ref["uid"].strip("${}")]["query"] == ref["type"]
        for link in panel["fieldConfig"]["defaults"].get("links", []):
            (uid,) = re.findall(r"^/d/([\w-]+)\?", link["url"])
            assert FOLDER / "grafana" / f"{uid}.json" in BOARDS
        if any(ON_DEVICE.search(target.get("expr", "")) for target in panel["targets"]):
            assert panel["fieldConfig"]["defaults"]["noValue"].startswith("no device timing in this run")


def test_queries_parse_and_name_metrics_that_there_are() -> None:
    known = metric_names() | {rule["record"] for rule in rules() if "record" in rule}
    texts = [filled(expr) for _, expr in queries()] + [rule["expr"] for rule in rules()]
    assert len(texts) > 30
    used = set()
    for text in texts:
        promql_parser.parse(text)
        names = set(re.findall(r"\b(fsdp(?:trace)?[_:][\w:]+)(?=\{|\)|\[| |$)", text)) - _labels(text)
        assert names, text
        assert names <= known, text
        used |= names
    # And what we measure is shown somewhere.
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in metric_names()} <= shown


def _labels(text: str) -> set[str]:
    inside = " ".join(re.findall(r"\{[^}]*\}|(?:by|on) ?\([^)]*\)", text))
    return set(re.findall(r"\bfsdp\w*", inside))


def test_promtool_accepts_and_tests_the_rules() -> None:
    promtool = debian("promtool", "prometheus")
    for arguments in (
        ("check", "rules", RULES.name),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "fsdptrace.test.yml"),
    ):
        done = subprocess.run([promtool, *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


ENOUGH = "count(count_over_time(fsdp_step_device_duration_seconds_count[1m]) >= 3)"  # a rate needs two


def train(rank: int, out: str, environment: dict[str, str], exporter: str, seconds: float, url: str = "") -> int:
    """Steps with the leak of old releases, so that a rule is broken, for some seconds, or until the Prometheus at ``url`` has
    scraped both ranks three times; the host's clock is the device's."""
    os.environ.update(environment)
    with legacy.old_bookkeeping():
        model = checkpointed_layers(init_device_mesh("cpu", (2,)), 3, use_reentrant=True)
        optimizer = sgd(model)
        end, steps = time.monotonic() + seconds, 0
        with fsdptrace.record(
            model, exporters=[exporter], out=out, run_id="run", on_violation="record", device_timing="always"
        ) as rec:
            for steps in range(1, 100_000):  # noqa: B007
                model(data()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.05)
                import torch
                import torch.distributed as dist

                enough = url and not rank and value(url, ENOUGH) == 2
                go_on = torch.tensor(float(time.monotonic() < end and not enough))
                dist.all_reduce(go_on, dist.ReduceOp.MIN)
                if not go_on:
                    break
    rec.close()
    return steps


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The address of a Prometheus that scraped a run of two ranks, and how many steps that had."""
    program = debian("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    port, served = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "300ms", "evaluation_interval": "300ms"}, "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "fsdptrace", "static_configs": [{"targets": [f"127.0.0.1:{served}"]}]}],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    server = Server(
        [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log",
    )  # fmt: skip
    try:
        server.ready(port)
        url = f"http://127.0.0.1:{port}"
        environment = {"OTEL_EXPORTER_PROMETHEUS_PORT": str(served), "FSDPTRACE_METRIC_MODULES": "1"}
        steps = run_ranks(train, 2, str(folder / "out"), environment, "prometheus", 60.0, url, timeout=120)
        try:
            until(lambda: value(url, "min(fsdp_step)") == steps[0] - 1, "the last step is scraped")
            yield url, steps[0]
        finally:
            stop_exporter(folder / "out" / "run")
    finally:
        server.stop()


def ask(url: str, expr: str) -> list[dict[str, Any]]:
    answer = get(f"{url}/api/v1/query", query=expr)
    assert answer["status"] == "success"
    return list(answer["data"]["result"])


def value(url: str, expr: str) -> float | None:
    found = ask(url, expr)
    return float(found[0]["value"][1]) if found else None


def check_every_query(url: str, run: str) -> None:
    empty = {title for title, expr in queries() if not ask(url, filled(expr, run))}
    assert empty == EMPTY_ON_CPU | (
        {"Host time of a recomputation"} if not ask(url, "fsdp_recompute_duration_seconds_count") else set()
    )
    for path in BOARDS:
        for panel in panels(json.loads(path.read_text())):
            if panel["title"] in empty:
                assert panel["fieldConfig"]["defaults"]["noValue"]


@pytest.mark.multiprocess
def test_every_panel_has_data_from_a_scraped_run(scraped: tuple[str, int]) -> None:
    url, steps = scraped
    check_every_query(url, "run")
    assert value(url, "count(count by (dl_rank) (fsdp_step))") == 2
    assert value(url, "max(fsdp_step)") == steps - 1
    assert value(url, "sum(fsdp_step_duration_seconds_count)") == 2 * steps


@pytest.mark.multiprocess
def test_the_alert_fires(scraped: tuple[str, int]) -> None:
    url, _ = scraped
    firing = until(
        lambda: [a for a in get(f"{url}/api/v1/alerts")["data"]["alerts"] if a["state"] == "firing"], "an alert fires", 20
    )
    found = {(alert["labels"]["alertname"], alert["labels"].get("fsdp_rule")) for alert in firing}
    assert ("FSDPViolation", "gather-after-backward") in found
    assert {name for name, _ in found} <= {"FSDPViolation", "FSDPHeldPastBackward", "FSDPRankBehind"}
    groups = get(f"{url}/api/v1/rules")["data"]["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(rules())
    assert all(rule["health"] == "ok" for rule in evaluated)
    for rule in rules():
        if "record" in rule:
            until(lambda rule=rule: ask(url, rule["record"]), rule["record"], 20)  # type: ignore[misc]
