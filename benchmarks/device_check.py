"""All checks that need an accelerator, in one call: ``python benchmarks/device_check.py``. Prints a table and, at the end,
whether everything holds; docs/device.txt keeps the output of the last run. One GPU is enough (fake process group).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

import torch
from device_common import DEVICE, Table, header
from device_harm import capture, check_capture, check_cost, check_results, costs
from device_reports import check_leak, check_offload, check_selective
from device_truth import check_truth


def main() -> int:
    """Runs everything; the exit status says whether all holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of the comparison of step times, at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="that this comparison may take")
    parser.add_argument("--capture", choices=["relaxed", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to check", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to give the same results twice
    torch.cuda.set_device(DEVICE)
    if args.capture:
        return capture(args.capture)
    print(header())
    table = Table()
    with tempfile.TemporaryDirectory(prefix="fsdptrace-device-") as out:
        checks: tuple[tuple[str, Callable[[], None]], ...] = (
            ("costs", lambda: costs(table)),
            ("truth", lambda: check_truth(table)),
            ("selective checkpointing", lambda: check_selective(table)),
            ("offload", lambda: check_offload(table)),
            ("leak", lambda: check_leak(table)),
            ("results", lambda: check_results(table, out)),
            ("captures", lambda: check_capture(table)),
            ("step times", lambda: check_cost(table, args.rounds, args.seconds, out)),
        )
        for name, check in checks:
            try:
                check()
            except Exception as error:
                traceback.print_exc()
                table.row(name, f"{type(error).__name__}: {str(error)[:60]}", False)
    print(f"\n{len(table.failed)} failed" + "".join(f"\n  {name}" for name in table.failed))
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
