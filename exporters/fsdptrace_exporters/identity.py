"""Names and numbers that every exporter of a run agrees on without asking: resources, trace and span ids, Unix time."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from fsdptrace._version import __version__
from fsdptrace.analysis.sources import Header

SCOPE = "fsdptrace"
VERSION = __version__


def resource_attributes(header: Header) -> dict[str, Any]:
    """Resource attributes of the process that wrote the files, not of the one that exports them."""
    role = f"{header.role}-" if header.role else ""
    out: dict[str, Any] = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or "fsdptrace",
        "service.instance.id": f"{header.run_id}-{role}rank{header.rank}",
        "host.name": header.host,
        "process.pid": header.pid,
        "dl.rank": header.rank,
        "dl.local_rank": header.local_rank,
        "dl.world_size": header.world_size,
        "fsdptrace.run.id": header.run_id,
        "fsdptrace.run.attempt": header.attempt,
    }
    if header.role:
        out["fsdptrace.role"] = header.role
    return out


def unix_ns(header: Header, t: int) -> int:
    """A time of the file (``perf_counter_ns`` of its process) as Unix time, ns."""
    return t - header.perf_counter_ns + header.unix_ns


def _digest(size: int, *parts: object) -> int:
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big") or 1


def step_trace(header: Header, model: int, step: int) -> int:
    """Trace id of a step: the same on all ranks."""
    return _digest(16, "step", header.run_id, header.attempt, header.role, model, step)


def unit_trace(header: Header, model: int, step: int) -> int:
    """Trace id of the units of one rank in a step."""
    return _digest(16, "units", header.run_id, header.attempt, header.role, model, step, header.rank)


def span_id(trace: int, *parts: object) -> int:
    """Id of the span of a trace that ``parts`` names."""
    return _digest(8, trace, *parts)


class SpanIds:
    """Ids of the spans of one trace by small numbers, without a hash for each.

    Multiplying by an odd number maps the 64-bit numbers onto themselves one to one, so that no two are the same.
    """

    __slots__ = ("_base",)

    def __init__(self, trace: int) -> None:
        self._base = _digest(8, trace)

    def __call__(self, number: int) -> int:
        return (self._base + number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF or 1
