"""Sees exceptions that come out of PyTorch's state-dict functions, although the program may catch them.

``torch.distributed.checkpoint.state_dict`` looks its own workers up at each call, so that a function put in front of each is
found by everybody, however they imported the public ones. It is process-wide, inert without a recorded model, and taken away
with the last one. The module is looked for, never imported: it is patched once the program has imported it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from fsdptrace.adapters.seam import STATE_DICT_MODULE

#: Names in that module (the same in 2.6 to 2.15); what is missing is left out.
WORKERS = ("_get_model_state_dict", "_load_model_state_dict", "_get_optim_state_dict", "_load_optim_state_dict")


class StateDictSeam:
    """Functions in front of the state-dict workers while any recorded model asks for them."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: dict[str, tuple[Any, Any]] = {}

    def add(self, contexts: Iterable[Any]) -> None:
        """Errors are shown to ``contexts`` from now on."""
        self._contexts.update(contexts)
        self.look()

    def remove(self, contexts: Iterable[Any]) -> None:
        """No longer to these; the last one takes the functions away."""
        self._contexts.difference_update(contexts)
        module = sys.modules.get(STATE_DICT_MODULE)
        if not self._contexts and module is not None:
            for name, (original, ours) in self._known.items():
                if getattr(module, name, None) is ours:
                    setattr(module, name, original)
            self._known = {}

    def look(self) -> None:
        """Puts the functions in front if the program has imported the module since."""
        if self._known or not self._contexts:
            return
        module = sys.modules.get(STATE_DICT_MODULE)
        for name in WORKERS if module is not None else ():
            original = getattr(module, name, None)
            if original is not None:
                ours = self._before(original)
                self._known[name] = original, ours
                setattr(module, name, ours)

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def worker(model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(model, *args, **kwargs)
            except Exception as error:
                for context in list(self._contexts):
                    context.state_dict_failed(model, error)
                raise

        return worker


STATE_DICTS = StateDictSeam()
