"""The compiler that tests give to Inductor compiles equal commands once and any other again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import COMPILE_ONCE

FLAGS = ("-D", "TORCH_INDUCTOR_CPP_WRAPPER", "-O3")
# Counts its runs and "compiles" to the source's first line. Fails on a source that contains `error`.
COMPILER = """#!/bin/bash
echo run >> "$RUNS"
while (($#)); do case $1 in -o) shift; output=$1 ;; *.cpp) source=$1 ;; esac; shift; done
grep -q error "$source" && exit 3
head -n 1 "$source" > "$output"
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


class Compiler:
    """Runs COMPILE_ONCE over a compiler that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "kept").mkdir()
        (folder / "bin" / "g++").write_text(COMPILER)
        (folder / "bin" / "g++").chmod(0o755)

    def run(self, name: str, text: str, *flags: str, kept: bool = True) -> int:
        """Compile `text` as a source in a folder of its own; the exit status. The result is `output(name)`."""
        (self.folder / name).mkdir(exist_ok=True)
        source = self.folder / name / f"{name}.cpp"
        source.write_text(text)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "RUNS": str(self.folder / "runs")}
        if kept:
            environment["COMPILED_ONCE"] = str(self.folder / "kept")
        command = [str(COMPILE_ONCE), str(source), *flags, "-o", str(self.folder / name / "out.so")]
        return subprocess.run(command, env=environment, check=False).returncode

    def output(self, name: str) -> str:
        return (self.folder / name / "out.so").read_text()

    @property
    def num_runs(self) -> int:
        return len((self.folder / "runs").read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_equal_sources_in_other_folders_are_compiled_once(compiler: Compiler) -> None:
    assert [compiler.run(name, "one\n", *FLAGS) for name in ("a", "b")] == [0, 0]
    assert compiler.output("a") == compiler.output("b") == "one\n"
    assert compiler.num_runs == 1


def test_another_source_or_flag_is_compiled_anew(compiler: Compiler) -> None:
    compiler.run("a", "one\n", *FLAGS)
    compiler.run("b", "two\n", *FLAGS)
    compiler.run("c", "one\n", *FLAGS, "-mavx2")
    assert [compiler.output(name) for name in "abc"] == ["one\n", "two\n", "one\n"]
    assert compiler.num_runs == 3


def test_what_is_not_inductors_or_not_to_be_kept_is_compiled_each_time(compiler: Compiler) -> None:
    for name in "ab":
        compiler.run(name, "one\n", "-O3")
        compiler.run(name, "one\n", *FLAGS, kept=False)
    assert compiler.num_runs == 4
    assert list((compiler.folder / "kept").iterdir()) == []


def test_a_failure_is_passed_on_and_not_kept(compiler: Compiler) -> None:
    assert [compiler.run(name, "error\n", *FLAGS) for name in ("a", "b")] == [3, 3]
    assert compiler.num_runs == 2
    assert list((compiler.folder / "kept").iterdir()) == []
