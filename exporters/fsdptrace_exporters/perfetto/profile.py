"""What torch.profiler wrote of the same step, put beside a rank's own tracks, on the same clock."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrace_exporters.perfetto.sink import Slice, Template, Value

_KEPT_ARGS = 12  # arguments of one slice; those of a kernel are many


class NotAProfile(ValueError):
    """The file is none of torch.profiler's; the message says what was found."""


@dataclass(slots=True)
class Profile:
    """Slices by ``(process, thread)`` in Unix ns; ``names`` are those of threads and streams. ``flows`` counts arrows from
    a launch to its kernel."""

    path: Path
    rank: int | None
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    threads: dict[tuple[str, str], list[Slice]] = field(default_factory=dict)
    flows: int = 0
    unreadable: int = 0


def read_profile(path: str | Path, first_flow: int) -> Profile:
    """Reads ``path`` (``.json`` or ``.json.gz``, from ``export_chrome_trace`` or ``tensorboard_trace_handler``).

    Args:
        first_flow: number of its first arrow.

    Raises:
        NotAProfile: it is none.
        OSError: it cannot be read.
    """
    path = Path(path)
    data = _parse(path)
    base = data.get("baseTimeNanoseconds", 0)
    info = data.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    profile = Profile(path, rank if isinstance(rank, int) else None)
    found: dict[tuple[str, str, int], Slice] = {}
    arrows: dict[str, list[tuple[str, str, str, int]]] = {}
    for event in data["traceEvents"]:
        try:
            _take(event, int(base), profile, found, arrows)
        except (KeyError, TypeError, ValueError, AttributeError):
            profile.unreadable += 1
    for number, ends in enumerate(arrows.values()):
        starts = [found.get((pid, tid, at)) for phase, pid, tid, at in ends if phase == "s"]
        stops = [found.get((pid, tid, at)) for phase, pid, tid, at in ends if phase == "f"]
        if starts and stops and starts[0] is not None and stops[0] is not None and not stops[0].flow_in:
            starts[0].flow_out = stops[0].flow_in = first_flow + number
            profile.flows += 1
    return profile


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        data = path.read_bytes()
        # Times as text: 13 digits of microseconds and 3 decimals are more than a float holds.
        parsed = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, parse_float=str)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise NotAProfile(f"{path}: not a trace of torch.profiler (no JSON: {error})") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("traceEvents"), list):
        raise NotAProfile(f"{path}: not a trace of torch.profiler (no traceEvents in it)")
    if not isinstance(parsed.get("baseTimeNanoseconds", 0), int):
        raise NotAProfile(f"{path}: baseTimeNanoseconds is no number")
    return parsed


def _take(
    event: Mapping[str, Any], base: int, profile: Profile, found: dict[tuple[str, str, int], Slice],
    arrows: dict[str, list[tuple[str, str, str, int]]],
) -> None:  # fmt: skip
    phase = event["ph"]
    thread = (str(event.get("pid", "")), str(event.get("tid", "")))
    if phase == "X" and event.get("cat") != "Trace":
        t0 = base + _ns(event["ts"])
        args: dict[str, Value] = {
            str(name): value if isinstance(value, int) else str(value)[:300]
            for name, value in list((event.get("args") or {}).items())[:_KEPT_ARGS]
        }
        item = Slice(t0, t0 + max(0, _ns(event.get("dur", 0))), Template(str(event["name"]), str(event.get("cat", "")), args))
        profile.threads.setdefault(thread, []).append(item)
        found[thread[0], thread[1], t0] = item
    elif phase == "M" and event["name"] == "thread_name":
        profile.names[thread] = str(event["args"]["name"]).strip()
    elif phase in ("s", "f"):
        arrows.setdefault(f"{event.get('cat', '')} {event['id']}", []).append(
            (phase, thread[0], thread[1], base + _ns(event["ts"]))
        )


def _ns(micro: int | str) -> int:
    """Microseconds, as an integer or as decimal text, in whole ns."""
    if isinstance(micro, int):
        return micro * 1000
    if "e" in micro or "E" in micro:
        return round(float(micro) * 1000)
    whole, _, part = micro.partition(".")
    sign = -1 if whole.startswith("-") else 1
    return int(whole) * 1000 + sign * int((part + "000")[:3])
