"""Tells when a wrapped module is used for the first time: by its forward, by a method that was registered as one, or by one
that should have been."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fsdptrace.adapters.compat import groups_of
from fsdptrace.adapters.parts import PartHooks

OnUse = Callable[[nn.Module, Any], None]
OnMisuse = Callable[[nn.Module, nn.Module, BaseException], None]


class FirstUse:
    """Waits for the first use of ``module``; holds it weakly.

    Args:
        module: wrapped by ``fully_shard``.
        on_use: called once, with the module and its positional inputs, from inside its first forward (before FSDP2's own
            hook), or, with inputs ``None``, before a registered forward method begins.
        on_misuse: called instead, with the module, the part of it and the error, when the first use is one past its forward.
    """

    def __init__(self, module: nn.Module, on_use: OnUse, on_misuse: OnMisuse) -> None:
        self._on_use = on_use
        self._on_misuse = on_misuse
        self._module = weakref.ref(module)
        self._handle = module.register_forward_pre_hook(self._forward, prepend=True)
        state = cast(FSDPModule, module)._get_fsdp_state()
        self._state = weakref.ref(state)
        # Methods of register_fsdp_forward_method look this up on the state at each call; forward hooks hold the bound method.
        self._method = lambda *args: self._first_method(*args)
        state.__dict__["_pre_forward"] = self._method
        self._parts = PartHooks([(list(state._modules), groups_of(state))], self._part_failed)
        self._parts.put_on()
        self._parts.watch(True)

    def remove(self) -> None:
        """Stops waiting and puts everything back."""
        self._handle.remove()
        state = self._state()
        if state is not None and state.__dict__.get("_pre_forward") is self._method:
            del state.__dict__["_pre_forward"]
        self._parts.take_off()

    def _part_failed(self, part: nn.Module, error: BaseException) -> None:
        module = self._module()
        self.remove()
        if module is not None:
            self._on_misuse(module, part, error)

    def _forward(self, module: nn.Module, args: Any) -> None:
        self.remove()
        self._on_use(module, args)

    def _first_method(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.remove()
        self._on_use(module, None)
        return cast(FSDPModule, module)._get_fsdp_state()._pre_forward(module, args, kwargs)
