"""A run as one Perfetto trace of all ranks: ``fsdptrace merge`` and ``fsdptrace view``.

``tracks`` says what is shown, ``protobuf`` and ``chrome`` write it, ``profile`` reads what torch.profiler wrote.
"""

from fsdptrace_exporters.perfetto.merge import Merged, Missing, merge

__all__ = ["Merged", "Missing", "merge"]
