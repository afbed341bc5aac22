"""Fixtures: a fake process group in this process, and a recorder that writes under the test's own folder."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdptrace
import fsdptrace.notes
from support.browser import Browser, executable

_OURS = ("FSDPTRACE", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option and no launcher of the shell that runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith(_OURS):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def notes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions take no notes on Python 3.10, where fsdptrace logs them: what it logs is put on them here, so that the same
    tests say what is in a note."""
    if sys.version_info < (3, 11):
        monkeypatch.setattr(fsdptrace.notes, "put_on", _put_on)


def _put_on(error: BaseException, note: str) -> None:
    with contextlib.suppress(Exception):
        kept = error.__dict__.setdefault("__notes__", [])
        if len(kept) < fsdptrace.notes.MOST:
            kept.append(note)


@pytest.fixture
def fake_pg() -> Iterator[Callable[..., Any]]:
    """``fake_pg(world)``, ``fake_pg(2, 2, names=("replicate", "shard"))``: a mesh of a fake process group of that size.

    One process plays ``rank`` of it; collectives return at once.
    """

    def make(*shape: int, rank: int = 0, names: tuple[str, ...] | None = None) -> Any:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world = 1
        for size in shape:
            world *= size
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        torch.manual_seed(0)
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., fsdptrace.Recording]]:
    """``fsdptrace.record`` with its files under ``tmp_path / "out"`` and, unless a test asks for some, without rules.

    Everything it made is closed after the test.
    """
    made: list[fsdptrace.Recording] = []

    def make(model: Any, **options: Any) -> fsdptrace.Recording:
        options.setdefault("out", str(tmp_path / "out"))
        options.setdefault("checks", False)
        recording = fsdptrace.record(model, **options)
        made.append(recording)
        return recording

    yield make
    for recording in made:
        recording.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("fsdptrace")]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium for all tests that look at pages. Without one they are skipped, by name and reason."""
    path = executable()
    if path is None:
        pytest.skip("no chromium here: install it (Debian: apt-get install chromium) or set TEST_CHROMIUM to its path")
    started = Browser(path)
    yield started
    started.close()
