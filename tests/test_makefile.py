"""`make serve` installs the packages for CUDA where there is an NVIDIA GPU, and only there.

The real Makefile runs in a copy of the folder with a Python that records its arguments, and with or without an `nvidia-smi` in PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
has_device_nodes = any(Path("/dev").glob("nvidia[0-9]*"))

FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$RECORD"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/compile-and-serve"
fi
"""
NVIDIA_SMI = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n"
NVIDIA_SMI_WITHOUT_DRIVER = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not reach the driver.'; exit 9\n"

RunMake = Callable[..., tuple[str, list[str]]]


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def run_make(tmp_path: Path) -> RunMake:
    """→ what `make` printed, and the arguments of every Python that it ran. nvidia_smi: the text of that program, or None."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "cp", "grep", "mkdir", "rm", "test", "touch"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    write_program(programs / "python3", FAKE_PYTHON)

    def run(*arguments: str, nvidia_smi: str | None = None) -> tuple[str, list[str]]:
        (programs / "nvidia-smi").unlink(missing_ok=True)
        if nvidia_smi is not None:
            write_program(programs / "nvidia-smi", nvidia_smi)
        record = tmp_path / "record"
        record.write_text("")
        make = shutil.which("make")
        assert make is not None
        inherited = {name: value for name, value in os.environ.items() if name not in ("ARGS", "DEVICE", "MAKEFLAGS", "MAKELEVEL")}
        done = subprocess.run(
            [make, *arguments],
            cwd=tmp_path,
            env=inherited | {"PATH": str(programs), "RECORD": str(record)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, record.read_text().splitlines()

    return run


def pip_installs(calls: list[str]) -> list[str]:
    """What each call of pip was asked to install."""
    return [call.removeprefix("-m pip install --quiet ") for call in calls if call.startswith("-m pip install")]


def torch_version() -> str:
    [line] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    return line.removeprefix("torch==")


CPU_TORCH = f"torch=={torch_version()}"
CUDA_TORCH = f"{CPU_TORCH},!={torch_version()}+cpu"


@needs_make
def test_with_a_gpu_the_cuda_extra_and_no_cpu_build_of_torch(run_make: RunMake) -> None:
    printed, calls = run_make("serve", nvidia_smi=NVIDIA_SMI)
    assert pip_installs(calls) == [CUDA_TORCH, f"-c constraints.txt -e .[cuda] {CUDA_TORCH}"]
    assert "Installing for CUDA: an NVIDIA GPU was found" in printed
    assert calls[-1].startswith("serve smollm2-135m ")


@needs_make
@pytest.mark.skipif(has_device_nodes, reason="this machine has an NVIDIA GPU")
@pytest.mark.parametrize("nvidia_smi", [None, NVIDIA_SMI_WITHOUT_DRIVER], ids=["no nvidia-smi", "no driver"])
def test_without_a_gpu_the_cpu_build(run_make: RunMake, nvidia_smi: str | None) -> None:
    printed, calls = run_make("serve", nvidia_smi=nvidia_smi)
    assert pip_installs(calls) == [CPU_TORCH, f"-c constraints.txt -e . {CPU_TORCH}"]
    assert "Installing for the CPU: no NVIDIA GPU was found" in printed


@needs_make
def test_the_tests_need_the_same_packages(run_make: RunMake) -> None:
    _, calls = run_make("test", nvidia_smi=NVIDIA_SMI)
    of_serve, of_tests = pip_installs(calls)[1:]
    assert of_serve == f"-c constraints.txt -e .[cuda] {CUDA_TORCH}"
    assert of_tests == f"-c constraints.txt -e .[dev] {CUDA_TORCH}"


@needs_make
def test_the_second_start_installs_nothing(run_make: RunMake) -> None:
    run_make("serve", "DEVICE=cpu")
    printed, calls = run_make("serve", "DEVICE=cpu")
    assert calls == ["serve smollm2-135m --host 127.0.0.1 --port 8000"]
    assert "Installing" not in printed


@needs_make
def test_another_device_installs_again(run_make: RunMake) -> None:
    run_make("serve", "DEVICE=cpu")
    _, calls = run_make("serve", "DEVICE=cuda")
    assert pip_installs(calls) == [CUDA_TORCH, f"-c constraints.txt -e .[cuda] {CUDA_TORCH}"]
    _, calls = run_make("serve", "DEVICE=cpu")
    assert pip_installs(calls) == [CPU_TORCH, f"-c constraints.txt -e . {CPU_TORCH}"]
