"""Options: keywords, environment, and what is said about values that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction

import fsdptrace
from fsdptrace.options import Options, parse_bytes, resolve, safe_name
from fsdptrace.session import Session


def test_defaults() -> None:
    options = resolve()
    assert options == Options()
    assert (options.out, options.on_violation, options.detail, options.flush) == (None, "warn", "auto", "none")
    assert options.max_bytes == 1024**3
    assert options.enabled


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OUT": "/data/traces", "CHECKS": "gather-after-backward",
        "ON_VIOLATION": "*=record,gather-after-backward=raise", "RAISE_UNTIL_STEP": "20", "BUDGET_BYTES": "1.5GB",
        "DETAIL": "full", "FLUSH": "collective", "MAX_BYTES": "64MiB", "RUN_ID": "run-7", "ROLE": "actor",
        "SCHEDULE": "wait=1,active=2,repeat=1", "LIVE": "yes",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"FSDPTRACE_{name}", value)
    options = resolve()
    assert options.out == "/data/traces"
    assert options.checks == ("gather-after-backward",)
    assert options.on_violation == {"*": "record", "gather-after-backward": "raise"}
    assert (options.raise_until_step, options.budget_bytes, options.max_bytes) == (20, 1_500_000_000, 64 * 1024**2)
    assert (options.detail, options.flush, options.run_id, options.role) == ("full", "collective", "run-7", "actor")
    assert options.live
    assert options.schedule is not None
    # One step of waiting, two of recording (of which the last one ends a cycle), then nothing.
    assert [options.schedule(step) for step in range(5)] == [
        ProfilerAction.NONE, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE, ProfilerAction.NONE, ProfilerAction.NONE,
    ]  # fmt: skip
    # A keyword beats the environment.
    assert resolve(detail="summary", out=Path("/elsewhere")).detail == "summary"
    assert resolve(out=Path("/elsewhere")).out == "/elsewhere"
    # Empty is not set.
    monkeypatch.setenv("FSDPTRACE_DETAIL", " ")
    assert resolve().detail == "auto"


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_kill_switch(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FSDPTRACE", value)
    assert not resolve(out="x").enabled


def test_no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTRACE_CHECKS", "none")
    assert resolve().checks is False
    assert resolve(checks=True).checks is True
    assert resolve(checks="gather-after-backward").checks == ("gather-after-backward",)
    assert resolve(checks=["-gather-after-backward"]).checks == ("-gather-after-backward",)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"detail": "everything"}, "detail: 'everything' is none of auto, full, summary"),
        ({"flush": "always"}, "flush: 'always' is none of none, collective"),
        ({"on_violation": "explode"}, "on_violation: 'explode' is none of raise, warn, record"),
        (
            {"on_violation": {"no-such-rule": "raise"}},
            "on_violation: no rule named 'no-such-rule'; there are gather-after-backward",
        ),
        ({"on_violation": {"*": 3}}, "on_violation: 3 is none of raise, warn, record"),
        ({"checks": "no-such-rule"}, "checks: no rule named 'no-such-rule'; there are gather-after-backward"),
        ({"checks": ["-no-such-rule"]}, "checks: no rule named 'no-such-rule'"),
        ({"rule_options": {"no-such-rule": {}}}, "rule_options: no rule named 'no-such-rule'"),
        ({"max_bytes": 1000}, "max_bytes: 1000 is less than 64 KiB"),
        ({"max_bytes": 1.5}, "max_bytes: 1.5 is not a whole number"),
        ({"budget_bytes": -1}, "budget_bytes: -1 is not a whole number"),
        ({"raise_until_step": "20"}, "raise_until_step: '20' is not a whole number"),
        ({"schedule": 3}, "schedule: not a function of a step number"),
        ({"exporters": ["no-such", "other"]}, "exporters: no exporter named 'no-such', 'other'"),
        ({"run_id": "a/b"}, "run_id: 'a/b' cannot be part of a path"),
        ({"role": ".."}, "role: '..' cannot be part of a path"),
    ],
)
def test_bad_keyword(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        fsdptrace.record(torch.nn.Linear(1, 1), **given)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("LIVE", "2", "FSDPTRACE_LIVE='2': neither 1 nor 0"),
        ("MAX_BYTES", "lots", "FSDPTRACE_MAX_BYTES='lots': not a number of bytes such as 1073741824 or 64MiB"),
        ("RAISE_UNTIL_STEP", "x", "FSDPTRACE_RAISE_UNTIL_STEP='x': "),
        ("SCHEDULE", "every=3", "FSDPTRACE_SCHEDULE='every=3': use wait=2,warmup=1,active=3,repeat=0,skip_first=10"),
        ("EXPORT", "no-such, other", "exporters: no exporter named 'no-such', 'other'"),
        ("DETAIL", "some", "detail: 'some' is none of auto, full, summary"),
    ],
)
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str) -> None:
    monkeypatch.setenv(f"FSDPTRACE_{name}", value)
    with pytest.raises(ValueError) as caught:
        resolve()
    assert str(caught.value).startswith(says)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match=r"record\(\) has no option 'outdir'; there are budget_bytes, .*checks, .*\bout\b"):
        fsdptrace.record(torch.nn.Linear(1, 1), outdir="x")


def test_slips_of_the_finger_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("fsdptrace.options._told", set())
    monkeypatch.setenv("FSDPTRACE_DETIAL", "full")
    monkeypatch.setenv("FSDPTRACE_OUT", "here")
    monkeypatch.setenv("FSDPTRACE_TALLY", "/tmp/x")
    for _ in range(2):
        resolve(rule_options={"unsharded-budget": {"budget": 5}, "wrong-root": {"x": 1}})
    assert [record.getMessage() for record in caplog.records] == [
        "FSDPTRACE_DETIAL is no option of fsdptrace and changes nothing; did you mean FSDPTRACE_DETAIL?",
        "rule_options: unsharded-budget has no option 'budget', so it changes nothing; there is budget_bytes, allocated_bytes",
        "rule_options: wrong-root has no option 'x', so it changes nothing; it has none",
    ]
    monkeypatch.setattr("fsdptrace.options._told", set())
    monkeypatch.setenv("RANK", "3")
    resolve()
    assert len(caplog.records) == 3  # rank 0 of a job says it


def test_sizes() -> None:
    assert parse_bytes("1073741824") == 1024**3
    assert parse_bytes("64MiB") == parse_bytes("64 mib") == 64 * 1024**2
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("2k") == 2000
    for bad in ("", "GiB", "-1", "1 parsec", "1e9"):
        with pytest.raises(ValueError):
            parse_bytes(bad)


def test_safe_name() -> None:
    assert safe_name("job-7_a.b") == "job-7_a.b"
    assert safe_name("../../etc/passwd") == "_.._etc_passwd"
    assert safe_name(".hidden") == "hidden"
    assert safe_name("...") == "_"
    assert safe_name("ü/é") == "___"
    assert len(safe_name("x" * 1000)) == 128


# -- the run's name ----------------------------------------------------------------------------------------------------
def run_id(**options: Any) -> tuple[str, str]:
    session = Session(resolve(**options))
    try:
        return session._find_run_id()
    finally:
        session.close()


def test_run_id_order(monkeypatch: pytest.MonkeyPatch) -> None:
    name, source = run_id()
    assert source == "local"
    assert name != run_id()[0]
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert run_id() == ("123", "slurm")
    monkeypatch.setenv("SLURM_STEP_ID", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    assert run_id() == ("123-4-5", "slurm")
    # torchrun's own default is the word none.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_id() == ("123-4-5", "slurm")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7")
    assert run_id() == ("job_7", "torchelastic")
    monkeypatch.setenv("FSDPTRACE_RUN_ID", "mine")
    assert run_id() == ("mine", "option")
    assert run_id(run_id="given") == ("given", "option")


def test_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    session = Session(resolve())
    assert session.identity.attempt == 2
    session.close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    session = Session(resolve())
    assert session.identity.attempt == 1
    session.close()


def test_what_only_exporters_read_is_no_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdptrace.options import unknown_variables

    assert unknown_variables({"FSDPTRACE_METRIC_MODULES": "1", "FSDPTRACE_DETAIL_RANKS": "0", "FSDPTRACE_DEBUG": "1"}) == []


@pytest.mark.parametrize(("given", "ranks"), [(3, (3,)), ([0, 8], (0, 8)), (range(2), (0, 1)), ("all", "all")])
def test_detail_ranks(given: object, ranks: object) -> None:
    from fsdptrace.options import resolve

    assert resolve(detail_ranks=given).detail_ranks == ranks


@pytest.mark.parametrize("given", [(-1,), ("x",), (1.5,)])
def test_bad_detail_ranks(given: object) -> None:
    from fsdptrace.options import resolve

    with pytest.raises(ValueError, match="is neither 'all' nor some ranks"):
        resolve(detail_ranks=given)


def test_detail_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdptrace.options import resolve

    monkeypatch.setenv("FSDPTRACE_DETAIL_RANKS", "0,8")
    assert resolve().detail_ranks == (0, 8)
    monkeypatch.setenv("FSDPTRACE_DETAIL_RANKS", "none")
    assert resolve().detail_ranks == ()
    monkeypatch.setenv("FSDPTRACE_DETAIL_RANKS", "few")
    with pytest.raises(ValueError, match="FSDPTRACE_DETAIL_RANKS='few'"):
        resolve()
