"""``fsdptrace run`` and ``FSDPTRACE=1``: programs that know nothing of us, and what is seen of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.torches import RELEASE
from support.zero_code import COMMAND, TRAINING, run, traces


def test_a_training_program(tmp_path: Path) -> None:
    """Two models, 3 and 2 steps, the first let go between them: both are recorded from their first forward on, the first is
    collected, output and status are the program's own, and the last line says what was seen."""
    program = (
        TRAINING
        + """
model = build(3)
print("loss", train(model, 3).item())
gone = weakref.ref(model)
del model
gc.collect()
print("collected", gone() is None)
print("loss", train(build(2), 2).item())
sys.exit(5)
"""
    )
    alone = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)
    done = run(tmp_path, program, "--on-violation", "record", code=5)
    if RELEASE >= (2, 13):  # the fake process group of older ones leaves reduced gradients uninitialised
        assert done.stdout == alone.stdout
    assert "collected True" in done.stdout
    said = done.stderr.splitlines()[-1]
    assert said.startswith("fsdptrace: 2 FSDP2 models in 1 of 1 process, 5 steps; no errors or warnings; files in ")
    (trace,) = traces(tmp_path)
    assert trace.complete
    steps = [(line.get("model", 0), line["counts"]["unshard"], line["counts"]["forward"]) for line in trace.summaries]
    # Per step every unit gathers in the forward and in the backward; each of the prefetched ones (all but the last of the
    # forward) is asked for once more by its own hook: 2n + (n - 1).
    # The last step of the first model ended with it: its events are there, a line that ends it is not.
    assert sorted(steps) == [(0, 8, 1)] * 2 + [(1, 5, 1)] * 2
    last = [event for event in trace.events if (event.model, event.step) == (0, 2)]
    assert sum(event.kind == "unshard" for event in last) == 8


def test_nothing_to_see(tmp_path: Path) -> None:
    """A program without FSDP2: its status and output, a sitecustomize that still runs, torch not imported by us."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.planted = 1\n")
    program = """
import subprocess, sys
print("torch" in sys.modules, "fsdptrace.recording" in sys.modules, sys.planted)
subprocess.run([sys.executable, "-c", "pass"], check=True)
sys.exit(7)
"""
    done = run(tmp_path, program, code=7, PYTHONPATH=str(tmp_path))
    assert done.stdout == "False False 1\n"
    assert done.stderr.splitlines() == ["fsdptrace: 0 FSDP2 models in 2 processes"]
    assert not (tmp_path / "out").exists()


def test_off_beats_everything(tmp_path: Path) -> None:
    program = "import sys\nprint('fsdptrace._autostart' in sys.modules)\n"
    done = run(tmp_path, program, FSDPTRACE="0")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_raise_ends_the_program(tmp_path: Path) -> None:
    """A forgotten reshard: the program ends at the optimizer's step, with the finding as its last words."""
    program = (
        TRAINING
        + """
model = build(3)
train(model, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[1].unshard()
optimizer.step()
print("never here")
"""
    )
    done = run(tmp_path, program, "--on-violation", "raise", code=1)
    assert "never here" not in done.stdout
    assert "InvariantViolation: fsdptrace: unpaired-unshard: 1 was still open when the optimizer stepped" in done.stderr
    assert "1 error, 0 warnings (unpaired-unshard)" in done.stderr.splitlines()[-1]


def test_the_exception_says_what_is_known(tmp_path: Path) -> None:
    """Two units of 288 B (8 x 8 weights and 8 biases in float32) are open when memory runs out outside any module."""
    program = (
        TRAINING
        + """
model = build(3)
train(model, 1)
model[0].unshard()
model[2].unshard()
raise torch.OutOfMemoryError("pretended")
"""
    )
    done = run(tmp_path, program, "--on-violation", "record", code=1)
    assert "OutOfMemoryError: pretended" in done.stderr
    if sys.version_info >= (3, 11):
        assert (
            "fsdptrace: Sequential: 576 B of parameters are gathered in 2 units, most in 0 288 B, 2 288 B (step 0). 2 of them, "
            "576 B, are past their backward: the first, 0, was gathered at event "
        ) in done.stderr
        assert " by a call of unshard()." in done.stderr


def test_a_registered_method_comes_first(tmp_path: Path) -> None:
    """The first use of the model is a method that was registered as a forward: recorded from there on, and nothing found."""
    program = (
        TRAINING
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.block = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.block(self.emb(x))
    def hidden(self, x):
        return self.block(self.emb(x))
net = Net()
fully_shard(net.block, mesh=mesh)
fully_shard(net, mesh=mesh)
register_fsdp_forward_method(net, "hidden")
net.hidden(torch.ones(2, 8)).sum().backward()
"""
    )
    done = run(tmp_path, program)
    assert "1 FSDP2 model in 1 of 1 process, 1 step; no errors or warnings" in done.stderr.splitlines()[-1]
    (trace,) = traces(tmp_path)
    (forward,) = [event for event in trace.events if event.kind == "forward"]
    assert trace.models[0].units[forward["root"]].fqn == ""


def test_killed_processes_are_counted_too(tmp_path: Path) -> None:
    """SIGKILL in the middle of training: the launcher ends the same way; the file reads, without an end."""
    program = (
        TRAINING
        + """
import os, signal, time
train(build(3), 2)
time.sleep(1.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    done = run(tmp_path, program, code=-signal.SIGKILL)
    assert "1 FSDP2 model in 1 of 1 process" in done.stderr.splitlines()[-1]
    (trace,) = traces(tmp_path)
    assert not trace.complete
    assert max(event.seq for event in trace.events) > 60


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "run: no command given"),
        (("--on-violation", "stop", "--", "true"), "on_violation: 'stop' is none of raise, warn, record"),
        (("--", "no-such-command"), "no-such-command: No such file or directory"),
    ],
)
def test_bad_use_is_one_clear_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = subprocess.run([COMMAND, "run", *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_a_program_that_records_by_itself(tmp_path: Path) -> None:
    """``record`` in the program takes the model over from the launcher: nothing is counted twice, and it is not refused.
    One step before it, two within."""
    program = (
        TRAINING
        + """
import fsdptrace
model = build(3)
train(model, 1)
with fsdptrace.record(model) as rec:
    train(model, 2)
print("recorded", len(rec.steps))
"""
    )
    done = run(tmp_path, program)
    assert done.stdout == "recorded 2\n"
    said = done.stderr.splitlines()[-1]
    assert "2 FSDP2 models in 1 of 1 process, 3 steps; no errors or warnings" in said


PAST_THE_FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.block = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.block(self.emb(x))
    def hidden(self, x):
        return self.block(self.emb(x))
    def direct(self, x):
        return nn.functional.linear(x, self.emb.weight)
def net():
    model = Net()
    fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""


def test_models_whose_first_use_is_past_their_forward(tmp_path: Path) -> None:
    """One whose error the program catches, in a part of it; one whose error ends the program, in code of its own."""
    program = (
        TRAINING
        + PAST_THE_FORWARD
        + """
first = net()
try:
    first.hidden(torch.ones(2, 8))
except RuntimeError as error:
    print("caught", "got mixed torch.Tensor and DTensor" in str(error))
first(torch.ones(2, 8)).sum().backward()
net().direct(torch.ones(2, 8))
"""
    )
    done = run(tmp_path, program, "--on-violation", "record", code=1)
    assert done.stdout == "caught True\n"
    said = done.stderr.splitlines()[-1]
    assert "2 FSDP2 models in 1 of 1 process, 2 steps; 2 errors, 0 warnings (outside-forward); files in " in said
    if sys.version_info >= (3, 11):
        assert "direct() of (root), which is no forward of it, used its parameters (event " in done.stderr
    (trace,) = traces(tmp_path)
    used = [(e.model, e["about"], e["used"], e["through"]) for e in trace.events if e.kind == "exception"]
    assert used == [(0, "freed", 0, ":hidden"), (1, "freed", 0, ":direct")]
    assert sum(event.kind == "backward" for event in trace.events) == 1


@pytest.mark.parametrize("value", [None, "", "0"])
def test_inert_it_imports_nothing(tmp_path: Path, value: str | None) -> None:
    """The ``.pth`` as the interpreter reads it at its start: without ``FSDPTRACE=1`` no module more and no finder."""
    shutil.copy(Path(__file__).parent.parent / "fsdptrace_autostart.pth", tmp_path)
    program = f"""
import site, sys
before = set(sys.modules), list(sys.path), list(sys.meta_path)
site.addsitedir({str(tmp_path)!r})
print(sorted(set(sys.modules) - before[0]), sys.path == before[1] + [{str(tmp_path)!r}], sys.meta_path == before[2])
"""
    environment = {**os.environ, **({} if value is None else {"FSDPTRACE": value})}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout == "[] True True\n", done.stderr
