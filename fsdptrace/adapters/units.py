"""The hooks on a unit's modules and on its FSDPState, put on and taken off so that nothing of anybody else's is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from fsdptrace.adapters.compat import groups_of
from fsdptrace.adapters.compiler import not_compiled
from fsdptrace.adapters.describe import Unit
from fsdptrace.adapters.registered import RegisteredMethods


class UnitHooks:
    """The forward hooks on a unit's modules and the wrappers on its FSDPState."""

    def __init__(
        self, unit: Unit, begin: Any, ready: Any, end: Any, methods: dict[str, Callable[..., Any]], others: dict[str, Any]
    ) -> None:
        self.unit = unit
        self.begin, self._ready, self._end = (not_compiled(hook) for hook in (begin, ready, end))
        self._registered = RegisteredMethods(self._end)
        self._methods = methods
        self._others = others
        # RemovableHandle gives the ids, so that they never clash with hooks of the user's.
        self._ids = [
            tuple(RemovableHandle(hooks).id for hooks in (module._forward_pre_hooks,) * 2 + (module._forward_hooks,))
            for module in unit.modules
        ]
        self._modules = [ref(module) for module in unit.modules]
        self._state = None if unit.state is None else ref(unit.state)

    def put_on(self) -> None:
        """As ``register_forward_pre_hook(prepend=True)`` and ``register_forward_hook(always_call=True)`` would."""
        for module, (pre_id, ready_id, post_id) in zip(self.unit.modules, self._ids, strict=True):
            module._forward_pre_hooks[ready_id] = self._ready
            module._forward_pre_hooks[pre_id] = self.begin
            module._forward_pre_hooks.move_to_end(pre_id, last=False)  # type: ignore[attr-defined]
            module._forward_hooks[post_id] = self._end
            module._forward_hooks_always_called[post_id] = True
        if self.unit.state is not None:
            put_over(self.unit.state.__dict__, self._methods, self._others)
            self._registered.put_on(self.unit.modules)

    def take_off(self) -> None:
        """Removes what :meth:`put_on` put there."""
        for module, (pre_id, ready_id, post_id) in zip(self.unit.modules, self._ids, strict=True):
            module._forward_pre_hooks.pop(pre_id, None)
            module._forward_pre_hooks.pop(ready_id, None)
            module._forward_hooks.pop(post_id, None)
            module._forward_hooks_always_called.pop(post_id, None)
        if self.unit.state is not None:
            take_back(self.unit.state.__dict__, self._methods, self._others)
            self._registered.take_off()

    def let_go(self) -> None:
        """Drops the references to PyTorch's objects."""
        self._others.clear()
        self.unit.state = None
        self.unit.modules = []
        self.unit.groups = []

    def take_hold(self) -> bool:
        """Gets them back; False when one of them is gone."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        state = self._state() if self._state is not None else None
        if len(modules) != len(self._modules) or (self._state is not None and state is None):
            return False
        self.unit.modules = modules
        self.unit.state = state
        self.unit.groups = [] if state is None else groups_of(state)
        return len(self.unit.groups) == len(self.unit.info.groups)


def put_over(namespace: dict[str, Any], wrappers: dict[str, Callable[..., Any]], others: dict[str, Any]) -> None:
    """Puts ``wrappers`` into an object's namespace; what somebody else had put there goes to ``others``."""
    others.clear()
    for name, wrapper in wrappers.items():
        if name in namespace:
            others[name] = namespace[name]
        namespace[name] = wrapper


def take_back(namespace: dict[str, Any], wrappers: dict[str, Callable[..., Any]], others: dict[str, Any]) -> None:
    """The inverse of :func:`put_over`; what somebody put over ours since stays."""
    for name, wrapper in wrappers.items():
        if namespace.get(name) is wrapper:
            if name in others:
                namespace[name] = others[name]
            else:
                del namespace[name]


class Original:
    """A method of an FSDPState as it is without us: somebody else's on the instance, else the class's.

    Holds the state weakly, since tensors hold our wrappers and with them this.
    """

    __slots__ = ("_name", "_others", "_state")

    def __init__(self, state: Any, name: str, others: dict[str, Any]) -> None:
        self._state = ref(state)
        self._name = name
        self._others = others

    def __call__(self, *args: Any) -> Any:
        """While ours is in its place."""
        if self._others and (own := self._others.get(self._name)) is not None:
            return own(*args)
        state = self._state()  # as _class() has it, without the call: a unit's every backward comes here
        return self._class(*args) if state is None else getattr(type(state), self._name)(state, *args)

    def later(self, *args: Any) -> Any:
        """When ours has been taken back, and only a tensor of that time still calls it."""
        state = self._state()
        own = None if state is None else state.__dict__.get(self._name)
        return self._class(*args) if own is None else own(*args)

    def _class(self, *args: Any) -> Any:
        state = self._state()
        if state is None:
            return args[0] if args else None
        return getattr(type(state), self._name)(state, *args)


def leaves(error: BaseException, module: nn.Module) -> bool:
    """Whether ``error`` is on its way out of ``module``'s call, not one that an outer ``except`` is handling.

    An always-called hook is run with no output from the ``except`` block of ``Module._call_impl``, whose frame is then
    the first of the error's traceback.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_locals.get("self") is module:
            return True
        trace = trace.tb_next
    return False
