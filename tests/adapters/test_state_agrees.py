"""The open and pending state and the bytes that the events imply are PyTorch's own, whenever anybody looks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace import files
from fsdptrace.checks.engine import Engine
from support.programs import Program, every_program


class Comparison:
    """Compares the trackers of a recording with FSDP2's objects; hooked in wherever a user could look."""

    def __init__(self, rec: Any) -> None:
        self.rec = rec
        self.looks = 0
        self.open = 0
        self.pending = 0

    def look(self, *_: Any) -> None:
        for recorded in self.rec._recorded:
            tracker = recorded.engine.tracker
            held = 0
            for state, hooks in zip(tracker.groups, recorded.hooks.groups, strict=True):
                group = hooks.group
                is_open = group._sharded_state.name == "UNSHARDED"
                pending = group._all_gather_result
                where = f"{state.name} at look {self.looks}"
                assert state.open == is_open, f"open: {where}"
                assert state.pending == (pending is not None), f"pending: {where}"
                size = 0
                if is_open:
                    # What is allocated for the gathered parameters, padding included.
                    outputs = [out for param in group.fsdp_params for out in param.all_gather_outputs]
                    size = sum(out.untyped_storage().size() for out in outputs)
                elif pending is not None:
                    output = pending.all_gather_output
                    # A world of one has no buffer: the copies are made at the wait.
                    size = output.numel() * output.element_size() or hooks.info.bytes
                assert not size or state.bytes == size, f"bytes: {where}"
                held += size
                self.open += is_open
                self.pending += pending is not None
            assert tracker.held == held, f"held at look {self.looks}"
        self.looks += 1

    def hook_in(self, model: nn.Module) -> None:
        """Looks before and after every leaf's forward, when its output gets its gradient and when a parameter gets one."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.look()
            if torch.is_grad_enabled() and isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self.look)

        for module in model.modules():
            module.register_forward_pre_hook(lambda module, args: self.look())
            module.register_forward_hook(after)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.look)


@every_program()
def test_state_agrees(fake_pg: Any, record: Any, program: Program) -> None:
    mesh = fake_pg(*program.shape, names=program.names)
    running = program.build(mesh)
    with record(running.models) as rec:
        compare = Comparison(rec)
        if not program.name.startswith("compiled"):
            for model in running.models:
                compare.hook_in(model)
        for _ in range(3):
            running.step()
            compare.look()
    assert rec.faults == 0
    assert rec.enabled
    assert compare.looks > 2
    if not program.name.startswith("compiled"):
        assert compare.looks > 10
        assert compare.open > 0
    # And what a file holds implies the same as what was seen while it ran.
    rec.close()
    trace = files.read_file(rec.path)
    assert not trace.damaged
    texts = ev.Texts()
    for recorded in rec._recorded:
        again = Engine(trace.models[recorded.context.model], (), lambda violation: None)
        for event in trace.events:
            if event.model == recorded.context.model:
                again.feed(ev.encode(event, texts))
        live = recorded.engine.tracker
        for one, other in zip(again.tracker.groups, live.groups, strict=True):
            assert {name: getattr(one, name) for name in one.__slots__} == {
                name: getattr(other, name) for name in one.__slots__
            }
        assert (again.tracker.held, again.tracker.step_number) == (live.held, live.step_number)
