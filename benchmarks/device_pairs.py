"""Step time on a GPU with and without, in rounds: blocks of steps in random order, each against the median of the untraced
blocks of its round, so that a clock that drifts takes all along. Prints medians of the ratios with their quartiles, the CPU
time of the threads that train, and the peaks of memory that were seen. Garbage is collected between blocks, not in them.

``--peaks`` asks for the peaks of memory alone, each way of running in processes of its own, whose allocators begin empty.

python benchmarks/device_pairs.py --model wide-16 --seconds 500
python benchmarks/device_pairs.py --model tiny --seconds 500 --peaks
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import warnings

import torch
from device_common import SETTINGS, header
from device_peaks import child, peaks_of
from device_rounds import measure


def main() -> int:
    """Measures the models asked for; the exit status says whether it could."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SETTINGS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=60, help="at most so many")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long, with the rounds there are")
    parser.add_argument("--peaks", action="store_true", help="peaks of memory, in processes of their own")
    parser.add_argument("--steps", type=int, default=20, help="with --peaks: of each process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    if options.child:
        child(SETTINGS[options.model], options.child, options.steps)
        return 0
    begin = time.monotonic()
    print(header())
    names = list(SETTINGS) if options.model == "all" else [options.model]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fsdptrace-device-") as out:
        for number, name in enumerate(names, 1):
            until = begin + options.seconds * number / len(names)
            if options.peaks:
                failed += peaks_of(name, options.steps, until)
            else:
                measure(SETTINGS[name], options.rounds, until, out)
                gc.collect()
                torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
