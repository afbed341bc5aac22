"""Which PyTorch runs, for tests of what a release has or lacks."""

from __future__ import annotations

import pytest
import torch

from fsdptrace.adapters.compat import release_of

RELEASE = release_of(str(torch.__version__))


def since(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skips a test on releases before ``major.minor``; ``why`` says what they lack."""
    return pytest.mark.skipif((major, minor) > RELEASE, reason=f"torch {major}.{minor} and newer: {why}")


HSDP = since(2, 8, "older ones cannot run HSDP on the CPU")
VALUES = since(2, 13, "the fake process group of older ones leaves reduced gradients uninitialised")
RECOMPUTE = since(2, 10, "older ones put a recomputation into the post-forward order again")
RESET = since(2, 13, "reset_iter_state is new in it")
