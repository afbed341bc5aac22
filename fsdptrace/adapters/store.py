"""The default c10d store and process groups: how ranks find each other without a collective."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdptrace.model_map import spans

OPERATION_TIMEOUT = timedelta(seconds=2)


def default_store() -> Any:
    """The default c10d store, or ``None`` when no process group is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError, AttributeError):
        return None


def reaches_others(store: Any) -> bool:
    """Whether other processes can read ``store``: not the fake process group's, nor one that lives in this process."""
    inner = store
    while (deeper := getattr(inner, "underlying_store", None)) is not None:
        inner = deeper
    return type(inner).__name__ not in ("FakeStore", "HashStore") and dist.get_backend() != "fake"


def own_connection(store: Any) -> tuple[Any, bool]:
    """A store to use beside the training thread, and whether it is a connection of our own.

    A TCPStore's client holds a lock for the whole of an operation. Since torch 2.8 a store can be cloned ("can be used from a
    different thread", pytorch PR #151045), which for a TCPStore is one more socket; a FileStore counts its users and is shared.
    """
    inner = store
    while (deeper := getattr(inner, "underlying_store", None)) is not None:
        inner = deeper
    if type(inner).__name__ == "TCPStore" and hasattr(store, "clone"):
        clone = store.clone()
        clone.set_timeout(OPERATION_TIMEOUT)
        return clone, True
    return store, False


def group_label(process_group: Any) -> str:
    """``name:ranks`` of a process group, the same on all its ranks; empty for none, or where PyTorch does not say."""
    if process_group is None:
        return ""
    try:
        return f"{process_group.group_name}:{spans(dist.get_process_group_ranks(process_group))}"
    except (RuntimeError, ValueError, KeyError, AttributeError):
        return ""


def issued(groups: Iterable[Any]) -> dict[str, int]:
    """How many collectives were issued so far on the process groups of FSDPParamGroups, by :func:`group_label`; -1 where the
    backend does not count. The same on every rank at the same place of a program."""
    out: dict[str, int] = {}
    seen: set[int] = set()
    for group in groups:
        for name in ("shard_process_group", "replicate_process_group"):
            process_group = getattr(group.mesh_info, name, None)
            if process_group is None or id(process_group) in seen:
                continue
            seen.add(id(process_group))
            try:
                number = int(process_group._get_sequence_number_for_group())
            except (RuntimeError, AttributeError, NotImplementedError):
                number = -1
            out[group_label(process_group)] = number
    return out
