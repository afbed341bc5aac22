"""Real back ends with query APIs: every span and metric of a run of two ranks, read back from where it is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dashboards.test_dashboards import ask, check_every_query, queries, train, value
from exporters.test_many_ranks import RANKS, many
from exporters.test_otlp import Lines, expected_units

from support.ranks import run_ranks
from support.servers import get, mlflow, post, until, victoria_metrics, wait_for_exporter

pytestmark = [pytest.mark.servers, pytest.mark.multiprocess]


def test_mlflow_gives_back_every_span(tmp_path: Path) -> None:
    """By trace id, to the nanosecond: the step's trace, and the unit traces of both ranks, which each have violations."""
    with mlflow(tmp_path) as (url, experiment):
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": f"x-mlflow-experiment-id={experiment}", "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_TIMEOUT": "60",
        }  # fmt: skip
        run_ranks(train, 2, str(tmp_path / "out"), environment, "otlp", 0.5, timeout=120)
        said = wait_for_exporter(tmp_path / "out" / "run", 120)
        assert [line for line in said.splitlines() if not line.startswith("note: ")] == []
        files = [Lines(path) for path in sorted((tmp_path / "out" / "run").glob("*.jsonl"))]
        traces = until(lambda: _stored(url, experiment), "traces are stored")
        for lines in files:
            steps = sorted({line["step"] for line in lines.all if line.get("kind") == "step"})
            for number in steps:
                (spans,) = [spans for spans in traces if any(_is(span, "fsdp.units", lines.rank, number) for span in spans)]
                (root,) = [span for span in spans if span["name"] == "fsdp.units"]
                got = Counter(
                    (span["name"], int(span["start_time_unix_nano"]), int(span["end_time_unix_nano"]),
                     span["attributes"].get("fsdp.module.fqn", ""))
                    for span in spans if span is not root
                )  # fmt: skip
                assert got == expected_units(lines, number)
                ids = {span["span_id"] for span in spans}
                assert all(span["parent_span_id"] in ids for span in spans if span is not root)
                (whole,) = [spans for spans in traces if any(_is(span, "fsdp.rank", lines.rank, number) for span in spans)]
                (rank,) = [span for span in whole if _is(span, "fsdp.rank", lines.rank, number)]
                found = [line for line in lines.step(number) if line["kind"] == "violation"]
                shown = Counter(event["attributes"]["fsdp.rule"] for event in rank["events"])
                assert shown == Counter(line["rule"] for line in found)
                assert sum(span["name"] == "fsdp.rank" for span in whole) == 2


def test_mlflow_has_512_ranks_in_one_trace(tmp_path: Path) -> None:
    """A folder of 512 ranks: each step is one trace, and by its id come back its root and a span of every rank."""
    many(tmp_path / "out")
    with mlflow(tmp_path) as (url, experiment):
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": f"x-mlflow-experiment-id={experiment}", "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_TIMEOUT": "120",
        }  # fmt: skip
        assert _export(tmp_path, environment) == f"note: {2 * RANKS} steps delivered\n"
        traces = until(lambda: _stored(url, experiment), "traces are stored")
    whole = [spans for spans in traces if any(span["name"] == "fsdp.step" for span in spans)]
    assert len(traces) == 3  # two steps, and the units of rank 0 in one of them
    assert len(whole) == 2
    for spans in whole:
        (root,) = [span for span in spans if span["name"] == "fsdp.step"]
        ranks = [span for span in spans if span["name"] == "fsdp.rank"]
        assert sorted(span["attributes"]["dl.rank"] for span in ranks) == list(range(RANKS))
        assert {span["parent_span_id"] for span in ranks} == {root["span_id"]}


def test_victoria_metrics_has_512_ranks(tmp_path: Path) -> None:
    many(tmp_path / "out")
    with victoria_metrics(tmp_path) as url:
        environment = {
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{url}/opentelemetry/v1/metrics", "OTEL_TRACES_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_LOGS_EXPORTER": "none",
        }  # fmt: skip
        assert _export(tmp_path, environment) == f"note: {2 * RANKS} steps delivered\n"
        # The files are of 1970, where the clock's zero was put.
        count = "count(count by (dl_rank) (last_over_time(fsdp_step[1h])))"
        # Stored as they come, in requests of some ranks each.
        until(lambda: _at(url, count, 60) == RANKS, "every rank is there")


def _at(url: str, expr: str, seconds: int) -> float | None:
    found = get(f"{url}/api/v1/query", query=expr, time=str(seconds))["data"]["result"]
    return float(found[0]["value"][1]) if found else None


def _export(folder: Path, environment: dict[str, str]) -> str:
    """``fsdptrace export`` of a finished run; what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdptrace_exporters", str(folder / "out"), "--to", "otlp"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stderr


def _is(span: dict[str, Any], name: str, rank: int, step: int) -> bool:
    about = span["attributes"]
    return bool(span["name"] == name and about.get("dl.rank") == rank and about.get("fsdp.step") == step)


def _stored(url: str, experiment: str) -> list[list[dict[str, Any]]]:
    """The spans of every trace that is stored."""
    location = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        body = {"locations": [location], "max_results": 100, **({"page_token": token} if token else {})}
        answer = post(f"{url}/api/3.0/mlflow/traces/search", body)
        found += answer.get("traces", [])
        token = answer.get("next_page_token", "")
        if not token:
            break
    return [_spans(get(f"{url}/api/3.0/mlflow/traces/get", trace_id=trace["trace_id"])) for trace in found]


def _spans(answer: dict[str, Any]) -> list[dict[str, Any]]:
    def plain(value: dict[str, Any]) -> Any:
        ((kind, inner),) = value.items()
        return int(inner) if kind == "int_value" else inner

    def about(item: dict[str, Any]) -> dict[str, Any]:
        return {pair["key"]: plain(pair["value"]) for pair in item.get("attributes", [])}

    return [
        {
            **span,
            "attributes": about(span),
            "events": [{**event, "attributes": about(event)} for event in span.get("events", [])],
        }
        for span in answer["trace"]["spans"]
    ]


def test_every_panel_has_data_from_victoria_metrics(tmp_path: Path) -> None:
    """Metrics over OTLP; the same queries as for a scraped Prometheus, under the same names."""
    with victoria_metrics(tmp_path) as url:
        environment = {
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{url}/opentelemetry/v1/metrics", "OTEL_TRACES_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_METRIC_EXPORT_INTERVAL": "1000", "OTEL_LOGS_EXPORTER": "none",
            "FSDPTRACE_METRIC_MODULES": "1",
        }  # fmt: skip
        steps = run_ranks(train, 2, str(tmp_path / "out"), environment, "otlp", 6.0, timeout=120)
        said = wait_for_exporter(tmp_path / "out" / "run", 60)
        assert [line for line in said.splitlines() if not line.startswith("note: ")] == []
        until(lambda: value(url, "min(fsdp_step)") == steps[0] - 1, "the last step is there")
        assert queries()
        check_every_query(url, "run")
        assert ask(url, 'sum by (fsdptrace_run_id, fsdp_rule) (fsdp_violations_total{fsdp_severity="error"}) > 0')
        assert value(url, "sum(fsdp_step_duration_seconds_count)") == 2 * steps[0]
