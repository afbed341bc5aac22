"""The frameworks themselves on two gloo processes, started as docs/integrations.md prints it; ``nox -s stacks`` has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdptrace.files import TraceFile, find_files, read_file

STACKS = Path(__file__).parents[2] / "examples" / "stacks"
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def start(tmp_path: Path, command: str) -> str:
    """Runs ``command`` as printed, in a copy of examples/stacks, with the files it writes there; what it said."""
    folder = tmp_path / "stacks"
    shutil.copytree(STACKS, folder)
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    done = subprocess.run(
        command.split(), capture_output=True, text=True, timeout=170, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def traces(tmp_path: Path) -> list[TraceFile]:
    """The trace of each rank: whole, nothing in it that anybody should look at."""
    found = sorted((read_file(path) for path in find_files(tmp_path / "stacks" / "traces")), key=lambda trace: trace.rank)
    assert [trace.rank for trace in found] == [0, 1]
    for trace in found:
        alarms = [e["violation"] for e in trace.events if e.kind == "violation" and e["violation"]["severity"] != "info"]
        assert not alarms
        assert not trace.damaged
    return found


def gathers(trace: TraceFile, step: int, model: int = 0) -> dict[str, int]:
    """All-gathers by unit in one step."""
    names = [group.fqn for group in trace.models[model].groups]
    counted = dict.fromkeys(names, 0)
    for event in trace.events:
        if (event.kind, event.step, event.model) == ("unshard", step, model) and not event.get("noop"):
            counted[names[event.group or 0]] += 1
    return counted


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_accelerate(model: str, tmp_path: Path) -> None:
    """Twelve steps of two micro-batches: each layer is gathered for both passes of each, 4 times; so is the embedding; the last
    norm and the head are one unit that stays open until its backward, and so is gathered twice."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    said = start(
        tmp_path,
        "fsdptrace run --out traces -- accelerate launch --config_file fsdp2.yaml on_cpu.py train_accelerate.py " + model,
    )
    assert "fsdptrace: 2 FSDP2 models in 2 of 3 processes, 24 steps; no errors or warnings; files in " in said
    layers = {f"model.layers.{i}": 4 for i in range(4)}
    for trace in traces(tmp_path):
        assert gathers(trace, 1) == {"model.embed_tokens": 4, **layers, "model.norm": 2}


def test_trainer(tmp_path: Path) -> None:
    """Six steps, evaluations and checkpoints after the third and the last: nothing to look at."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    said = start(tmp_path, "fsdptrace run --out traces -- torchrun --nproc-per-node=2 on_cpu.py train_trainer.py")
    assert "fsdptrace: 2 FSDP2 models in 2 of 3 processes, 12 steps; no errors or warnings; files in " in said
    traces(tmp_path)


def test_trainer_with_the_callback(tmp_path: Path) -> None:
    """Steps are the Trainer's; it logs after steps 2, 4 and 6 and with the evaluation after the third: 22 gathers each time, of
    two micro-batches (4 each of embedding and four layers, 2 of norm and head)."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    said = start(tmp_path, "torchrun --nproc-per-node=2 on_cpu.py train_trainer.py --callback traces")
    assert "trained 6 steps; gathers logged: [22.0, 22.0, " in said
    for trace in traces(tmp_path):
        steps = [line["counts"].get("optimizer_step", 0) for line in trace.summaries]
        assert steps == [1] * 6 + [0]  # the evaluation after the last step


@pytest.mark.parametrize("callback", [False, True])
def test_lightning(callback: bool, tmp_path: Path) -> None:
    """Two epochs of four batches of four rows a rank, two batches a step: four steps. Each block is gathered for both passes of
    both batches. Zero code sees the two batches of Lightning's sanity check before the first step ends, and those of the first
    epoch's validation before the third begins; the callback begins with the training and ends steps itself."""
    pytest.importorskip("lightning")
    if callback:
        start(tmp_path, "python train_lightning.py --callback traces --logs logs")
        (logged,) = (tmp_path / "stacks" / "logs").rglob("metrics.csv")
        names, *rows = [line.split(",") for line in logged.read_text().splitlines()]
        ours: list[Any] = [row[names.index("fsdp/reduce_scatters")] for row in rows if row[names.index("fsdp/step")]]
        assert ours == ["10.0", "10.0"]  # five units, two batches, after steps 2 and 4
    else:
        said = start(tmp_path, "fsdptrace run --out traces -- python train_lightning.py")
        assert "fsdptrace: 2 FSDP2 models in 2 of 2 processes, 8 steps; no errors or warnings; files in " in said
    prefix = "net." if callback else ""
    for trace in traces(tmp_path):
        for step, times in enumerate((4, 4) if callback else (6, 6, 4)):
            counted = gathers(trace, step)
            assert {name: counted[name] for name in counted if "blocks" in name} == {
                f"{prefix}blocks.{i}": times for i in range(4)
            }


def test_torchtitan(tmp_path: Path) -> None:
    """Its own Trainer: steps of two micro-batches. Each layer is gathered for both passes of each, 4 times; norm and head are
    one unit, and the chunked loss needs it between the passes: 6 times."""
    pytest.importorskip("torchtitan")
    said = start(tmp_path, "fsdptrace run --out traces -- torchrun --nproc-per-node=2 titan_on_cpu.py")
    assert "Training completed" in said
    assert "fsdptrace: 2 FSDP2 models in 2 of " in said
    assert " 8 steps; no errors or warnings; files in " in said
    for trace in traces(tmp_path):
        assert gathers(trace, 1) == {"tok_embeddings": 4, **{f"layers.{i}": 4 for i in range(6)}, "norm": 6}


def test_verl(tmp_path: Path) -> None:
    """Its own TrainingWorker and FSDP2 engine: steps of two micro-batches, each unit gathered for both passes of each, reduced
    once: the engine holds gradients back until the last micro-batch."""
    pytest.importorskip("ray")
    pytest.importorskip("verl")
    assert "trained 4 steps" in start(tmp_path, "python train_verl.py --out traces")
    units = {"": 4, "model.embed_tokens": 4, **{f"model.layers.{i}": 4 for i in range(3)}, "lm_head": 4}
    for trace in traces(tmp_path):
        assert trace.header["local_rank"] == 0
        assert gathers(trace, 1) == units
        reduced = [event for event in trace.events if (event.kind, event.step) == ("reduce_scatter", 1)]
        assert len(reduced) == len(units)


def test_ray(tmp_path: Path) -> None:
    """Three models in each actor, of which two train; LOCAL_RANK is 0 in both, ranks are told apart all the same."""
    pytest.importorskip("ray")
    assert "trained 4 steps" in start(tmp_path, "python train_ray.py --out traces")
    for trace in traces(tmp_path):
        assert len(trace.models) == 3
        assert trace.header["local_rank"] == 0
        trained = {event.model for event in trace.events if event.kind == "optimizer_step"}
        assert len(trained) == 2
        for model in trained:  # two micro-batches, each with a forward and a backward, and the rollout before the next step
            assert all(number >= 5 for number in gathers(trace, 1, model).values())
