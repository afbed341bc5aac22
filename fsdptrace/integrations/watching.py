"""What the callbacks have in common: a recording that a framework begins, steps and ends, and the refusal without FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fsdptrace.adapters.describe import class_name
from fsdptrace.options import resolve
from fsdptrace.recording import Recording, record


class Watching:
    """One recording at a time, begun and ended by a framework's events.

    Args:
        who: the callback's name, for messages.
        mend: how FSDP2 is turned on in the framework, for the refusal.
        options: of :func:`fsdptrace.record`.

    Raises:
        ValueError: an option cannot be used.
        TypeError: an unknown option.
    """

    def __init__(self, who: str, mend: str, options: dict[str, Any]) -> None:
        resolve(**options)  # a slip shows where it was made, not hours later
        self._who = who
        self._mend = mend
        self._options = options
        self._handed = -1.0
        self.recording: Recording | None = None

    def begin(self, models: Sequence[nn.Module]) -> Recording:
        """Starts to record; what ran before (training that an exception ended, in a notebook) ends.

        Raises:
            ValueError: no unit of ``fully_shard`` is in ``models``; the message says what there is instead, and what to change.
        """
        self.end()
        made = record(models, **self._options)
        if made.enabled:
            self._require_fsdp2(models)
        self.recording = made.__enter__()
        self._handed = -1.0
        return made

    def _require_fsdp2(self, models: Sequence[nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        if any(isinstance(module, FSDPModule) for module in modules):
            return
        found = "nothing of it is wrapped by fully_shard"
        if any(isinstance(module, FullyShardedDataParallel) for module in modules):
            found = "it is wrapped by FSDP1 (FullyShardedDataParallel), which fsdptrace does not see"
        elif any(isinstance(module, DistributedDataParallel) for module in modules):
            found = "it is wrapped by DistributedDataParallel"
        raise ValueError(f"{self._who}: {class_name(models[0])} does not train with FSDP2: {found}. {self._mend}")

    def step(self) -> None:
        """Ends the running step.

        Raises:
            InvariantViolation: a rule that looks at the step is broken, under ``on_violation="raise"``.
        """
        if self.recording is not None:
            self.recording.step()

    def scalars(self) -> dict[str, float]:
        """The floats of the last finished step, for the framework's logger; empty when they were handed out already."""
        recording = self.recording
        if recording is None or not recording.steps:
            return {}
        values = recording.scalars()
        if values["fsdp/step"] == self._handed:
            return {}
        self._handed = values["fsdp/step"]
        return values

    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording, if there is one. Its numbers stay readable."""
        recording = self.recording
        if recording is not None:
            recording.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)


def missing(what: str, package: str) -> ModuleNotFoundError:
    """The error for a framework that is not installed."""
    return ModuleNotFoundError(f"fsdptrace.integrations.{what} needs {package}: pip install {package}", name=package)
