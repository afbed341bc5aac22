"""Zero-code recording: imported by ``fsdptrace_autostart.pth`` in processes that have ``FSDPTRACE=1``, and only there.

Imports neither torch nor anything heavy: it waits for the program to import FSDP2 and then lets :mod:`fsdptrace.auto` notice
the models that ``fully_shard`` wraps. A program that never imports FSDP2 runs as if nothing were there.
"""

from __future__ import annotations

import os
import sys

from fsdptrace.adapters.seam import FULLY_SHARD_MODULE as _TARGET

TYPE_CHECKING = False  # as typing has it; nothing is imported here that a bare interpreter has not loaded
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _PatchingLoader:
    """The module's own loader, with a look at the module once it has been executed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        watch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder:
    """Finds nothing itself: lets the finders after it find the one module, and wraps its loader."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchingLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


_given_up: list[str] = []


def watch(module: ModuleType) -> None:
    """Puts a function in front of ``fully_shard`` in its own module, from where everybody imports it."""
    import functools  # loaded long since: torch is

    original = module.fully_shard

    @functools.wraps(original)
    def fully_shard(target: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(target, *args, **kwargs)
        if not _given_up:
            try:
                # Only now: while FSDP2 is being imported, what we need of it is not there yet.
                from fsdptrace.auto import notice

                notice(target)
            except Exception as error:  # UnsupportedTorch, a bad option: said once, and the program goes on
                _given_up.append(str(error))
                print(f"fsdptrace does not record here: {type(error).__name__}: {error}", file=sys.stderr)
        return result

    module.fully_shard = fully_shard  # type: ignore[attr-defined]


def start() -> None:
    """Waits for FSDP2; with ``FSDPTRACE_TALLY`` (set by ``fsdptrace run``) this process is counted."""
    tally = os.environ.get("FSDPTRACE_TALLY")
    if tally:
        try:
            open(os.path.join(tally, str(os.getpid())), "x").close()
        except OSError:
            pass
    loaded = sys.modules.get(_TARGET)
    if loaded is not None:  # the program got there first (an interpreter embedded in something)
        watch(loaded)
    else:
        sys.meta_path.insert(0, _Finder())


start()
