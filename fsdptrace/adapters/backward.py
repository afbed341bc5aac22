"""Where a backward begins and ends, and that it failed: the function through which ``torch.autograd`` starts its engine.

A process-wide seam, since no object of the model sees an error that autograd raises in a node of its own, and such an
error is how a lost pre-backward shows. ``torch.autograd._engine_run_backward`` (torch/autograd/__init__.py, imported there
from ``graph``; 2.6 to 2.15) is replaced while any recording is active, does nothing for models that are not recorded, and
is put back by the last one that ends.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsdptrace.adapters.context import DEPTH, Context, graph_task_id
from fsdptrace.adapters.frames import is_running

_NAME = "_engine_run_backward"


class EngineSeam:
    """The replaced function and the contexts that it tells."""

    def __init__(self) -> None:
        # Weak: a context leads to its model's hooks, and nothing of ours keeps a model alive.
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._original: Any = None
        self._ours: Any = None

    def add(self, contexts: list[Context]) -> None:
        """Starts telling ``contexts``."""
        if self._original is None:
            self._original = getattr(torch.autograd, _NAME)
            self._ours = self._wrapper()
            setattr(torch.autograd, _NAME, self._ours)
        self._contexts.update(contexts)

    def remove(self, contexts: list[Context]) -> None:
        """Stops telling them; the last one puts the function back."""
        self._contexts.difference_update(contexts)
        if not self._contexts and self._original is not None:
            if getattr(torch.autograd, _NAME) is self._ours:  # else somebody wrapped ours, which passes everything through
                setattr(torch.autograd, _NAME, self._original)
            self._original = self._ours = None

    def _wrapper(self) -> Any:
        original = self._original

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if graph_task_id() != -1:  # a backward inside a backward, as reentrant checkpointing runs them
                return original(*args, **kwargs)
            for context in list(self._contexts):
                if context.shared[DEPTH]:
                    _forward_left(context)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                for context in list(self._contexts):
                    context.backward_left(error)
                raise
            for context in list(self._contexts):
                context.backward_left(None)
            return result

        return _engine_run_backward


def _forward_left(context: Context) -> None:
    """A backward begins, and a forward seems to be under way: around it, or one that a KeyboardInterrupt left, on which PyTorch
    runs no hook (``nn.Module._call_impl`` catches ``Exception`` alone). The steps after it would never end."""
    try:
        if not is_running(context.units):
            context.abandon_forward()
    except Exception as fault:
        if context.owner.stop_run(fault):
            raise
        context.owner.fault(fault)


SEAM = EngineSeam()
