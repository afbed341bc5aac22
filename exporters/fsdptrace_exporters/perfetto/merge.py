"""All ranks of a run in one file."""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fsdptrace.analysis import NotATrace, ProcessTrace, Run
from fsdptrace.analysis.timeline import begin, clock_offsets
from fsdptrace.analysis.workers import Progress, advancing
from fsdptrace.replacing import replaced
from fsdptrace_exporters.perfetto.chrome import ChromeSink
from fsdptrace_exporters.perfetto.profile import Profile, read_profile
from fsdptrace_exporters.perfetto.protobuf import ProtobufSink
from fsdptrace_exporters.perfetto.sink import Sink
from fsdptrace_exporters.perfetto.tracks import RankTracks

FORMATS = (".pftrace", ".json.gz", ".json")


class Missing(ValueError):
    """A package that the format needs is not installed; the message says which and how to get it."""


@dataclass(slots=True)
class Merged:
    """What was written to ``path``: ``slices``, ``flows`` (arrows from a prefetch's all-gather to its wait),
    ``violations`` and ``events`` over ``ranks``; ``profiles`` are slices of torch.profiler among them. ``notes`` are for the
    reader."""

    path: Path
    ranks: int = 0
    slices: int = 0
    flows: int = 0
    violations: int = 0
    events: int = 0
    profiles: int = 0
    notes: list[str] = field(default_factory=list)


def merge(
    run: Run, path: str | Path, profiles: Sequence[str | Path] = (), ranks: Callable[[int], bool] | None = None,
    steps: Callable[[int], bool] | None = None, progress: Progress | None = None,
) -> Merged:  # fmt: skip
    """Writes ``run`` to ``path``, as Perfetto's protobuf (``.pftrace``) or Chrome's JSON (``.json.gz``, ``.json``).

    Args:
        profiles: traces of torch.profiler of ranks of this run.
        ranks, steps: which to write; all where not given.
        progress: told how many bytes of how many have been read.

    Raises:
        ValueError: the name ends in none of the formats, or a file is no profile of a rank of this run.
        Missing: the format needs a package that is not installed.
        NotATrace: nothing of the run is wanted.
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    path = Path(path)
    if not path.name.endswith(FORMATS):
        raise ValueError(f"{path}: the name says the format: .pftrace (Perfetto's), .json.gz or .json (Chrome's)")
    chosen = [(place, p) for place, p in enumerate(run.processes) if ranks is None or ranks(p.rank)]
    if not chosen:
        raise NotATrace(f"{run.folder}: no such ranks; there are {', '.join(map(str, run.ranks[:20]))}")
    offsets = clock_offsets(run.processes)
    joined = _profiles(run, profiles, [place for place, _ in chosen])
    merged = Merged(path, ranks=len(chosen))
    base = _base([(process, offsets[place]) for place, process in chosen], joined)
    advance = advancing([process.source for _, process in chosen], progress)
    with replaced(path) as stream, _sink(path, stream, base) as sink:
        for order, (place, process) in enumerate(chosen):
            rank = RankTracks(sink, place + 1, offsets[place], lambda model, step: steps is None or steps(step))
            rank.write(process.source, order, advance)
            merged.flows += rank.counts.flows
            own = rank.counts.slices
            for profile in joined.get(place, ()):
                _put_profile(rank, profile)
                merged.flows += profile.flows
            merged.profiles += rank.counts.slices - own
            merged.slices += rank.counts.slices
            merged.violations += rank.counts.violations
            merged.events += rank.counts.events
    merged.notes = _notes(chosen, joined, merged)
    return merged


def _profiles(run: Run, paths: Sequence[str | Path], places: Sequence[int]) -> dict[int, list[Profile]]:
    """Profiles by the position of their rank's process."""
    joined: dict[int, list[Profile]] = {}
    for number, path in enumerate(paths):
        profile = read_profile(path, (1 << 50) + (number << 32))
        rank = profile.rank if profile.rank is not None else run.processes[places[0]].rank if len(places) == 1 else None
        if rank is None:
            raise ValueError(f"{path}: it does not say of which rank it is; choose one with --ranks")
        place = next((p for p in places if run.processes[p].rank == rank), None)
        if place is None:
            raise ValueError(f"{path}: it is of rank {rank}, which is not among those of run {run.label}")
        joined.setdefault(place, []).append(profile)
    return joined


def _put_profile(rank: RankTracks, profile: Profile) -> None:
    for order, (thread, slices) in enumerate(profile.threads.items()):
        name = profile.names.get(thread, f"thread {thread[1]}")
        rank.put_foreign(f"torch.profiler: {profile.path.name}", name, order, slices)


def _notes(chosen: Sequence[tuple[int, ProcessTrace]], joined: dict[int, list[Profile]], merged: Merged) -> list[str]:
    notes = []
    hosts = {process.header.host for _, process in chosen}
    if len(hosts) > 1:
        notes.append(f"clocks of {len(hosts)} hosts are aligned by what each host's own clock says (NTP, PTP)")
    if any(not process.header.unix_ns for _, process in chosen):
        notes.append("a file without a clock in its header is shown as if its rank had begun with the others")
    for place, profiles in joined.items():
        process = next(p for number, p in chosen if number == place)
        for profile in profiles:
            if profile.unreadable:
                notes.append(f"{profile.path}: {profile.unreadable:,} entries of it cannot be read and were left out")
            times = [(s.t0, s.t1) for slices in profile.threads.values() for s in slices]
            low, high = _span(process)
            if times and (max(t1 for _, t1 in times) < low or min(t0 for t0, _ in times) > high):
                notes.append(f"{profile.path}: its time does not overlap with what was recorded of rank {process.rank}")
    if not merged.slices:
        notes.append("no event of the steps asked for is in the files (see `detail` and `schedule`)")
    return notes


def _span(process: ProcessTrace) -> tuple[int, int]:
    """First and last moment of the process, in Unix ns."""
    offset = process.header.unix_ns - process.header.perf_counter_ns
    return begin(process) + offset, process.last_t + offset


def _base(chosen: Sequence[tuple[ProcessTrace, int]], joined: dict[int, list[Profile]]) -> int:
    """A moment before everything that is written, in Unix ns: a recording reads its clock before its first event."""
    starts = [offset + min(begin(p), p.header.perf_counter_ns if p.header.unix_ns else begin(p)) for p, offset in chosen]
    for profiles in joined.values():
        starts += [item.t0 for profile in profiles for slices in profile.threads.values() for item in slices]
    return min(starts)


@contextlib.contextmanager
def _sink(path: Path, stream: IO[bytes], base: int) -> Iterator[Sink]:
    if path.name.endswith(".pftrace"):
        try:
            sink: Sink = ProtobufSink(stream)
        except ImportError as error:
            raise Missing(
                f"a .pftrace needs {error.name}, which is not installed: pip install 'fsdptrace[perfetto]' "
                "(or write .json.gz, which needs nothing)"
            ) from None
        yield sink
        sink.close()
        return
    packed = gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=6, mtime=0) if path.name.endswith(".gz") else None
    text = io.TextIOWrapper(packed or stream, encoding="utf-8", newline="\n", write_through=False)
    sink = ChromeSink(text, base)
    yield sink
    sink.close()
    text.flush()
    text.detach()
    if packed is not None:
        packed.close()
