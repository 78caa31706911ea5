"""The package's import name: it works beside a user's own folders, and the wheel installs nothing else."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import compile_and_serve

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "compile_and_serve"

SCRIPT = """
import models.mine, runtime.mine, serve.mine
from compile_and_serve import LLM, SamplingParams

assert models.mine.NAME == "models" and runtime.mine.NAME == "runtime" and serve.mine.NAME == "serve"
assert LLM.__module__.startswith("compile_and_serve.") and SamplingParams.__module__.startswith("compile_and_serve.")
print(SamplingParams(max_tokens=3).max_tokens)
"""


@pytest.mark.parametrize("is_package", [True, False], ids=["packages", "namespace packages"])
def test_import_beside_folders_of_the_same_names(tmp_path: Path, is_package: bool) -> None:
    """The script's own `models`, `runtime` and `serve` are imported, and ours do not disturb them."""
    for name in ("models", "runtime", "serve"):
        folder = tmp_path / name
        folder.mkdir()
        if is_package:
            (folder / "__init__.py").touch()
        (folder / "mine.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    # A folder with only the package, as in site-packages: the checkout's root also holds links named `models`, `runtime` …
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "compile_and_serve").symlink_to(PACKAGE)
    path = str(ROOT if is_package else installed)
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(tmp_path / "script.py")]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr


def test_versions_agree() -> None:
    command = [sys.executable, "-m", "compile_and_serve.serve.cli", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert printed == compile_and_serve.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", printed)


@pytest.mark.slow
def test_the_wheel_installs_one_import_name_with_its_data_files(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because setuptools writes `build` and `*.egg-info` beside the sources
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "compile_and_serve", ignore=shutil.ignore_patterns("__pycache__"))
    for link in (path for path in ROOT.iterdir() if path.is_symlink()):
        (source / link.name).symlink_to(link.readlink())
    # Without isolation nothing is downloaded. With it, pip fetches setuptools only: --no-deps leaves out torch.
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *isolation, "-w", str(tmp_path), str(source)]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    top_level = {name.partition("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"compile_and_serve"}
    expected = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert expected <= names, sorted(expected - names)
    suffixes = {Path(name).suffix for name in names}
    assert {".cpp", ".h", ".cu", ".html", ".js", ".css"} <= suffixes
    assert "compile_and_serve/py.typed" in names
