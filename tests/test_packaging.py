"""The wheel and the installed package: both import packages, from any folder, without torch."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
IMPORT_BOTH = """
import sys
import fsdptrace, fsdptrace_exporters
print(fsdptrace.__file__)
print(fsdptrace_exporters.__file__)
print("torch" in sys.modules)
"""


def run(command: list[str], cwd: Path, pythonpath: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("fsdptrace", "fsdptrace_exporters"):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    assert [name for name in names if name.endswith("/LICENSE") and ".dist-info/" in name]
    # Nothing else at the top: no tests, examples or benchmarks in other people's site-packages.
    tops = {name.split("/")[0] for name in names if "/" in name and ".dist-info/" not in name}
    assert tops == {"fsdptrace", "fsdptrace_exporters"}


def test_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for parent, package in ((ROOT, "fsdptrace"), (ROOT / "exporters", "fsdptrace_exporters")):
        for path in (parent / package).rglob("*.py"):
            assert path.relative_to(parent).as_posix() in names
    for path in (ROOT / "fsdptrace" / "html" / "static").iterdir():
        assert path.relative_to(ROOT).as_posix() in names


def test_wheel_imports_from_elsewhere_without_torch(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], elsewhere)
    core, exporters, torch = run([sys.executable, "-c", IMPORT_BOTH], elsewhere, pythonpath=target).split()
    assert Path(core) == target / "fsdptrace" / "__init__.py"
    assert Path(exporters) == target / "fsdptrace_exporters" / "__init__.py"
    assert torch == "False"


def test_this_install_imports_from_elsewhere_without_torch(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("fsdptrace")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fsdptrace is not installed in this environment")
    assert run([sys.executable, "-c", IMPORT_BOTH], tmp_path).split()[2] == "False"
