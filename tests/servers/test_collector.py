"""The OpenTelemetry Collector itself between us and the receiver: what rotel shows in every run of the tests, and its own
reading of OTLP JSON, metrics included."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exporters.test_otlp import (  # noqa: F401 (pytest runs them with the `sent` of this module)
    send,
    test_attributes_and_links_of_gathers,
    test_every_unit_span_is_in_the_file_to_the_nanosecond,
    test_nothing_secret_and_no_complaint,
    test_one_trace_per_step_with_all_ranks,
    test_resource_metrics_and_logs,
    test_what_the_device_did_is_on_the_spans,
)
from exporters.test_otlp_json import files  # noqa: F401

from exporters import test_otlp_json
from support.collector import collector, program
from support.servers import ROOT

# The first of them builds the Collector: Debian's mirror may take its time.
pytestmark = [pytest.mark.servers, pytest.mark.multiprocess, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with send(tmp_path_factory.mktemp("collector"), collector) as made:
        yield made


def test_it_reads_our_json_files(files: Path) -> None:  # noqa: F811
    def by_collector(folder: Path, signal: str) -> list[Any]:
        return test_otlp_json.posted(folder, signal, collector)

    test_otlp_json.test_spans(files, by_collector)
    test_otlp_json.test_metrics(files, by_collector)
    test_otlp_json.test_logs(files, by_collector)


def test_our_configuration_is_valid(tmp_path: Path) -> None:
    """But for two components of the contrib distribution, which Debian does not have."""
    config = yaml.safe_load((ROOT / "dashboards" / "collector.yaml").read_text())
    del config["receivers"]["otlpjsonfile"], config["exporters"]["prometheus"]
    for pipeline in config["service"]["pipelines"].values():
        pipeline["receivers"].remove("otlpjsonfile")
        pipeline["exporters"] = ["otlp/jaeger"]
    path = tmp_path / "collector.yaml"

    def validated() -> subprocess.CompletedProcess[str]:
        path.write_text(yaml.safe_dump(config))
        command = [str(program()), "validate", "--config", f"file:{path}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = validated()
    assert done.returncode == 0, done.stderr
    config["processors"]["batch"]["nonsense"] = 1
    assert validated().returncode != 0  # it can fail
