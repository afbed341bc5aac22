"""The mixture of experts of examples/recompute_causes.py, and its cases."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parent.parent.parent / "examples" / "recompute_causes.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("recompute_causes", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


causes = _load()
DIM, EXPERTS, TOP, TOKENS = causes.DIM, causes.EXPERTS, causes.TOP, causes.TOKENS
sharded = causes.sharded
