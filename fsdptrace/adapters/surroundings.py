"""The global state that decides how operators compute, as far as Python can ask for it without running one.

Read where a region's forward begins and again where its recomputation begins. Checkpointing brings back autocast, the
default device and, unless told otherwise, random numbers; the rest is whatever it is by then.
"""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def _read(owner: Any, name: str) -> Callable[[], Any] | None:
    return getattr(owner, name, None)


def _autocast(device: str) -> tuple[tuple[str, Callable[[], Any] | None], ...]:
    return (
        (f"autocast on {device}", partial(torch.is_autocast_enabled, device)),
        (f"autocast dtype on {device}", partial(torch.get_autocast_dtype, device)),
    )


def _readers() -> list[tuple[str, Callable[[], Any]]]:
    # Names of torch._C that torch.backends reads through (2.6 to 2.15): its own properties cost several times as much.
    c = torch._C
    device = torch._C._get_accelerator().type if hasattr(torch._C, "_get_accelerator") else "cpu"
    readers = [
        ("torch.get_default_dtype()", torch.get_default_dtype),
        ("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled),
        ("torch.are_deterministic_algorithms_enabled()", torch.are_deterministic_algorithms_enabled),
        ("torch.get_float32_matmul_precision()", _read(c, "_get_float32_matmul_precision")),
        ("the flash attention backend (sdpa_kernel)", _read(c, "_get_flash_sdp_enabled")),
        ("the memory-efficient attention backend (sdpa_kernel)", _read(c, "_get_mem_efficient_sdp_enabled")),
        ("the math attention backend (sdpa_kernel)", _read(c, "_get_math_sdp_enabled")),
        ("the cuDNN attention backend (sdpa_kernel)", _read(c, "_get_cudnn_sdp_enabled")),
        ("torch.backends.cudnn.enabled", _read(c, "_get_cudnn_enabled")),
        ("torch.backends.cudnn.benchmark", _read(c, "_get_cudnn_benchmark")),
        ("torch.backends.cudnn.deterministic", _read(c, "_get_cudnn_deterministic")),
        ("torch.backends.mkldnn.enabled", _read(c, "_get_mkldnn_enabled")),
        ("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
         _read(c, "_get_cublas_allow_fp16_reduced_precision_reduction")),
        ("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
         _read(c, "_get_cublas_allow_bf16_reduced_precision_reduction")),
        ("torch.get_num_threads()", torch.get_num_threads),
        ("torch.is_anomaly_enabled()", torch.is_anomaly_enabled),
        ("the autocast cache", torch.is_autocast_cache_enabled),
        *_autocast("cpu"),
        *(_autocast(device) if device != "cpu" else ()),
    ]  # fmt: skip
    return [(name, reader) for name, reader in readers if reader is not None and _works(reader)]


# Modes that checkpointing itself sets up, in the forward or in the recomputation only.
_OWN_MODES = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode", "LoggingTensorMode", "DeviceContext")


def _modes(count: Callable[[], int], get: Callable[[int], Any]) -> str:
    names = (type(get(i)).__name__ for i in range(count()))
    return ", ".join(name for name in names if name not in _OWN_MODES)


def _works(reader: Callable[[], Any]) -> bool:
    try:
        reader()
    except Exception:
        return False
    return True


_names: list[str] = []
_functions: list[Callable[[], Any]] = []
_call: Callable[[Callable[[], Any]], Any] = getattr(operator, "call", operator.methodcaller("__call__"))  # Python 3.11
# How many modes there are; int() is 0, where a release has no such name.
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", int)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def read() -> tuple[Any, ...]:
    """The values, for :func:`differences`. Holds no object of the user's."""
    if not _names:
        known = _readers()
        _functions[:] = [reader for _, reader in known]
        _names[:] = [*(name for name, _ in known), "torch function modes", "torch dispatch modes"]
    values = map(_call, _functions)  # twice for every region: no bytecode of ours for each
    if not _function_modes() and not _dispatch_modes():
        return *values, "", ""
    c: Any = torch._C
    return (
        *values, _modes(_function_modes, c._get_function_stack_at), _modes(_dispatch_modes, c._get_dispatch_stack_at)
    )  # fmt: skip


def read_variables() -> tuple[str | int, ...]:
    """The context variables that are set: name, id, and the value's id of each."""
    out: list[str | int] = []
    for variable, value in contextvars.copy_context().items():
        out += (variable.name, id(variable), id(value))
    return tuple(out)


def differences(forward: tuple[Any, ...], recompute: tuple[Any, ...]) -> list[tuple[str, str, str]]:
    """``(what, value in the forward, value in the recomputation)`` of all that differ."""
    return [
        (name, _show(one), _show(other))
        for name, one, other in zip(_names, forward, recompute, strict=False)
        if one != other
    ]  # fmt: skip


def changed_variables(forward: tuple[str | int, ...], recompute: tuple[str | int, ...]) -> list[str]:
    """Names of context variables that are set otherwise than in the forward."""
    one, other = (dict(zip(zip(v[::3], v[1::3], strict=True), v[2::3], strict=True)) for v in (forward, recompute))
    changed = {str(key[0]) for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    return sorted(name for name in changed if not name.startswith("torch."))


def _show(value: Any) -> str:
    return "none" if value == "" else str(value)
