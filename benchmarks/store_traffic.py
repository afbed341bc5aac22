"""What comparing ranks costs: a real TCPStore server, and as many ranks as asked for, simulated by threads of a few processes.

Each simulated rank has the order of a model of 190 param groups that goes on by itself, and takes part exactly as a rank does
(fsdptrace/watch.py); what is not there is training. One rank parts ways in the middle; when the leader says so is measured.

python benchmarks/store_traffic.py --ranks 512 --seconds 20
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fsdptrace import events as ev
from fsdptrace.model_map import GroupInfo, ModelMap, UnitInfo, spans
from fsdptrace.options import Options
from fsdptrace.session import Identity, Session
from fsdptrace.watch import Watch, period_of

GROUPS = 190
STEPS_PER_SECOND = 2.0


class Simulated(Watch):
    """A rank's part, on a connection of its own and without the default process group."""

    def __init__(self, session: Session, port: int) -> None:
        super().__init__(session)
        self._prefix = "fsdptrace/0.1/"
        self._store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
        self._own = True
        self.cpu: list[float] = []
        self.lead_cpu: list[float] = []
        self.sent = self.read = 0

    def _connect(self) -> bool:
        return True

    def _put(self, key: str, data: Any) -> None:
        super()._put(key, data)

    def look(self) -> None:
        """One look, its CPU time noted."""
        start = time.thread_time()
        self._look()
        (self.lead_cpu if self.leader is not None else self.cpu).append(time.thread_time() - start)


def model(world: int) -> ModelMap:
    """190 groups on one process group of all ranks."""
    name = f"0:{spans(list(range(world)))}"
    groups = tuple(
        GroupInfo(
            id=i, fqn=f"layers.{i // 2}{'.moe.experts' if i % 2 else ''}", unit=i + 1, modules=(), params=(), tensors=8,
            bytes=1 << 20, sharded_bytes=1 << 12, dtype="bfloat16", reduce_dtype="float32", world=world,
            post_forward_world=world, replicate_world=1, mesh={"dp": world}, reshard_after_forward=True, auto_policy=False,
            trainable=8, offload=False,
            shard_group=name,
        )
        for i in range(GROUPS)
    )  # fmt: skip
    return ModelMap(0, "Model", (UnitInfo(0, "", ("",), (), True),), groups)


def step_records(world: int) -> list[int]:
    """The collectives of one step: gathers forward and backward, reductions."""
    order = [(ev.UNSHARD, g) for g in range(GROUPS)]
    for g in reversed(range(GROUPS)):
        order += [(ev.UNSHARD, g), (ev.REDUCE_SCATTER, g)]
    records: list[int] = []
    for i, (kind, group) in enumerate(order):
        records += [kind, i + 1, 0, 0, group, 0, 0, 1 << 20, world, 2, 8 if kind != ev.UNSHARD else -1, 0]
    return records


def simulate(ranks: list[int], world: int, port: int, seconds: float, apart: int, out: Any) -> None:
    """The ranks of one process, one after the other in a loop, each at its time."""
    known, records = model(world), step_records(world)
    kinds = records[:: ev.WIDTH]
    other = [*records[: 50 * ev.WIDTH], *records[51 * ev.WIDTH :]]  # one gather less
    sims = []
    for rank in ranks:
        session = Session(Options(run_id="r", stall_seconds=300))
        session.identity = Identity(rank, world, 0, 0)
        session.models[0] = known
        session.order.start(known, {})
        sims.append(Simulated(session, port))
    period = period_of(world)
    start = time.time()
    begun = {id(sim): 0 for sim in sims}
    due = {id(sim): start + period * (rank % 97) / 97 for sim, rank in zip(sims, ranks, strict=True)}
    late = 0
    found = 0.0
    while (now := time.time()) - start < seconds:
        for sim, rank in zip(sims, ranks, strict=True):
            if due[id(sim)] > now:
                continue
            late += now - due[id(sim)] > period
            steps = int((now - start) * STEPS_PER_SECOND)
            while begun[id(sim)] < steps:
                diverges = rank == apart and begun[id(sim)] >= steps_until(seconds)
                what = other if diverges else records
                sim._session.order.take(0, begun[id(sim)], what, what[:: ev.WIDTH] if diverges else kinds)
                begun[id(sim)] += 1
            sim.look()
            if sim.leader is not None and sim.leader.to_say().get("found") and not found:
                found = time.time() - start
            due[id(sim)] = now + sim._pause()
        time.sleep(0.002)
    cpu = [value for sim in sims for value in sim.cpu]
    lead = [value for sim in sims for value in sim.lead_cpu]
    out.put((len(cpu) + len(lead), cpu, lead, late, found))
    out.close()
    out.join_thread()
    os._exit(0)


def steps_until(seconds: float) -> int:
    """Steps before the one rank parts ways: half of the time."""
    return int(seconds / 2 * STEPS_PER_SECOND)


def serve(port: Any, stop: Any) -> None:
    """The server."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    port.put(server.port)
    stop.wait()


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bystander(port: int, seconds: float) -> list[float]:
    """Latency of somebody else's set and get, in seconds."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    out = []
    end = time.time() + seconds
    while time.time() < end:
        start = time.perf_counter()
        store.set("user/key", "value")
        store.get("user/key")
        out.append(time.perf_counter() - start)
        time.sleep(0.02)
    return out


def quantiles(values: list[float]) -> str:
    """Median and 99th percentile, in ms."""
    ordered = sorted(values)
    return f"{1e3 * statistics.median(ordered):.2f} ms, 99 % below {1e3 * ordered[int(len(ordered) * 0.99)]:.2f} ms"


def main() -> None:
    """Runs it and prints what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--processes", type=int, default=4)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port_queue, stop, out = context.Queue(), context.Event(), context.Queue()
    server = context.Process(target=serve, args=(port_queue, stop))
    server.start()
    port = port_queue.get()
    quiet = bystander(port, 3)
    shares = [list(range(i, args.ranks, args.processes)) for i in range(args.processes)]
    apart = args.ranks * 2 // 3
    workers = [context.Process(target=simulate, args=(share, args.ranks, port, args.seconds, apart, out)) for share in shares]
    assert server.pid is not None
    for worker in workers:
        worker.start()
    probe = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    while not probe.check(["fsdptrace/0.1/lead"]):
        time.sleep(0.05)
    before, since = cpu_of(server.pid), time.time()
    busy = bystander(port, args.seconds - 6)
    used = (cpu_of(server.pid) - before) / (time.time() - since)
    results = [out.get() for _ in workers]
    looks = sum(result[0] for result in results)
    cpu = [value for result in results for value in result[1]]
    lead = [value for result in results for value in result[2]]
    late = sum(result[3] for result in results)
    found = max(result[4] for result in results)
    size = len(probe.get("fsdptrace/0.1/1"))
    keys = probe.num_keys()
    parted = steps_until(args.seconds) / STEPS_PER_SECOND
    print(
        f"ranks {args.ranks}, {GROUPS} groups, {STEPS_PER_SECOND:.0f} steps a second, looks {period_of(args.ranks):.2f} s apart"
    )
    print(f"looks {looks:,} in {args.seconds:.0f} s ({late:,} more than a period late: the simulation's own limit)")
    print(f"server: {100 * used:.1f} % of a core; keys {keys}; bytes per rank's key {size}")
    print(f"read by the leader per look: {size * args.ranks / 1024:.0f} KiB")
    print(f"CPU of a look, a rank: {quantiles(cpu)}; the leader: {quantiles(lead)}")
    print(f"set and get of somebody else: {quantiles(busy)}; without us: {quantiles(quiet)}")
    print(f"one rank left out a gather at {parted:.1f} s; named at {found:.1f} s" if found else "the difference was not found")
    stop.set()
    server.join()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
