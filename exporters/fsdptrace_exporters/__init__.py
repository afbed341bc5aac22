"""Exporters of fsdptrace recordings.

They turn the files of a finished or still growing recording into what a back end takes, outside the training process, and
never import torch; what one of them needs is imported when it is first used. Each is an entry point of the group
``fsdptrace.exporters``: a function as :class:`fsdptrace_exporters.sinks.Factory` describes it.
"""
