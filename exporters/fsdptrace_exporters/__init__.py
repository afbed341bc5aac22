"""Exporters of fsdptrace recordings.

Each module here turns the files of a finished or still growing recording into what one back end takes. They
run outside the training process and import neither torch nor each other; what one of them needs is imported
when it is first used.
"""
