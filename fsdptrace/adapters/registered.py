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
        # Per module how many attributes it had when it was looked through, and which were registered: a registration adds one.
        self._found: list[tuple[int, list[str]]] = []

    def put_on(self, modules: list[nn.Module]) -> None:
        """Stands in for the methods that were registered so far."""
        file = getattr(sys.modules.get(FULLY_SHARD_MODULE), "__file__", None)
        if len(self._found) != len(modules):
            self._found = [(-1, [])] * len(modules)
        for i, module in enumerate(modules):
            namespace = module.__dict__
            size, names = self._found[i]
            if len(namespace) != size:
                names = [name for name, value in namespace.items() if _is_registered(value, file)]
                self._found[i] = len(namespace), names
            for name in names:
                method = namespace.get(name)
                if isinstance(method, MethodType) and _is_registered(method, file):
                    ours = namespace[name] = self._watched(module, method)
                    self._put.append((namespace, name, method, ours))

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


def _is_registered(method: Any, file: str | None) -> bool:
    if not isinstance(method, MethodType):
        return False
    code = getattr(method.__func__, "__code__", None)
    return code is not None and code.co_name == _NAME and code.co_filename == file
