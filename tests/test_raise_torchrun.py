"""What a raise on one rank does to the others: tried with torchrun, as docs/design.md says."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import fsdptrace

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
mesh = init_device_mesh("cpu", (2,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with fsdptrace.record(model, out=sys.argv[1], on_violation="raise"):
    for step in range(100):
        model(torch.randn(2, 8)).sum().backward()
        if step == 2:  # to look at its weights; rank 1 forgets to close it again
            model[1].unshard()
            if dist.get_rank() == 0:
                model[1].reshard()
        optimizer.step()
        optimizer.zero_grad()
print("rank", dist.get_rank(), "went through")
"""


@pytest.mark.multiprocess
def test_a_raise_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Rank 1 forgets a reshard() in step 2: it raises at its optimizer step; torchrun stops rank 0, which waits in a
    collective, and the job's exit status is not 0. Both ranks' files read; rank 1's has the violation."""
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2",
            str(program), str(out),
        ],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "went through" not in done.stdout
    assert "InvariantViolation: fsdptrace: unpaired-unshard: 1 was still open when the optimizer stepped" in done.stderr

    from fsdptrace.files import find_files, read_file

    traces = {trace.rank: trace for trace in map(read_file, find_files(out))}
    assert sorted(traces) == [0, 1]
    assert len({trace.header["run_id"] for trace in traces.values()}) == 1  # agreed through the store
    found = {rank: [e["violation"]["rule"] for e in trace.events if e.kind == "violation"] for rank, trace in traces.items()}
    assert found[1] == ["unpaired-unshard"]
    # Rank 0 may live long enough to say that it waits for a rank that is gone.
    assert found[0] in ([], ["rank-stall"])
    assert {e.step for e in traces[1].events if e.kind == "violation"} == {2}
