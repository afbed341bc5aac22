"""Fingerprints of values, computed on the device that holds them and read only when somebody needs to know.

Opt-in (``fingerprint=...``), and the one exemption from the law that a hook dispatches no operator. What is run runs without
grad, past dispatch modes, function modes and saved-tensor hooks, so that selective checkpointing counts none of it.

A fingerprint is a weighted sum of a tensor's bytes, taken as 8-byte words (or smaller ones where its size or place allows no
other), modulo 2**64, with odd weights that differ by position. It is exact for every dtype: equal bytes have equal
fingerprints, a difference within one word is always seen, and other differences are missed with a chance of 2**-64.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils._python_dispatch import _disable_current_modes

from fsdptrace.adapters.accelerator import current as current_accelerator

WANTS = ("params", "inputs", "saved")

_COLUMNS = 1 << 14
_ROWS = 1 << 7  # rows at a time: 2 Mi words, 16 MiB beside the tensor
_LIMIT = 4096  # values of one kind in one start
_DEPTH = 4
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OWN = frozenset(vars(nn.Module()))  # what every module has
_NOT_THE_PROGRAMS = ("__", "_fsdp", "_is_fsdp")  # what FSDP2 puts on modules
_weights: dict[torch.device, torch.Tensor] = {}


def _pytorchs(value: Any) -> bool:
    """An object of PyTorch's own (a process group, FSDP2's state): no state of the program's."""
    return type(value).__module__.partition(".")[0] in ("torch", "fsdptrace")


class Quiet(ExitStack):
    """Nothing that runs inside is seen by autograd, by modes or by hooks of the program's."""

    def __enter__(self) -> Quiet:
        super().__enter__()
        self.enter_context(torch.no_grad())
        self.enter_context(torch._C.DisableTorchFunction())
        self.enter_context(_disable_current_modes())
        return self


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    """A 0-d int64 tensor on the tensor's device; ``None`` for what has no bytes of its own to look at (meta, fake, sparse, a
    subclass other than DTensor). To be called inside :class:`Quiet`."""
    plain: Any = getattr(tensor, "_local_tensor", tensor)
    if type(plain) not in (torch.Tensor, nn.Parameter) or plain.layout != torch.strided or plain.is_meta:
        return None
    plain = plain.detach().resolve_conj().resolve_neg()
    if plain.untyped_storage().nbytes() == 0 and plain.numel():
        return None  # freed
    flat = plain.contiguous().view(-1)
    words = _words(flat)
    rows = words.numel() // _COLUMNS
    weights = _weights_on(flat.device)
    rest = words[rows * _COLUMNS :] if rows else words
    total = (rest.to(torch.int64) * weights[: rest.numel()]).sum() * _row_weight(rows)
    for begin in range(0, rows, _ROWS):
        end = min(begin + _ROWS, rows)
        part = words[begin * _COLUMNS : end * _COLUMNS].view(end - begin, _COLUMNS).to(torch.int64)
        by_row = [_row_weight(row) for row in range(begin, end)]
        total += ((part * weights).sum(1) * torch.tensor(by_row, dtype=torch.int64, device=flat.device)).sum()
    return total


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous 1-d tensor as the largest words that its size and place allow."""
    size = flat.element_size()
    count, place = flat.numel() * size, flat.storage_offset() * size
    for dtype in (torch.int64, torch.int32, torch.int16):
        wide = dtype.itemsize
        if count % wide == 0 and place % wide == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)


def _weights_on(device: torch.device) -> torch.Tensor:
    weights = _weights.get(device)
    if weights is None:
        weights = _weights[device] = torch.tensor(_ODD, dtype=torch.int64, device=device)
    return weights


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# Not of torch's generator, which would change what the program draws.
_draw = random.Random(0x5EED)
_ODD = [_signed(_draw.getrandbits(64) | 1) for _ in range(_COLUMNS)]


def _row_weight(row: int) -> int:
    """An odd weight for a row of words; there are as many as a tensor of any length needs."""
    return _signed(_ODD[(row + 1) % _COLUMNS] * (2 * (row // _COLUMNS) + 1) % (1 << 64))


class Prints:
    """Named values of one moment: tensors by fingerprint, anything else by what it is.

    ``kinds[i]`` says what entry ``i`` is one of: ``params``, ``inputs``, ``rng``, ``module``; ``cut`` has the kinds of which
    there was too much to take all.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kinds: list[str] = []
        self.texts: list[str] = []  # dtype and shape of a tensor; another value itself
        self.tensors: list[torch.Tensor | None] = []
        self.cut: set[str] = set()
        self._taken: dict[str, int] = {}
        self._values: dict[int, int] = {}
        self._stacked: list[tuple[list[int], torch.Tensor]] = []

    def add(self, kind: str, name: str, value: Any, depth: int = _DEPTH) -> None:
        """``value`` and what lies in it: containers, and attributes of plain objects. Inside :class:`Quiet`."""
        if self._taken.get(kind, 0) >= _LIMIT:
            self.cut.add(kind)
        elif isinstance(value, torch.Tensor):
            text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            self._put(kind, name, text, fingerprint(value))
        elif isinstance(value, _SCALARS):
            self._put(kind, name, _short(repr(value)), None)
        elif isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
            self._put(kind, name, _called(value), None)
        elif isinstance(value, torch.Generator):
            state = value.get_state().numpy().tobytes()
            self._put("rng", f"generator {name}", hashlib.blake2b(state, digest_size=8).hexdigest(), None)
        elif depth <= 0 or isinstance(value, (nn.Module, type, Callable)) or _pytorchs(value):  # type: ignore[arg-type]
            return
        elif isinstance(value, Mapping):
            for key, item in list(value.items()):
                self.add(kind, f"{name}[{key!r}]"[:200], item, depth - 1)
        elif isinstance(value, (list, tuple, deque)):
            self._put(kind, f"len({name})", str(len(value)), None)
            for i, item in enumerate(value):
                self.add(kind, f"{name}[{i}]", item, depth - 1)
        elif isinstance(value, (set, frozenset)):
            self._put(kind, name, _short(repr(sorted(map(repr, value)))), None)
        else:
            for key, item in _attributes(value):
                self.add(kind, f"{name}.{key}", item, depth - 1)

    def add_module(self, prefix: str, module: nn.Module) -> None:
        """State that a forward of ``module`` may depend on beside its parameters: buffers, attributes of its modules and of
        their classes; which modules and forward hooks there are, and which parameters require grad."""
        for path, owner in module.named_modules():
            name = ".".join(part for part in (prefix, path) if part)
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    self.add("module", f"buffer {name}.{key}", buffer)
            for key, value in list(vars(owner).items()):
                if key == "training" or (key not in _OWN and not key.startswith(_NOT_THE_PROGRAMS)):
                    self.add("module", f"{name}.{key}", value)
            for what, text in _structure(owner):
                self._put("module", f"{what} of {name or 'the module'}", _short(text), None)
            for key, value in _of_class(type(owner)):
                self.add("module", f"{name}.{key}, of its class", value)

    def add_random(self) -> None:
        """The states of the generators that every program has."""
        for name, state in random_states():
            self._put("rng", name, state, None)

    def _put(self, kind: str, name: str, text: str, tensor: torch.Tensor | None) -> None:
        self._taken[kind] = self._taken.get(kind, 0) + 1
        self.names.append(name)
        self.kinds.append(kind)
        self.texts.append(text)
        self.tensors.append(tensor)

    def freeze(self) -> None:
        """Puts the fingerprints of each device that came since the last call into one tensor. Inside :class:`Quiet`."""
        by_device: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            if tensor is not None:
                by_device.setdefault(tensor.device, []).append(i)
        for places in by_device.values():
            self._stacked.append((places, torch.stack([self.tensors[i] for i in places])))  # type: ignore[misc]
        self.tensors = [None] * len(self.tensors)

    def values(self) -> dict[tuple[str, str], tuple[str, int | None]]:
        """By kind and name: text and fingerprint. Waits for the device. Inside :class:`Quiet`."""
        self.freeze()
        for places, stacked in self._stacked:
            for i, value in zip(places, stacked.tolist(), strict=True):
                self._values[i] = value
        self._stacked = []
        entries = enumerate(zip(self.kinds, self.names, self.texts, strict=True))
        return {(kind, name): (text, self._values.get(i)) for i, (kind, name, text) in entries}


def _short(text: str) -> str:
    """``text`` for a note; of a longer one the end is told by a digest, so that it still differs where it differs."""
    return text if len(text) <= 200 else f"{text[:180]}… ({_digest(text.encode())})"


def _called(function: Any) -> str:
    """A function, by where it was made: two that are made in one place are the same."""
    code = getattr(function, "__code__", None)
    line = f", line {code.co_firstlineno}" if code is not None and "<" in function.__qualname__ else ""
    return f"{function.__module__}.{function.__qualname__}{line}".removeprefix("None.")


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """What a plain object holds, in its ``__dict__`` and in slots."""
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _structure(owner: nn.Module) -> Iterable[tuple[str, str]]:
    """Modules and hooks of the program's, and which parameters are trained; each where there are any."""
    if owner._modules:
        yield "modules", ", ".join(f"{key}: {type(child).__name__}" for key, child in owner._modules.items())
    if owner._parameters:
        trained = ", ".join(key for key, param in owner._parameters.items() if param is not None and param.requires_grad)
        yield "trainable parameters", trained or "none"
    hooks = [hook for hook in (*owner._forward_pre_hooks.values(), *owner._forward_hooks.values()) if not _pytorchs_hook(hook)]
    if hooks:
        yield "forward hooks", ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)


def _pytorchs_hook(hook: Any) -> bool:
    """A hook of PyTorch's (FSDP2's, checkpointing's) or of ours: those come and go."""
    made_in = getattr(hook, "__module__", None) or type(hook).__module__
    return str(made_in).partition(".")[0] in ("torch", "fsdptrace") or _pytorchs(hook)


def _of_class(cls: type) -> Iterable[tuple[str, Any]]:
    """Plain values that the program's classes of a module hold, as a counter of all its instances does."""
    for own in cls.__mro__:
        if own.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
            for key, value in list(vars(own).items()):
                if not key.startswith("__") and isinstance(value, (bool, int, float, str, list, dict, set)):
                    yield key, value


class Difference(NamedTuple):
    """One entry that differs. ``tensor`` is its dtype and shape where only its values do."""

    kind: str
    name: str
    tensor: str
    forward: str
    recompute: str


def random_states() -> Iterable[tuple[str, str]]:
    """Name and state of torch's generators, Python's and numpy's, each as a digest."""
    yield "torch's CPU generator", _digest(torch.default_generator.get_state().numpy().tobytes())
    accelerator = current_accelerator()
    device = None if accelerator is None else getattr(torch, accelerator.type, None)
    if accelerator is not None and getattr(device, "_initialized", False) and hasattr(device, "get_rng_state"):
        yield f"torch's {accelerator.type} generator", _digest(device.get_rng_state().numpy().tobytes())  # type: ignore[union-attr]
    yield "random of Python", _digest(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", _digest(repr(numpy.random.get_state()[1:3]).encode() + numpy.random.get_state()[1].tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def differences(forward: Prints, recompute: Prints, tensors_only: bool = False) -> list[Difference]:
    """Entries that differ; of inputs and state of modules those too that one of both lacks. Inside :class:`Quiet`."""
    out = []
    one, other = forward.values(), recompute.values()
    for (kind, name), (text, value) in one.items():
        again = other.get((kind, name))
        if again is None or again == (text, value) or (tensors_only and value is None):
            continue
        if kind == "rng":
            out.append(Difference(kind, name, "", "one state", "another"))
        elif text == again[0]:
            out.append(Difference(kind, name, text, "one value", "another"))
        else:
            out.append(Difference(kind, name, "", text, again[0]))
    return out if tensors_only else [*out, *_in_one_only(forward, recompute, out)]


def _in_one_only(forward: Prints, recompute: Prints, differ: list[Difference]) -> Iterable[Difference]:
    """Inputs and state of modules that only one of both has, past what a list or a module that differs in length explains."""
    one, other, cut = forward.values(), recompute.values(), forward.cut | recompute.cut
    told = [f"{item.name[4:-1]}[" for item in differ if item.name.startswith("len(")]
    told += [f"{item.name.removeprefix('modules of ')}." for item in differ if item.name.startswith("modules of ")]
    for kind, name in {**one, **other}:
        if kind not in ("inputs", "module") or kind in cut or ((kind, name) in one and (kind, name) in other):
            continue
        if not any(name.removeprefix("len(").startswith(part) or f" of {part}" in f"{name}." for part in told):
            texts = [values[kind, name][0] if (kind, name) in values else "not there" for values in (one, other)]
            yield Difference(kind, name, "", *texts)
