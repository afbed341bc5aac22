"""A callback for Lightning's ``Trainer``, of the package ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fsdptrace.integrations.watching import Watching, missing

_MEND = "Use Trainer(strategy=ModelParallelStrategy()) and call fully_shard in configure_model(), or leave the callback out"


def _callback_class() -> Any:
    """``Callback`` of the package that the program imported, or of the one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise missing("LightningCallback", "lightning")


class LightningCallback(_callback_class()):  # type: ignore[misc]
    """Records a ``LightningModule`` from the beginning of its training to the end.

    A step of the recording ends with the batch in which ``trainer.global_step`` rose, gradient accumulation included. What a
    validation gathers counts to the step after it. :meth:`fsdptrace.Recording.scalars` go to the Trainer's loggers, every
    ``log_every_n_steps``.

    Args:
        **options: of :func:`fsdptrace.record`.

    Raises:
        ValueError: an option cannot be used; or, when training begins, FSDP2 is not in use.

    Example:
        >>> trainer = Trainer(strategy=ModelParallelStrategy(), callbacks=[LightningCallback(out="traces")])
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._watching = Watching("LightningCallback", _MEND, options)
        self._steps = 0

    @property
    def recording(self) -> Any:
        """The :class:`fsdptrace.Recording`, once training has begun."""
        return self._watching.recording

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to record."""
        self._steps = trainer.global_step
        self._watching.begin([pl_module])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends the step if an optimizer stepped, and hands its floats on when the Trainer logs."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._watching.step()
        # The number that Lightning's own values of this batch get, and its own callbacks use (DeviceStatsMonitor).
        number = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step - 1)
        every = trainer.log_every_n_steps
        if trainer.loggers and every and (number + 1) % every == 0:
            values = self._watching.scalars()
            for logger in trainer.loggers if values else ():
                logger.log_metrics(values, step=number)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording."""
        self._watching.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the recording of a training that failed."""
        self._watching.end(exception)
