"""A callback for ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

from fsdptrace.integrations.watching import Watching, missing

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise missing("TransformersCallback", "transformers") from error

_MEND = (
    "Start several processes (torchrun or accelerate launch) with TrainingArguments(fsdp=True, fsdp_config={'version': 2}), "
    "or leave the callback out"
)


class TransformersCallback(TrainerCallback):
    """Records the model of a ``transformers.Trainer`` from the beginning of its training to the end.

    A step of the recording is a step of the Trainer (``global_step``), gradient accumulation included. What an evaluation
    gathers counts to the step after it.

    Args:
        trainer: the Trainer. With it, :meth:`fsdptrace.Recording.scalars` go to ``trainer.log``, and so wherever the Trainer
            reports to, whenever it logs.
        **options: of :func:`fsdptrace.record`.

    Raises:
        ValueError: an option cannot be used; or, when training begins, FSDP2 is not in use.

    Example:
        >>> trainer.add_callback(TransformersCallback(trainer, out="traces"))
    """

    def __init__(self, trainer: Any = None, **options: Any) -> None:
        self._trainer = trainer
        self._logging = False
        self._watching = Watching("TransformersCallback", _MEND, options)

    @property
    def recording(self) -> Any:
        """The :class:`fsdptrace.Recording`, once training has begun."""
        return self._watching.recording

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begins to record."""
        self._watching.begin([model])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the step."""
        self._watching.step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hands the floats of the last step on. ``trainer.log`` comes back here: once is enough."""
        if self._trainer is None or self._logging:
            return
        values = self._watching.scalars()
        if values:
            self._logging = True
            try:
                self._trainer.log(values)
            finally:
                self._logging = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the recording."""
        self._watching.end()
