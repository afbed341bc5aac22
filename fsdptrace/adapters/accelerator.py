"""What timing and memory need of a device, and the kinds there are: CUDA, others by ``torch.accelerator``, the host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

clock = time.perf_counter_ns


def current() -> torch.device | None:
    """The machine's accelerator, ``None`` without one."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where there is none
        return None


class Api(Protocol):
    """What timing needs of a kind of accelerator."""

    def idle(self) -> Any:
        """A stream on which nothing else runs."""
        ...

    def event(self) -> Any:
        """A new timing event, with ``record(stream)``, without one on the current stream, and ``query()``."""
        ...

    def elapsed(self, begin: Any, end: Any) -> int:
        """ns from ``begin`` to ``end``; ``RuntimeError`` or ``ValueError`` where one has not completed."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, where no timing event may be recorded."""
        ...

    def asking(self) -> AbstractContextManager[None]:
        """Within it a thread may ask for events while another one captures a graph."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that the allocator has given out, and bytes that it holds."""
        ...


class RelaxedCapture:
    """Within it this thread is exempt from what a capture of a CUDA graph forbids to all threads of the process: to ask for an
    event, which breaks the capture.

    Args:
        exchange: the driver's ``cuThreadExchangeStreamCaptureMode``: sets the thread's mode and gives back what it was.
    """

    def __init__(self, exchange: Callable[[Any], Any]) -> None:
        self._exchange = exchange
        self._mode = ctypes.c_int()

    def __enter__(self) -> None:
        self._mode.value = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
        self._exchange(ctypes.byref(self._mode))

    def __exit__(self, *exception: object) -> None:
        self._exchange(ctypes.byref(self._mode))


class _Accelerator:
    """``torch.accelerator`` and ``torch.Event`` (torch 2.6 and newer): the same for every accelerator with timing events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = device.type

    def idle(self) -> Any:
        return torch.Stream(device=self._device)

    def event(self) -> Any:
        return torch.Event(self._kind, enable_timing=True)

    def elapsed(self, begin: Any, end: Any) -> int:
        return int(begin.elapsed_time(end) * 1e6)

    def capturing(self) -> bool:
        return False

    def asking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> tuple[int, int]:
        module = getattr(torch, self._kind)
        return int(module.memory_allocated()), int(module.memory_reserved())


class _Cuda(_Accelerator):
    """The same with CUDA's shorter way to memory: 10 us instead of 78."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        index: int | None = device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._asking: AbstractContextManager[None] = nullcontext()
        try:
            self._asking = RelaxedCapture(ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode)
        except (OSError, AttributeError):  # ROCm, or a driver that has no graphs
            pass

    def idle(self) -> Any:
        # Streams come from pools in turn, a pool per priority: from this one nobody takes any, so that no other stream
        # changes because of ours. (c10/cuda/CUDAStream.cpp)
        make: Any = torch.cuda.Stream
        return make(device=self._index, priority=-3)

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def asking(self) -> AbstractContextManager[None]:
        return self._asking

    def memory(self) -> tuple[int, int]:
        stats = torch._C._cuda_memoryStats(self._index)
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]


class _HostEvent:
    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0

    def record(self, stream: Any = None) -> None:
        self.at = clock()

    def query(self) -> bool:
        return True


class Host:
    """The CPU: work runs when it is called, and the host's clock is the device's."""

    def idle(self) -> Any:
        return None

    def event(self) -> Any:
        return _HostEvent()

    def elapsed(self, begin: Any, end: Any) -> int:
        return int(end.at - begin.at)

    def capturing(self) -> bool:
        return False

    def asking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> tuple[int, int]:
        return 0, 0


def api_for(device: torch.device) -> Api:
    """The :class:`Api` of ``device``."""
    if device.type == "cuda":
        return _Cuda(device)
    return Host() if device.type == "cpu" else _Accelerator(device)
