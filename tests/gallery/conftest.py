"""A recorder with all default rules that writes everything, so that the rules can be run over its file too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fsdptrace


@pytest.fixture
def watch(record: Callable[..., fsdptrace.Recording]) -> Callable[..., fsdptrace.Recording]:
    """``fsdptrace.record`` with the default rules, recording what they find, in full detail."""

    def make(model: Any, **options: Any) -> fsdptrace.Recording:
        options.setdefault("checks", None)
        options.setdefault("on_violation", "record")
        options.setdefault("detail", "full")
        return record(model, **options)

    return make
