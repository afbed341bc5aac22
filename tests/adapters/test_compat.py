"""A PyTorch that lacks what is needed is refused with one clear error; a newer one is recorded, with one line."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import fsdptrace
from fsdptrace.adapters import compat
from fsdptrace.cli import demo_training
from support.models import sharded_chain, train
from support.snapshot import differences, snapshot


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_checked", None)


def test_this_release_has_everything() -> None:
    report = compat.examine()
    assert report.missing == ()
    assert "FSDPParamGroup.unshard" in report.found
    assert compat.release_of(report.version) == report.release >= (2, 6)


def test_a_missing_name_is_refused(fake_pg: Any, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_chain(fake_pg(4), 1)
    monkeypatch.delattr(FSDPParamGroup, "finalize_backward")
    monkeypatch.delattr(FSDPState, "_pre_backward")
    before = snapshot([model])
    says = r"it lacks FSDPParamGroup\.finalize_backward, FSDPState\._pre_backward"
    with pytest.raises(fsdptrace.UnsupportedTorch, match=says) as error, record(model):
        pass
    assert torch.__version__ in str(error.value)
    assert "fsdptrace doctor" in str(error.value)
    assert differences(before, snapshot([model])) == []


def test_a_newer_release_is_recorded_with_one_line(
    fake_pg: Any, record: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = sharded_chain(fake_pg(4), 1)
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git1234")
    monkeypatch.setattr("fsdptrace.recording._warned", [])
    with caplog.at_level(logging.WARNING, logger="fsdptrace"):
        for _ in range(3):
            with record(model) as rec:
                train(model)
    assert rec.steps[-1].counts["forward"] == 1
    (line,) = caplog.records
    assert "torch 2.99.0a0+git1234 is newer than any release fsdptrace was tried with" in line.getMessage()


def test_a_release_that_cannot_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"FSDP2 of torch {torch.__version__} trains on accelerators alone; on a CPU it does since 2.7"
    assert says not in compat.examine().notes
    monkeypatch.delattr(torch.cpu.Stream, "record_event")  # as 2.6 has it
    assert says in compat.examine().notes
    assert compat.examine().missing == ()
    with pytest.raises(SystemExit, match="the demo trains on the CPU"):
        demo_training.work(demo_training.Job(0, 2, 2, 1, "out", "store", "result", 60, {"leak": "a"}))


def test_release_of() -> None:
    assert compat.release_of("2.13.0+cpu") == (2, 13)
    assert compat.release_of("2.6.0a0+df5bbc0") == (2, 6)
    assert compat.release_of("unknown") == (0, 0)
