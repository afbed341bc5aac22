"""Runs a script of Accelerate or transformers.Trainer with FSDP2 on the CPU: ``on_cpu.py SCRIPT ARGUMENTS``.

Accelerate takes FSDP for accelerators only; on the CPU it falls back to one whole model per process without a word. This lets
it take its own FSDP2 code there too, over gloo, and changes nothing else. For trying things out; useless where there is a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

_plain = AcceleratorState.__init__


def _with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    wanted = fsdp_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if self.distributed_type == DistributedType.MULTI_CPU and wanted:
        self.distributed_type = DistributedType.FSDP
        # The state is one for all its objects; without a plugin it comes from the variables of `accelerate launch`.
        self.fsdp_plugin = fsdp_plugin or vars(self).get("fsdp_plugin") or FullyShardedDataParallelPlugin()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: on_cpu.py SCRIPT ARGUMENTS")
        raise SystemExit(len(sys.argv) < 2)
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    AcceleratorState.__init__ = _with_fsdp
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
