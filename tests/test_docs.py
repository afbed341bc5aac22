"""What the docs tell people to type is there and works; the commands themselves are tested in tests/cli."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fsdptrace

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_links_exist(page: Path) -> None:
    from typer.main import get_command

    from fsdptrace.cli.app import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    text = page.read_text()
    used = set(re.findall(r"(?:^|`)fsdptrace ([a-z]+)", text, re.MULTILINE))
    assert used <= known
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target in re.findall(r"`((?:tests|benchmarks|docs|examples|fsdptrace)/[\w/.]+\.\w+)`", text):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_programs_run(fake_pg: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both Python blocks, as printed, with a model of three units."""
    monkeypatch.chdir(tmp_path)
    mesh = fake_pg(2)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged: list[dict[str, float]] = []

    def train_step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = torch.randn(4, 8)
    names = {
        "fsdptrace": fsdptrace, "model": model, "batch": batch, "optimizer": optimizer, "loader": [batch] * 3,
        "train_step": train_step, "log": logged.append,
    }  # fmt: skip
    for block in blocks:
        exec(block, names)
    # Steps end lazily: in the third round the second step has just begun, so that its predecessor is the last one there.
    assert [scalars["fsdp/gathers"] for scalars in logged] == [6.0, 6.0, 6.0]  # three units, forward and backward
    assert (tmp_path / "traces").is_dir()
    for session in list(fsdptrace.session._sessions.values()):  # type: ignore[attr-defined]
        session.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they would measure for minutes")
def test_programs_for_a_gpu_say_that_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command of docs/device.md, as far as a machine without one goes: imports, options, the reason."""
    commands = set(re.findall(r"python (benchmarks/device_\w+\.py[^`\n]*)", (ROOT / "docs" / "device.md").read_text()))
    assert len(commands) == 4
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    for command in sorted(commands):
        monkeypatch.setattr(sys, "argv", command.split())
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / command.split()[0]), run_name="__main__")
        assert (ended.value.code, capsys.readouterr().err.split(":")[0]) == (2, "no GPU here")
    for name in set(sys.modules) - before:
        if name == "models" or name.startswith("device_"):
            del sys.modules[name]
