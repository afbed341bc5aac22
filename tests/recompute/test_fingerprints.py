"""Fingerprints: equal bytes are equal, a bit more is not, for every dtype; nothing of it is seen by the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_do_no_harm import same, train
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrace.adapters.fingerprints import Quiet, fingerprint, random_states
from support.programs import PROGRAMS, Program
from support.torches import VALUES

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int8, torch.uint8, torch.int64,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def of(tensor: torch.Tensor) -> int:
    with Quiet():
        found = fingerprint(tensor)
    assert found is not None
    return int(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 8, 5 * 16384 + 3, 200 * 16384 + 1])
def test_one_bit(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.rand(count) * 100).to(dtype)
    again = tensor.clone()
    assert of(again) == of(tensor)
    again.view(torch.uint8)[count // 2 * tensor.element_size()] ^= 1
    assert of(again) != of(tensor)


def test_order_and_zeros() -> None:
    ones = torch.arange(100.0)
    assert of(ones) != of(ones.flip(0))
    assert of(torch.zeros(5)) != of(-torch.zeros(5))
    nan = torch.full((4,), float("nan"))
    assert of(nan) == of(nan.clone())
    assert of(torch.randn(6, 4).t().contiguous()) != of(torch.randn(6, 4))
    square = torch.randn(6, 6)
    assert of(square.t()) == of(square.t().contiguous())
    assert of(square[1:3]) == of(square[1:3].clone())  # at an odd place in its storage


def test_what_has_no_bytes() -> None:
    with Quiet():
        assert fingerprint(torch.empty(3, device="meta")) is None
        assert fingerprint(torch.eye(3).to_sparse()) is None


def test_no_mode_sees_it() -> None:
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.randn(10, requires_grad=True)
    with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x), Quiet():
        fingerprint(tensor)
    assert seen == []
    before = torch.get_rng_state()
    of(tensor)
    assert torch.equal(before, torch.get_rng_state())


CHECKPOINTED = [p for p in PROGRAMS if "checkpointing" in p.name or p.name in ("reentrant_nested", "selective")]


@VALUES
@pytest.mark.parametrize("program", [pytest.param(p, id=p.name, marks=p.marks) for p in CHECKPOINTED])
def test_bit_identical_with_all_fingerprints(fake_pg: Any, record: Any, program: Program) -> None:
    """Losses, gradients, random numbers with and without them, selective checkpointing around units among them."""
    mesh = fake_pg(*program.shape, names=program.names)

    def all_of(models: Any, **options: Any) -> Any:
        return record(models, fingerprint="all", checkpoint_detail="modules", **{**options, "on_violation": "raise"})

    same(train(program, mesh, None), train(program, mesh, all_of))


def test_random_state_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here() -> Any:  # as torch 2.6 has it; newer ones return None
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none_here)
    names = [name for name, _ in random_states()]
    assert names[:2] == ["torch's CPU generator", "random of Python"]
