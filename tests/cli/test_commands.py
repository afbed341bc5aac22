"""The command: exit statuses, one clear line for bad input, text that is safe and fits."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsdptrace.checks.registry import RULES
from fsdptrace.cli.app import app
from support.made import Made, run

COMMAND = [sys.executable, "-c", "from fsdptrace.cli import main; main()"]


def call(*arguments: Any, **env: str) -> Any:
    """The command in this process."""
    return CliRunner(env={"COLUMNS": "", **env}).invoke(app, [str(argument) for argument in arguments])


def spawn(*arguments: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it."""
    environment = {**os.environ, "COLUMNS": "", **env}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=60, check=False
    )  # fmt: skip


def faulty(folder: Path, rule: str = "gather-after-backward", severity: str = "error", **data: Any) -> None:
    """A run with one violation of a rule that no longer exists here unless ``rule`` says so, in a step of one line."""
    made = Made(0, 1)
    made.violation(rule, data.pop("fqn", "layers.0"), severity=severity, **data)
    made.counts["unshard"] = 3
    made.end_step()
    made.end()
    made.write(folder)


# -- report ------------------------------------------------------------------------------------------------------------
def test_report_of_a_healthy_run_says_what_that_is_based_on(tmp_path: Path) -> None:
    run(tmp_path, ranks=2, steps=2)
    result = call("report", tmp_path)
    assert result.exit_code == 0
    assert "nothing found" in result.output
    assert "that saw all 72 events of 2 steps that ended, on 2 of 2 ranks: gather-after-backward" in result.output
    rows = [line.split("  ") for line in result.output.splitlines() if line.startswith("layers.")]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["layers.0", "1", "1", "0", "0", "0", "1,000 B", "1", "90 ns", "20 ns", "30 ns"],
        ["layers.1", "1", "0", "0", "0", "0", "3,000 B", "1", "70 ns", "10 ns", "10 ns"],
    ]
    assert "peak  4,000 B (rank 0, step 0, event 11)" in result.output
    assert "held by layers.1 3,000 B, layers.0 1,000 B" in result.output


def test_report_has_communication_prefetches_ranks_and_its_own_cost(tmp_path: Path) -> None:
    run(tmp_path, ranks=2, steps=2)
    output = call("report", tmp_path).output
    assert "communication, per step and rank: 4,500 B received; 6,000 B by the closed form of this wrap" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["all-gather", "dim", "0", "(2)", "float32", "3", "4", "2,500", "B", "4,000", "B"] in rows
    assert ["reduce-scatter", "dim", "0", "(2)", "float32", "2", "2", "2,000", "B", "2,000", "B"] in rows
    assert "less, since they were open already: all-gather of layers.1 1x instead of 2x (-1,500 B)" in output
    assert ["backward", "implicit", "1", "1", "1", "0", "30", "ns"] in rows
    assert "a step takes 178 ns on all ranks alike" in output
    assert "(10 collectives of 2 steps compared)" in output
    assert "18 events a step, 72 events written" in output
    assert output.index("nothing found") < output.index("units of Net") < output.index("communication, per")
    assert output.index("communication, per") < output.index("prefetches, per") < output.index("ranks (host times)")


def test_of_many_ranks_those_that_come_last_are_shown(tmp_path: Path) -> None:
    for rank in range(20):
        made = Made(rank, 20)
        made.seq = rank if rank in (3, 7) else 0  # 10 ns an event later
        made.step()
        made.end()
        made.write(tmp_path)
    lines = call("report", tmp_path).output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    rows = {line.split()[0]: line.split() for line in lines[at + 1 : at + 9]}
    assert "(8 of 20 ranks, those that came last most often; --all shows each)" in lines[at + 9]
    assert rows["7"][-3:] == ["5", "70", "ns"]
    assert rows["3"][-3:] == ["0", "30", "ns"]
    assert "  - all-gather of layers.1 (and 1 more of layers.*): the last rank 70 ns behind" not in lines
    assert any("of layers.0 (and 1 more of layers.*): the last rank 70 ns behind the first" in line for line in lines)
    assert sum(line.lstrip()[:2].strip().isdigit() for line in call("report", tmp_path, "--all").output.splitlines()) >= 20


def test_a_bar_only_for_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fsdptrace.cli import progress

    with progress.bar() as nobody:
        assert nobody is None  # standard error is no terminal here
    shown = progress.Bar("reading")
    shown(1, 4)
    assert shown._bar is None
    monkeypatch.setattr(progress, "AFTER", 0.0)
    shown(2, 4)
    assert shown._bar is not None
    assert (shown._bar.tasks[0].completed, shown._bar.tasks[0].total) == (2, 4)
    shown.close()


def test_report_shows_findings_first_and_in_full(tmp_path: Path) -> None:
    faulty(tmp_path, bytes=32768, message="The prefetch of a gathered b.", hint="Call c.")
    lines = call("report", tmp_path).output.splitlines()
    at = lines.index("ERROR gather-after-backward  layers.*")
    assert lines[at + 1] == "  once, 1 unit, rank 0, step 0, 32 KiB"
    assert lines[at + 3] == "    The prefetch of a gathered b."
    assert lines[at + 5] == "    Call c."
    assert at < next(i for i, line in enumerate(lines) if line.startswith("units of Net"))


def test_report_tells_coverage_and_completeness(tmp_path: Path) -> None:
    made = Made(0, 2, coverage=["recompute: not visible, compiled around the checkpoint"])
    made.step()
    made.write(tmp_path)
    output = call("report", tmp_path).output
    assert "not visible in this run\n  - recompute: not visible, compiled around the checkpoint" in output
    assert "rank 0 (node-100): no end line" in output
    assert "no file of rank 1 (1 of 2 ranks are here)" in output


def test_report_without_rules_does_not_say_healthy(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, options={"checks": False})
    output = call("report", tmp_path).output
    assert "nothing was looked for" in output
    assert "nothing found" not in output


def test_many_units_are_grouped_unless_all_are_asked_for(tmp_path: Path) -> None:
    made = Made(0, 1, names={f"layers.{i}": 100 for i in range(40)})
    for i in range(40):
        made.unshard(i, 100, "forward")
    made.end_step(4000)
    made.end()
    made.write(tmp_path)
    grouped = call("report", tmp_path).output
    assert "layers.*  x40" in grouped
    assert "layers.17 " not in grouped.split("memory")[0]
    assert "layers.17 " in call("report", tmp_path, "--all").output.split("memory")[0]


def test_report_json_and_steps(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, steps=40)
    data = json.loads(call("report", tmp_path, "--json", "--steps").output)
    assert data["run"] == "run"
    assert len(data["steps"]) == 40
    assert "steps" not in json.loads(call("report", tmp_path, "--json").output)
    output = call("report", tmp_path, "--steps").output
    assert "(20 of 40 rows; --all shows each)" in output
    assert call("report", tmp_path, "--steps", "--all").output.count("  full\n") == 40


def test_names_from_files_cannot_do_anything(tmp_path: Path) -> None:
    evil = "[bold red]layers\x1b[2J\x9b31m\u202e." + "x" * 5000
    made = Made(
        0, 1, run_id="run", names={evil: 1000, "[/]": 3000}, coverage=["[link=x]\x07"], versions={"torch": "\x1b]0;x\x07"}
    )
    made.unshard(0, 1000, "forward")
    made.violation("[bold]rule\x1b[0m", evil, group=0, message=f"{evil}\nsecond line\r", hint="[/nope]", severity="wor\x1bse")
    made.end_step(1000)
    made.end()
    made.write(tmp_path)
    for arguments in (["report"], ["report", "--steps"], ["check"]):
        result = call(arguments[0], tmp_path, *arguments[1:])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "[bold red]layers" in result.output  # markup is shown, not obeyed
        assert not set(result.output) & {"\x1b", "\x9b", "\x07", "\r", "\u202e"}
        assert max(map(len, result.output.splitlines())) < 4200
        assert result.output.isprintable() or all(line.isprintable() for line in result.output.splitlines())
    assert "\x1b" not in call("report", tmp_path, "--json").output


@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_narrow_screens(tmp_path: Path, columns: int) -> None:
    run(tmp_path)
    faulty(tmp_path / "other")
    output = call("report", tmp_path, "--run", "run", COLUMNS=str(columns)).output
    table = [line for line in output.splitlines() if line.startswith(("layers.", "unit "))]
    assert len(table) == 3
    assert all(len(line) <= max(columns, 45) for line in table)
    prose = [line for line in output.splitlines() if line[:1].islower() and "  " not in line.strip() and " " in line]
    assert "rank that holds most" in " ".join(prose)
    assert all(len(line) <= max(columns, 30) for line in prose)  # headings wrap, too
    if columns < 80:
        assert "no room for: " in " ".join(output.split())


def test_piped_output_has_no_colour_and_does_not_wrap(tmp_path: Path) -> None:
    faulty(tmp_path, message="word " * 60)
    done = spawn("report", tmp_path, NO_COLOR="1")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert any(len(line) > 290 for line in done.stdout.splitlines())
    assert done.stderr == ""


def test_a_terminal_that_speaks_ascii_only(tmp_path: Path) -> None:
    faulty(tmp_path, message="größer \u2713", fqn="sch\u00f6n")
    done = spawn("report", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0
    assert "gr\\xf6" in done.stdout


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_closed_pipe_is_no_error(tmp_path: Path, healthy: bool, how: list[str]) -> None:
    """`fsdptrace check DIR | head`: what nobody reads is not printed, and the status is that of the verdict."""
    if healthy:
        run(tmp_path, ranks=1)
    else:
        faulty(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "check", str(tmp_path), *how]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0 if healthy else 1, "")


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_output_that_cannot_be_written_is_said_and_closed_output_is_nothing(tmp_path: Path, how: list[str]) -> None:
    run(tmp_path, ranks=1)
    command = [*COMMAND, "check", str(tmp_path), *how]
    for redirected, said, status in ((">/dev/full", "fsdptrace: output: No space left on device\n", 2), (">&-", "", 0)):
        line = f"{shlex.join(command)} {redirected}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert (done.stderr, done.returncode) == (said, status)


# -- exit statuses -----------------------------------------------------------------------------------------------------
def test_check_exit_statuses(tmp_path: Path) -> None:
    run(tmp_path / "fine")
    assert call("check", tmp_path / "fine").exit_code == 0
    faulty(tmp_path / "error")
    result = call("check", tmp_path / "error")
    assert result.exit_code == 1
    assert "failed: 1 finding of severity error" in result.output
    assert "found while recording, repeated" in result.output
    faulty(tmp_path / "warning", "unused-gather", "warning")
    assert call("check", tmp_path / "warning").exit_code == 0
    assert call("check", tmp_path / "error", "--ignore", "gather-after-backward").exit_code == 0
    assert call("check", tmp_path / "error", "--select", "unused-gather,wrong-root").exit_code == 0
    data = call("check", tmp_path / "error", "--json")
    assert data.exit_code == 1
    assert json.loads(data.stdout)["failed"] is True


def test_check_of_an_incomplete_run(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, world=2)
    result = call("check", tmp_path)
    assert result.exit_code == 2
    assert "incomplete: nothing found in what there is, which is not all" in result.output
    assert "no file of rank 1" in result.output
    assert call("check", tmp_path, "--allow-incomplete").exit_code == 0
    assert json.loads(call("check", tmp_path, "--json").stdout)["verdict"] == "incomplete"


def test_check_with_a_baseline(tmp_path: Path) -> None:
    faulty(tmp_path / "run")
    known = tmp_path / "known.json"
    known.write_text(call("check", tmp_path / "run", "--json").stdout)
    result = call("check", tmp_path / "run", "--baseline", known)
    assert result.exit_code == 0
    assert "known from the baseline: gather-after-backward layers.*" in result.output
    assert "passed: nothing new found" in result.output
    assert call("check", tmp_path / "run", "--baseline", tmp_path / "nowhere").exit_code == 2


def test_without_a_folder_it_is_where_recordings_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "fsdptrace-out: no such file or folder" in call("report").stderr
    run(tmp_path / "fsdptrace-out", run_id="here")
    run(tmp_path / "elsewhere", run_id="there")
    assert "run here: " in call("report").output
    assert "run there: " in call("report", FSDPTRACE_OUT=str(tmp_path / "elsewhere")).output
    assert call("check").exit_code == 0


def test_a_first_step_of_one_line_has_no_time(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.one_line_step()
    made.one_line_step()
    made.end()
    made.write(tmp_path)
    lines = call("report", tmp_path, "--steps").output.splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit() and line.endswith("one line")]
    assert [row[2:4] for row in rows] == [["-", "4"], ["180", "ns"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "nowhere"], "nowhere: no such file or folder"),
        (["check", "nowhere"], "nowhere: no such file or folder"),
        (["report", "."], "no .jsonl files in it; give the folder that `out` named"),
        (["report", "run.txt"], "not a file of fsdptrace"),
        (["rules", "nope"], "no rule named 'nope'; there are gather-after-backward"),
    ],
)
def test_unusable_input_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.txt").write_text("hello\n")
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("fsdptrace: ")
    assert result.stdout == ""


def test_unusable_arguments_are_status_2(tmp_path: Path) -> None:
    run(tmp_path)
    assert call("report", tmp_path, "--nope").exit_code == 2
    assert call("nope").exit_code == 2
    assert call("demo", "--steps", "0").exit_code == 2
    assert call("check", tmp_path, "--select", "nope").exit_code == 2
    assert call("report", tmp_path, "--run", "other").exit_code == 2


def test_help_and_version() -> None:
    assert call().exit_code == 0
    assert call("--version").output.startswith("fsdptrace ")
    for name in ("report", "check", "rules", "doctor", "demo"):
        assert name in call("--help").output
        assert call(name, "--help").exit_code == 0


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from fsdptrace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'fsdptrace[cli]'")
    assert done.stderr.count("\n") == 1


# -- rules and doctor --------------------------------------------------------------------------------------------------
def test_rules() -> None:
    listed = call("rules")
    assert listed.exit_code == 0
    assert all(name in listed.output for name in RULES)
    one = call("rules", "gather-after-backward").output
    assert "set_modules_to_backward_prefetch" in one
    assert "stays silent on" in one
    data = json.loads(call("rules", "--json").output)
    assert [item["name"] for item in data] == list(RULES)
    assert all(item[key] for item in data for key in ("summary", "explanation", "example", "mend", "silent", "cost"))
    assert call("rules", COLUMNS="60").exit_code == 0


def test_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    well = call("doctor")
    assert well.exit_code == 0
    assert "recording works here" in well.output
    assert not list(tmp_path.iterdir())
    data = json.loads(call("doctor", "--json").output)
    assert data["problems"] == []
    assert data["missing"] == []
    assert "FSDPParamGroup.unshard" in data["found"]
    off = call("doctor", FSDPTRACE="0")
    assert off.exit_code == 1
    assert "FSDPTRACE=0 is set" in off.output
    wrong = call("doctor", FSDPTRACE_DETAIL="everything")
    assert wrong.exit_code == 1
    assert "an option in the environment cannot be used" in wrong.output


def test_doctor_says_what_a_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    monkeypatch.delattr(FSDPParamGroup, "finalize_backward")
    result = call("doctor")
    assert result.exit_code == 1
    assert "lacks FSDPParamGroup.finalize_backward" in result.output
