"""Reading traces: finished or cut off, of one rank or many. Needs neither torch nor numpy."""

from fsdptrace.analysis.check import CheckResult, check, known_as, read_baseline
from fsdptrace.analysis.findings import Finding, Seen
from fsdptrace.analysis.lines import read_process
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.rows import UnitRow, by_pattern
from fsdptrace.analysis.run import ModelReport, Run, load
from fsdptrace.analysis.sources import Problem, RunSources, Source, choose, find_runs
from fsdptrace.analysis.steplines import StepLine, StepLines
from fsdptrace.files import NotATrace

__all__ = [
    "CheckResult",
    "Finding",
    "ModelReport",
    "NotATrace",
    "Problem",
    "ProcessTrace",
    "Run",
    "RunSources",
    "Seen",
    "Source",
    "StepLine",
    "StepLines",
    "StepPart",
    "UnitRow",
    "by_pattern",
    "check",
    "choose",
    "find_runs",
    "known_as",
    "load",
    "read_baseline",
    "read_process",
]  # fmt: skip
