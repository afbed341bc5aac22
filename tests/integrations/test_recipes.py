"""What docs/integrations.md prints, run as printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fsdptrace
from support.models import Calls, sharded_chain

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


def block(name: str) -> str:
    """The Python block after the comment ``name``."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def run(name: str, mesh: Any) -> None:
    """A logger's recipe on three steps of a chain of three units, 6 gathers a step."""
    model = sharded_chain(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> float:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    text = block(f"logger: {name}")
    assert len(text.splitlines()) <= 10
    exec(text, {"fsdptrace": fsdptrace, "model": model, "loader": [torch.ones(2, 8)] * 3, "train_step": train_step})
    for session in list(fsdptrace.session._sessions.values()):  # type: ignore[attr-defined]
        session.close()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# The first time there is no finished step yet, and the running one's numbers are given; then the one before.
def test_wandb(fake_pg: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: what it logs is in the run's file, to be synced later."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run("wandb", fake_pg(2))
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert path.read_bytes().count(b"fsdp/gathers") >= 3


def test_tensorboard(fake_pg: Callable[..., Any]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run("tensorboard", fake_pg(2))
    read = accumulator.EventAccumulator("runs")
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("fsdp/gathers")] == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert [event.value for event in read.Scalars("fsdp/step")] == [0.0, 0.0, 1.0]


def test_mlflow(fake_pg: Callable[..., Any]) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run("mlflow", fake_pg(2))
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    history = client.get_metric_history(found.info.run_id, "fsdp/gathers")
    assert [(metric.step, metric.value) for metric in history] == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_expect(fake_pg: Callable[..., Any]) -> None:
    """A model of the shape that the page speaks of: layers that are units, and a root with parameters of its own."""
    mesh = fake_pg(2)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    model = Calls(forward, layers=nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), head=nn.Linear(8, 8))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    names: dict[str, Any] = {"model": model, "batch": torch.ones(2, 8)}
    exec(block("expect"), names)
    names["test_the_wrap"]()
