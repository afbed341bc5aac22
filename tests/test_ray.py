"""Workers of a Ray cluster that was started before, without us: reached by a variable in their ``runtime_env``.

Needs Ray, which is large and takes long to start: ``nox -s tests_ray`` runs this, ``make test`` skips it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fsdptrace.files import find_files, read_file

pytest.importorskip("ray", reason="nox -s tests_ray installs it")

DRIVER = """
import sys
import ray

out, address = sys.argv[1:]
ray.init(address=address, log_to_driver=False)

@ray.remote(num_cpus=0.5)
class Trainer:
    def train(self, rank):
        import os
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        import torch, torch.nn as nn, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        torch.set_num_threads(1)
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return os.getpid()

with_us = {"env_vars": {"FSDPTRACE": "1", "FSDPTRACE_OUT": out, "FSDPTRACE_RUN_ID": "r"}}
reached = [Trainer.options(runtime_env=with_us).remote() for _ in range(2)]
left_alone = Trainer.remote()
print(*ray.get([actor.train.remote(rank) for rank, actor in enumerate(reached)], timeout=240))
ray.get(left_alone.train.remote(0), timeout=240)
"""


def answers(port: int, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while True:
        assert head.poll() is None, "ray start failed"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "ray start takes too long"
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_actors_of_a_running_cluster(tmp_path: Path) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    # A token of its own: whether `ray start` wants one depends otherwise on what an earlier ray.init() left in the home folder.
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-")  # its sockets lie in it: a path of pytest's would be too long for them
    head = subprocess.Popen(
        [
            ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2",
            "--include-dashboard=false", f"--temp-dir={folder}", "--object-store-memory=100000000",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        answers(port, head)
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, str(tmp_path / "out"), f"127.0.0.1:{port}"],
            capture_output=True, text=True, timeout=400, check=False, env=environment, cwd=tmp_path,
        )  # fmt: skip
    finally:
        head.terminate()  # and with it everything that it started
        try:
            head.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    pids = done.stdout.split()
    files = [read_file(path) for path in find_files(tmp_path / "out")]
    # The two actors that were asked for, not the third; each trained three steps, and its end was Ray's kill or its own exit.
    assert sorted(str(trace.header["pid"]) for trace in files) == sorted(pids)
    assert [trace.header["rank"] for trace in files] == [0, 1]
    for trace in files:
        assert sum(event.kind == "optimizer_step" for event in trace.events) == 3
