"""What the ``.pth`` costs a Python process that has nothing to do with us: its start with it and without, taking turns.

Two bare environments, one with ``fsdptrace_autostart.pth`` in its site-packages. Prints the median of the differences, in
ms, and the ratio; beside it what ``FSDPTRACE=1`` costs a program that never imports torch.

    python benchmarks/startup.py [--runs 60]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PTH = "fsdptrace_autostart.pth"


def environment(folder: Path, pth: bool) -> Path:
    """A bare environment in ``folder``, with this checkout on its path as an editable install has it; its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "_fsdptrace.pth").write_text(f"{ROOT}\n")
    if pth:
        shutil.copy(ROOT / PTH, site)
    return folder / "bin" / "python"


def once(python: Path, **variables: str) -> float:
    """Seconds of CPU that a program takes which does nothing: steadier than the clock on a machine that does other things."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FSDPTRACE")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(python), "-c", "pass"], check=True, env={**clean, **variables})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(runs: int) -> dict[str, list[float]]:
    """Seconds of ``runs`` starts of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        without = environment(Path(folder, "without"), False)
        with_pth = environment(Path(folder, "with"), True)
        kinds: dict[str, tuple[Path, dict[str, str]]] = {
            "without": (without, {}),
            "inert": (with_pth, {}),
            "FSDPTRACE=1": (with_pth, {"FSDPTRACE": "1"}),
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for run in range(runs + 3):
            for name, (python, variables) in kinds.items():
                seconds = once(python, **variables)
                if run >= 3:  # the first ones read from disk
                    times[name].append(seconds)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60, help="starts of each kind")
    times = measure(parser.parse_args().runs)
    base = times["without"]
    print(f"CPU time of a bare interpreter, {len(base)} runs of each kind in turn, Python {sys.version.split()[0]}")
    for name, own in times.items():
        middle, low = statistics.median(own) * 1e3, statistics.quantiles(own)[0] * 1e3
        more = statistics.median(one - other for one, other in zip(own, base, strict=True)) * 1e3
        ratio = statistics.median(own) / statistics.median(base)
        print(f"{name:12} median {middle:6.2f} ms  lower quartile {low:6.2f} ms  more: {more:+.2f} ms  ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
