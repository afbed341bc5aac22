"""The callbacks, driven as their frameworks drive them, by stand-ins: the frameworks themselves are in test_stacks.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdptrace
from fsdptrace.files import find_files, read_file
from support.models import sharded_chain, train

MakeMesh = Callable[..., Any]


@pytest.fixture(autouse=True)
def frameworks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Modules of the frameworks' names, with the base classes; ours are imported anew with them, and forgotten after."""
    monkeypatch.chdir(tmp_path)
    stand_ins = {
        "transformers": {"TrainerCallback": type("TrainerCallback", (), {})},
        "lightning": {},
        "lightning.pytorch": {"Callback": type("Callback", (), {})},
        "accelerate": {"Accelerator": Accelerator},
    }
    for name, contents in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, f"fsdptrace.integrations.{name}", raising=False)
    yield
    for name in stand_ins:
        sys.modules.pop(f"fsdptrace.integrations.{name}", None)
    for session in list(fsdptrace.session._sessions.values()):  # type: ignore[attr-defined]
        session.close()


class Accelerator:
    """Keeps what is logged, as its trackers would."""

    def __init__(self, *models: nn.Module) -> None:
        self._models = list(models)
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((values, step))


class Trainer:
    """Calls its callbacks and logs as transformers does: every second step, by way of the callbacks' ``on_log``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.callbacks: list[Any] = []
        self.history: list[dict[str, Any]] = []

    def log(self, logs: dict[str, Any]) -> None:
        self.history.append(dict(logs))
        for callback in self.callbacks:
            callback.on_log(None, None, None, logs=logs)

    def train(self, steps: int) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for callback in self.callbacks:
            callback.on_train_begin(None, None, None, model=self.model, optimizer=optimizer)
        for step in range(1, steps + 1):
            train(self.model)
            train(self.model, optimizer)
            for callback in self.callbacks:
                callback.on_step_end(None, None, None, model=self.model)
            if step % 2 == 0:
                self.log({"loss": 1.0})
        for callback in self.callbacks:
            callback.on_train_end(None, None, None)
        self.log({"train_runtime": 1.0})


def written() -> list[tuple[int, int, int]]:
    """Per step of the one trace here: its number, gathers and optimizer steps."""
    (path,) = find_files("out")
    trace = read_file(path)
    gathers = [event for event in trace.events if event.kind == "unshard" and not event.get("noop")]
    return [
        (line["step"], sum(event.step == line["step"] for event in gathers), line["counts"].get("optimizer_step", 0))
        for line in trace.summaries
    ]


def test_transformers(fake_pg: MakeMesh) -> None:
    """Four steps of two micro-batches on three units: 12 gathers a step. The Trainer logs after steps 2 and 4; what it logs at
    the end of the training has nothing of ours, since no step ended after it."""
    from fsdptrace.integrations import TransformersCallback

    trainer = Trainer(sharded_chain(fake_pg(2)))
    callback = TransformersCallback(trainer, out="out")
    trainer.callbacks.append(callback)
    trainer.train(4)
    assert ["fsdp/step" in logs for logs in trainer.history] == [False, True, False, True, False]
    ours = [logs for logs in trainer.history if "fsdp/step" in logs]
    assert [(logs["fsdp/step"], logs["fsdp/gathers"]) for logs in ours] == [(1, 12), (3, 12)]
    callback.recording.flush()
    assert written() == [(step, 12, 1) for step in range(4)]


def test_transformers_trains_again_after_an_error(fake_pg: MakeMesh) -> None:
    """In a notebook: the first training is interrupted, nobody says so to the callback, and the second one is recorded."""
    from fsdptrace.integrations import TransformersCallback

    trainer = Trainer(sharded_chain(fake_pg(2)))
    callback = TransformersCallback(out="out")
    trainer.callbacks.append(callback)
    callback.on_train_begin(None, None, None, model=trainer.model)
    train(trainer.model)
    trainer.train(2)
    assert [logs for logs in trainer.history if "fsdp/step" in logs] == []  # it was given no trainer to log to
    callback.recording.flush()
    assert written() == [(0, 6, 0), (1, 12, 1), (2, 12, 1)]


class Logger:
    def __init__(self) -> None:
        self.logged: list[tuple[int, float, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics["fsdp/step"], metrics["fsdp/gathers"]))


def test_lightning(fake_pg: MakeMesh) -> None:
    """Six batches, an optimizer's step in every second of them: three steps. With ``log_every_n_steps=2`` Lightning's own
    values are logged at its step 1, and so are ours."""
    from fsdptrace.integrations import LightningCallback

    model = nn.ModuleDict({"net": sharded_chain(fake_pg(2))})  # as a LightningModule holds its network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = LightningCallback(out="out")
    logger = Logger()
    trainer: Any = SimpleNamespace(
        global_step=0, log_every_n_steps=2, loggers=[logger],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
    )  # fmt: skip
    callback.on_train_start(trainer, model)
    for batch in range(6):
        train(model["net"], optimizer if batch % 2 else None)
        trainer.global_step += batch % 2
        callback.on_train_batch_end(trainer, model, None, None, batch)
        trainer.fit_loop.epoch_loop._batches_that_stepped += batch % 2
    callback.on_train_end(trainer, model)
    assert logger.logged == [(1, 1, 12)]
    callback.recording.flush()
    assert written() == [(step, 12, 1) for step in range(3)]
    assert callback.recording.model_map().groups[0].fqn == "net.0"


def test_lightning_training_that_fails(fake_pg: MakeMesh) -> None:
    """The exception is in the trace, and the hooks are off."""
    from fsdptrace.integrations import LightningCallback

    model = sharded_chain(fake_pg(2))
    callback = LightningCallback(out="out")
    callback.on_train_start(SimpleNamespace(global_step=0), model)
    before = callback.recording.model_map()
    callback.on_exception(SimpleNamespace(), model, KeyError("batch"))
    callback.recording.flush()
    (path,) = find_files("out")
    assert [event["type"] for event in read_file(path).events if event.kind == "exception"] == ["KeyError"]
    with fsdptrace.record(model, out="out") as rec:
        assert rec.model_map().groups == before.groups


def test_accelerate(fake_pg: MakeMesh) -> None:
    """The loop logs after each step, under its own numbers: the first time no step has ended yet, then each time the one
    before. Afterwards the accelerator is as it was, and its log gets nothing of ours."""
    from fsdptrace.integrations import record_accelerate

    model = sharded_chain(fake_pg(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(model)
    before = dict(vars(accelerator))
    values = {"loss": 1.0}
    with record_accelerate(accelerator, out="out") as rec:
        for step in range(3):
            train(model, optimizer)
            accelerator.log(values, step=10 * step)
    assert vars(accelerator) == before
    assert values == {"loss": 1.0}
    logged = [(step, given["loss"], given.get("fsdp/step"), given.get("fsdp/gathers")) for given, step in accelerator.logged]
    assert logged == [(0, 1.0, None, None), (10, 1.0, 0, 6), (20, 1.0, 1, 6)]
    rec.flush()
    assert written() == [(step, 6, 1) for step in range(3)]


def test_accelerate_leaves_the_log_alone_if_told_to(fake_pg: MakeMesh) -> None:
    from fsdptrace.integrations import record_accelerate

    model = sharded_chain(fake_pg(2))
    accelerator = Accelerator()

    def loop() -> None:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(model)
        accelerator.log({"loss": 1.0})
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), record_accelerate(accelerator, model, log=False, out="out"):
        loop()
    assert accelerator.logged == [({"loss": 1.0}, None)]


@pytest.mark.parametrize("wrap", ["nothing", "fsdp1", "ddp"])
def test_without_fsdp2_it_is_refused(wrap: str, fake_pg: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says what it is, what is there instead, and what to change in that framework; FSDPTRACE=0 silences it."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    from fsdptrace.integrations import LightningCallback, TransformersCallback, record_accelerate

    fake_pg(2)
    model: nn.Module = nn.Linear(4, 4)
    found = "nothing of it is wrapped by fully_shard"
    if wrap == "fsdp1":
        model = nn.Sequential(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
        found = "it is wrapped by FSDP1"
    elif wrap == "ddp":
        model = nn.Sequential(DistributedDataParallel(model))
        found = "it is wrapped by DistributedDataParallel"

    def accelerated() -> None:
        with record_accelerate(Accelerator(model)):
            pass

    begin: dict[str, Callable[[], None]] = {
        "TransformersCallback": lambda: TransformersCallback().on_train_begin(None, None, None, model=model),
        "LightningCallback": lambda: LightningCallback().on_train_start(SimpleNamespace(global_step=0), model),
        "record_accelerate": accelerated,
    }
    mends = {
        "TransformersCallback": "fsdp_config={'version': 2}", "LightningCallback": "ModelParallelStrategy",
        "record_accelerate": "`fsdp_version: 2`",
    }  # fmt: skip
    for who, call in begin.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).startswith(f"{who}: {type(model).__name__} does not train with FSDP2: {found}")
        assert mends[who] in str(caught.value)
    monkeypatch.setenv("FSDPTRACE", "0")
    for call in begin.values():
        call()


def test_bad_use_shows_at_once() -> None:
    from fsdptrace.integrations import LightningCallback, TransformersCallback, record_accelerate

    with pytest.raises(TypeError, match="record\\(\\) has no option 'output'"):
        TransformersCallback(output="x")
    with pytest.raises(ValueError, match="on_violation: 'stop' is none of raise, warn, record"):
        LightningCallback(on_violation="stop")
    with pytest.raises(TypeError, match="an Accelerator is needed, not Linear"), record_accelerate(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match=r"call it after accelerator\.prepare"), record_accelerate(Accelerator()):
        pass


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("TransformersCallback", ["transformers"]),
        ("LightningCallback", ["lightning", "pytorch_lightning"]),
        ("record_accelerate", ["accelerate"]),
    ],
)
def test_a_framework_that_is_missing_is_named(name: str, packages: list[str]) -> None:
    """Importing ours imports none of them; asking for one that is not there says what to install."""
    block = "".join(f"sys.modules[{package!r}] = None\n" for package in packages)
    program = f"""
import sys
import fsdptrace.integrations
print([name for name in ("transformers", "lightning", "accelerate", "torch") if name in sys.modules])
{block}
try:
    from fsdptrace.integrations import {name}
    with {name}(object()): pass
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "[]",
        f"fsdptrace.integrations.{name} needs {packages[0]}: pip install {packages[0]}",
    ], done.stderr
