"""The OpenTelemetry Collector, built from Debian's sources: nobody packages its program where tests can have it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.servers import CACHE, Server, debian_suite, free_port

PACKAGES = ("golang-opentelemetry-collector-dev", "golang-go")
MAIN = """package main

import (
	"log"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/envprovider"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/otlpexporter"
	"go.opentelemetry.io/collector/exporter/otlphttpexporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/batchprocessor"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

func factories() (otelcol.Factories, error) {
	receivers, _ := otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory())
	processors, _ := otelcol.MakeFactoryMap[processor.Factory](batchprocessor.NewFactory())
	exporters, _ := otelcol.MakeFactoryMap[exporter.Factory](otlphttpexporter.NewFactory(), otlpexporter.NewFactory())
	return otelcol.Factories{Receivers: receivers, Processors: processors, Exporters: exporters,
		Telemetry: otelconftelemetry.NewFactory()}, nil
}

func main() {
	providers := []confmap.ProviderFactory{fileprovider.NewFactory(), envprovider.NewFactory()}
	resolver := confmap.ResolverSettings{ProviderFactories: providers}
	settings := otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol", Version: "debian"}, Factories: factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{ResolverSettings: resolver},
	}
	if err := otelcol.NewCommand(settings).Execute(); err != nil {
		log.Fatal(err)
	}
}
"""


def program() -> Path:
    """Its path. The first time it is built: some 300 MB of packages, 2.3 GB unpacked, three minutes; 29 MB are kept."""
    folder = CACHE / "otelcol"
    path = folder / "otelcol"
    if path.exists():
        return path
    if not all(shutil.which(tool) for tool in ("apt-get", "apt-cache", "dpkg-deb")):
        pytest.skip("the Collector is built from Debian's packages, which cannot be had without apt")
    scratch = folder / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        _unpack(folder, scratch)
        _build(scratch, path)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = getattr(error, "stderr", None) or b""
        pytest.skip(f"the Collector cannot be built here: {error}; {said[-500:]!r}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _unpack(folder: Path, scratch: Path) -> None:
    """The packages of its sources and of Go, out of a newer suite; nothing is installed."""
    options = debian_suite(folder, "forky")

    def apt(*command: str, timeout: int = 120) -> str:
        done = subprocess.run(command, cwd=scratch, capture_output=True, timeout=timeout, check=True)
        return done.stdout.decode()

    apt("apt-get", *options, "update")
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    closure = apt("apt-cache", *options, "depends", "--recurse", *(f"--no-{kind}" for kind in kinds), *PACKAGES)
    names = sorted({line for line in closure.splitlines() if line.startswith("golang-")})
    apt("apt-get", *options, "download", *names, timeout=900)
    for archive in sorted(scratch.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive.name, "root"], cwd=scratch, timeout=120, check=True)
        archive.unlink()


def _build(scratch: Path, path: Path) -> None:
    (go,) = (scratch / "root" / "usr" / "lib").glob("go-*")
    (scratch / "main").mkdir()
    (scratch / "main" / "main.go").write_text(MAIN)
    environment = {
        **os.environ, "GOROOT": str(go), "GOPATH": str(scratch / "root" / "usr" / "share" / "gocode"), "GO111MODULE": "off",
        "GOCACHE": str(scratch / "cache"), "GOTOOLCHAIN": "local", "GOFLAGS": "", "CGO_ENABLED": "0",
    }  # fmt: skip
    command = [str(go / "bin" / "go"), "build", "-ldflags=-s -w", "-o", str(path), "."]
    subprocess.run(command, cwd=scratch / "main", env=environment, capture_output=True, timeout=1500, check=True)


@contextmanager
def collector(folder: Path, sink: str) -> Iterator[tuple[Server, int, int]]:
    """The Collector between us and ``sink`` (an OTLP/HTTP URL), batching: itself, its gRPC and its HTTP port."""
    grpc, http = free_port(), free_port()
    pipeline = {"receivers": ["otlp"], "processors": ["batch"], "exporters": ["otlphttp"]}
    protocols = {"grpc": {"endpoint": f"127.0.0.1:{grpc}"}, "http": {"endpoint": f"127.0.0.1:{http}"}}
    config = {
        "receivers": {"otlp": {"protocols": protocols}},
        "processors": {"batch": {"timeout": "100ms"}},
        "exporters": {"otlphttp": {"endpoint": sink}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "warn"}},
            "pipelines": dict.fromkeys(("traces", "metrics", "logs"), pipeline),
        },
    }
    (folder / "collector.yaml").write_text(json.dumps(config))  # JSON is YAML
    server = Server([str(program()), "--config", f"file:{folder / 'collector.yaml'}"], folder / "collector.log")
    try:
        yield server.ready(grpc, http), grpc, http
    finally:
        server.stop()
