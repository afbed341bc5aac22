"""Private PyTorch names per release: what is needed, what was found, what is refused.

The surface is the same in torch 2.6.0 to 2.15.0 but for two branches: a unit's param groups (``_fsdp_param_groups``
since 2.12, one ``_fsdp_param_group`` before) and the reduce-scatter states (a list since 2.12).

Process-wide seams that recording touches, inert for models that are not recorded and restored when it ends:

* the global optimizer-step hooks (``torch.optim.optimizer.register_optimizer_step_pre_hook`` and ``_post_hook``, public);
* ``torch.autograd._engine_run_backward``, the function through which ``Tensor.backward`` and ``torch.autograd.grad`` start
  the engine (adapters/backward.py);
* the four workers of ``torch.distributed.checkpoint.state_dict``, once the program has imported it (adapters/state_dict.py);
* ``torch.utils.checkpoint._CheckpointFrame`` and ``CheckpointFunction``, the classes behind non-reentrant and reentrant
  activation checkpointing (adapters/checkpoint.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

TESTED: Final = ((2, 6), (2, 15))
"""Oldest and newest release that the adapters were written against."""

#: Names of FSDPParamGroup (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py) that are wrapped.
GROUP_METHODS: Final = (
    "unshard", "wait_for_unshard", "reshard", "pre_forward", "post_forward", "pre_backward", "post_backward",
    "finalize_backward", "use_training_state", "_prefetch_unshard", "_to_sharded", "_to_sharded_post_forward",
)  # fmt: skip
#: Names of FSDPState (_fsdp_state.py) that are wrapped.
STATE_METHODS: Final = ("_pre_backward", "_root_post_backward_final_callback")
#: Names of torch/utils/checkpoint.py that are replaced or read.
CHECKPOINT_NAMES: Final = ("_CheckpointFrame", "CheckpointFunction", "_StopRecomputationError", "_CachedTorchDispatchMode")
TRAINING_STATE_VALUES: Final = {"FORWARD": 1, "PRE_BACKWARD": 2, "POST_BACKWARD": 3, "IDLE": 4}
SHARDED_STATE_VALUES: Final = {"SHARDED": 1, "SHARDED_POST_FORWARD": 2, "UNSHARDED": 3}


class UnsupportedTorch(RuntimeError):
    """This PyTorch lacks a name that fsdptrace needs; the message lists all of them."""


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`examine` found.

    ``found`` and ``missing`` are names with their place, ``notes`` what differs and how it is met.
    """

    version: str
    release: tuple[int, int]
    found: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def newer(self) -> bool:
        """Whether the release is newer than any that was looked at."""
        return self.release > TESTED[1]


def release_of(version: str) -> tuple[int, int]:
    """``(2, 13)`` of ``"2.13.0+cpu"``; ``(0, 0)`` when it cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def lacks_cpu() -> str:
    """Why FSDP2 of this PyTorch cannot train on a CPU; empty where it can."""
    import torch

    # Called on each gather (_fsdp_collectives.py, foreach_all_gather); without it there 2.6 raises an AttributeError.
    if hasattr(torch.cpu.Stream, "record_event"):
        return ""
    return f"FSDP2 of torch {torch.__version__} trains on accelerators alone; on a CPU it does since 2.7"


def examine() -> Report:
    """Looks at the installed PyTorch; imports torch, changes nothing."""
    import torch
    import torch.utils.checkpoint

    found: list[str] = []
    missing: list[str] = []
    notes: list[str] = []

    def need(place: str, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            (found if hasattr(owner, name) else missing).append(f"{place}.{name}")

    version = str(torch.__version__)
    release = release_of(version)
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
        from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        missing.append(f"torch.distributed.fsdp._fully_shard ({error})")
        return Report(version, release, tuple(found), tuple(missing), tuple(notes))
    need("FSDPModule", FSDPModule, ("_get_fsdp_state",))
    need("FSDPParamGroup", FSDPParamGroup, GROUP_METHODS)
    need("FSDPState", FSDPState, STATE_METHODS)
    need("torch._C", torch._C, ("_current_graph_task_id",))
    need("torch.autograd", torch.autograd, ("_engine_run_backward",))
    need("torch.utils.checkpoint", torch.utils.checkpoint, CHECKPOINT_NAMES)
    need("_CheckpointFrame", getattr(torch.utils.checkpoint, "_CheckpointFrame", None), ("check_recomputed_tensors_match",))
    for place, enum, values in (
        ("TrainingState", TrainingState, TRAINING_STATE_VALUES),
        ("ShardedState", ShardedState, SHARDED_STATE_VALUES),
    ):
        have = {member.name: member.value for member in enum}
        (found if have == values else missing).append(f"{place} values {values}" + ("" if have == values else f", have {have}"))
    if hasattr(FSDPParamGroup, "_reset_iter_state"):
        notes.append("reset_iter_state is available (2.13 and newer)")
    if release < (2, 10):
        notes.append("recomputation is put into the post-forward order again (mended in 2.10, PR #164009)")
    if without := lacks_cpu():
        notes.append(without)
    if release > TESTED[1]:
        notes.append(f"newer than any release that was looked at (2.{TESTED[1][1]})")
    return Report(version, release, tuple(found), tuple(missing), tuple(notes))


_checked: Report | None = None


def require() -> Report:
    """The :class:`Report` of this PyTorch, looked at once.

    Raises:
        UnsupportedTorch: a name is missing; nothing has been touched.
    """
    global _checked
    if _checked is None:
        report = examine()
        if report.missing:
            raise UnsupportedTorch(
                f"fsdptrace cannot record under torch {report.version}: it lacks {', '.join(report.missing)}. "
                "Run `fsdptrace doctor` for the whole list; torch 2.6 to 2.15 are supported."
            )
        _checked = report
    return _checked


def groups_of(state: Any) -> list[Any]:
    """Param groups of an FSDPState: a list since torch 2.12, at most one before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def last_reduce_scatter_input(comm_ctx: Any) -> Any:
    """The input buffer of the newest reduce-scatter (a list of states since torch 2.12), or ``None``."""
    states = getattr(comm_ctx, "reduce_scatter_states", None)
    state = (states[-1] if states else None) if states is not None else getattr(comm_ctx, "reduce_scatter_state", None)
    return None if state is None else state.reduce_scatter_input


def reductions_in_flight(comm_ctx: Any) -> int:
    """Reduce-scatters whose input buffers PyTorch still holds, since compute has not waited for them yet."""
    states = getattr(comm_ctx, "reduce_scatter_states", None)
    if states is not None:
        return len(states)
    return 0 if getattr(comm_ctx, "reduce_scatter_state", None) is None else 1
