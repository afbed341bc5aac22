"""Sees exceptions that leave a method given to ``register_fsdp_forward_method``, where no hook of a module runs.

PyTorch puts such a method on the module itself, as a function that runs FSDP2's pre- and post-forward around the user's (2.6 to
2.15). While a recording is active another function stands in its place, which does nothing but look at what comes out of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.nn as nn

from fsdptrace.adapters.seam import FULLY_SHARD_MODULE

OnError = Callable[[nn.Module, Any, Any], None]
_NAME = "wrapped_method"


class RegisteredMethods:
    """The registered forward methods of some modules, as long as a recording is active.

    Args:
        on_error: called as a module's forward hook is on an exception, while it is being handled.
    """

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._put: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put_on(self, modules: list[nn.Module]) -> None:
        """Stands in for the methods that were registered so far."""
        file = getattr(sys.modules.get(FULLY_SHARD_MODULE), "__file__", None)
        for module in modules:
            for name, method in list(vars(module).items()):
                if isinstance(method, MethodType) and _is_registered(method, file):
                    ours = self._watched(module, method)
                    vars(module)[name] = ours
                    self._put.append((vars(module), name, method, ours))

    def take_off(self) -> None:
        """Puts them back; what somebody registered over them since stays."""
        put, self._put = self._put, []
        for namespace, name, method, ours in put:
            if namespace.get(name) is ours:
                namespace[name] = method

    def _watched(self, module: nn.Module, method: MethodType) -> MethodType:
        on_error, function = self._on_error, method.__func__

        @functools.wraps(function)
        def watched(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(self_, *args, **kwargs)
            except BaseException:
                if self._put:
                    on_error(self_, args, None)
                raise

        return MethodType(watched, module)


def _is_registered(method: MethodType, file: str | None) -> bool:
    code = getattr(method.__func__, "__code__", None)
    return code is not None and code.co_name == _NAME and code.co_filename == file
