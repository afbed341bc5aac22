"""What a hook costs per event in a loop whose caches are warm, on a stand-in that does nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdptrace.adapters.context import BACKWARD_SEQ, PARENT, Context
from fsdptrace.adapters.hooks import GroupHooks
from fsdptrace.checks import registry
from fsdptrace.checks.engine import Engine
from fsdptrace.model_map import GroupInfo, ModelMap, UnitInfo
from fsdptrace.ring import Ring


class _Stub:
    """Has the surface of an FSDPParamGroup that hooks touch, and does nothing: what is left is the hook's own cost."""

    def __init__(self) -> None:
        self._sharded_state = ShardedState.SHARDED
        self._training_state = TrainingState.FORWARD
        self._all_gather_result: Any = None
        self.fsdp_params: list[Any] = []
        self.reduce_grads = self.all_reduce_grads = self.reshard_after_backward = self.unshard_in_backward = True
        self.post_forward_mesh_info = object()
        self.result = SimpleNamespace(all_gather_input_split_sizes=[1], all_gather_output=torch.empty(64))

    def unshard(self, async_op: bool = False) -> None:
        self._all_gather_result = self.result

    def wait_for_unshard(self) -> None:
        self._all_gather_result = None

    def reshard(self) -> None: ...
    def _to_sharded(self) -> None: ...
    def _to_sharded_post_forward(self) -> None: ...
    def use_training_state(self, training_state: Any) -> Any: ...
    def _prefetch_unshard(self, target: Any, pass_type: str) -> None: ...
    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def post_forward(self, module: Any, input: Any, output: Any) -> Any: ...
    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None: ...
    def post_backward(self, *unused: Any) -> None: ...
    def finalize_backward(self) -> None: ...


def tight_loop(with_checks: bool) -> dict[str, float]:
    """Nanoseconds per event by kind, hook minus bare call, in a loop with warm caches."""
    info = GroupInfo(
        0, "a", 0, ("a",), (), 1, 256, 64, "float32", "float32", 4, 4, 1, {"0": 4}, True, True, 1, False
    )  # fmt: skip
    model_map = ModelMap(0, "M", (UnitInfo(0, "a", ("a",), (0,), True),), (info,))
    rules = registry.select(None) if with_checks else ()
    engine = Engine(model_map, rules, lambda violation: None)
    ring = Ring()
    owner = SimpleNamespace(before_collective=None, announce=lambda m: None, stop_run=lambda e: True, fault=lambda e: None)
    if not with_checks:
        engine.handler = lambda kind: _nothing  # type: ignore[method-assign]
    context = Context(0, ring.append, iter(range(1 << 40)), engine, owner, {})  # type: ignore[arg-type]
    stub = _Stub()
    hooks = GroupHooks(context, stub, info)
    context.shared[BACKWARD_SEQ] = context.shared[PARENT] = 1  # inside a hook of a backward
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for name, args in (
        ("unshard", ()),
        ("wait_for_unshard", ()),
        ("_to_sharded", ()),
        ("pre_forward", (None, (), {})),
        ("post_forward", (None, None, None)),
        ("pre_backward", (True,)),
        ("post_backward", ()),
    ):
        calls[name] = (_call(hooks.wrappers[name], args), _call(getattr(stub, name), args))
    out = {}
    for name, (hooked, bare) in calls.items():

        def prepare(name: str = name) -> None:
            stub._sharded_state = ShardedState.UNSHARDED if name == "_to_sharded" else ShardedState.SHARDED
            stub._all_gather_result = stub.result if name == "wait_for_unshard" else None
            engine.tracker.groups[0].open = True

        out[name] = _loop(hooked, prepare, ring) - _loop(bare, prepare, ring)
    return out


def _nothing(seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
    pass


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*args)


def _loop(call: Callable[[], Any], prepare: Callable[[], None], ring: Ring) -> float:
    best = float("inf")
    for _ in range(25):
        start = time.perf_counter_ns()
        for _ in range(400):
            prepare()
            call()
        used = time.perf_counter_ns() - start
        start = time.perf_counter_ns()
        for _ in range(400):
            prepare()
        best = min(best, (used - (time.perf_counter_ns() - start)) / 400)
        ring.clear()
    return best
