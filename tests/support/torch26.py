"""``python tests/support/torch26.py``: FSDP2 of the installed torch 2.6 runs on a CPU afterwards, which as released it cannot.

Its forward calls ``torch.cpu.Stream.record_event``, which is new in 2.7, and its gathers count as writes to the parameters on
a CPU, so that the backward refuses them. Both are mended in the installed files the way 2.7 has it, for every process. On
other releases nothing is done.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

_STREAM = """

def _nothing(self, *event):
    pass


Stream.record_event = Stream.wait_event = _nothing  # by the tests of fsdptrace, as torch 2.7 has them
"""
_COPY_OUT = """    torch.ops.fsdp.split_with_sizes_copy(
        all_gather_output, all_gather_input_split_sizes, dim=1, out=out
    )
"""
_GUARDED = f"""    # By the tests of fsdptrace, as torch 2.7 keeps the versions.
    versions = [(t, t._version) for t in out if not t.is_inference()]
{_COPY_OUT}    for t, v in versions:
        torch._C._autograd._unsafe_set_version_counter(t, v)
"""


def main() -> None:
    """Edits the two files, unless they are edited."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not version("torch").startswith("2.6."):
        return
    package = Path(spec.origin).parent
    streams = package / "cpu" / "__init__.py"
    text = streams.read_text()
    if "record_event" not in text:
        streams.write_text(text + _STREAM)
    collectives = package / "distributed" / "fsdp" / "_fully_shard" / "_fsdp_collectives.py"
    text = collectives.read_text()
    if _GUARDED not in text:
        assert text.count(_COPY_OUT) == 1
        collectives.write_text(text.replace(_COPY_OUT, _GUARDED))


if __name__ == "__main__":
    main()
