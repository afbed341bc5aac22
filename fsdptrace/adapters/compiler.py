"""Keeps torch.compile away from our code: it would trace into hooks and break graphs there.

``torch.compiler.disable`` does that with a wrapper that costs more than the hook itself. Marking code objects costs nothing
per call: dynamo then neither traces into a hook nor tries to compile what the hook calls. FSDP2's own hooks import
``torch._dynamo`` in the first forward (2.6 to 2.15), so that importing it here adds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_marked: set[str] = set()


def not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, marked so that dynamo does not inline it; with it, once per module, all of fsdptrace's code."""
    from torch._dynamo import decorators

    # A function in C or in Python, by release.
    skip_code: Callable[[CodeType], None] = vars(decorators)["skip_code"]

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fsdptrace" and name not in _marked:
            _marked.add(name)
            for code in _code_of(module):
                skip_code(code)
    skipped: Callable[..., Any] = decorators.skip(hook)
    return skipped


def _code_of(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
