"""A context around a training loop of Accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from fsdptrace.integrations.watching import Watching, missing
from fsdptrace.recording import Recording

_MEND = (
    "Set `fsdp_version: 2` under `fsdp_config` in the file of `accelerate config` and start with `accelerate launch`, "
    "or leave `record_accelerate` out"
)


@contextmanager
def record_accelerate(
    accelerator: Any, model: nn.Module | Sequence[nn.Module] | None = None, *, log: bool = True, **options: Any
) -> Iterator[Recording]:
    """Records while the block runs: the model that ``accelerator.prepare`` returned, or several.

    A step of the recording is an optimizer's step: with ``accelerator.accumulate`` all of its micro-batches.

    Args:
        accelerator: the ``Accelerator``.
        model: what to record; all models that were prepared, if not given.
        log: whether what the program gives to ``accelerator.log`` gets :meth:`fsdptrace.Recording.scalars` of the last
            finished step added, so that they go to the same trackers under the same step.
        **options: of :func:`fsdptrace.record`.

    Raises:
        ValueError: an option cannot be used, nothing was prepared, or FSDP2 is not in use.
        TypeError: ``accelerator`` is none.

    Example:
        >>> with record_accelerate(accelerator, out="traces"):
        ...     for batch in loader: ...
    """
    try:
        from accelerate import Accelerator
    except ModuleNotFoundError as error:
        raise missing("record_accelerate", "accelerate") from error
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"record_accelerate(): an Accelerator is needed, not {type(accelerator).__name__}")
    if model is None:
        models = list(getattr(accelerator, "_models", ()))
    else:
        models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ValueError("record_accelerate(): no model was prepared yet; call it after accelerator.prepare(...)")
    watching = Watching("record_accelerate", _MEND, options)
    recording = watching.begin(models)
    own = vars(accelerator).get("log")
    if log:
        _add_to_log(accelerator, watching)
    try:
        yield recording
    except BaseException as error:
        watching.end(error)
        raise
    else:
        watching.end()
    finally:
        vars(accelerator).pop("log", None)
        if own is not None:
            accelerator.log = own


def _add_to_log(accelerator: Any, watching: Watching) -> None:
    original = accelerator.log

    def log(values: Any, *args: Any, **kwargs: Any) -> Any:
        return original({**values, **watching.scalars()}, *args, **kwargs)

    accelerator.log = log
