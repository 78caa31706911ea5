"""Which kernels are handed to the compilers, with a compiler of the test's own in the place of Triton's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from custom_ops import compile_ahead
from custom_ops.compile_ahead import is_compiling_ahead, launch


class Kernel:
    """Stands for a Triton kernel: says how it was launched."""

    def __init__(self) -> None:
        self.run: list[Any] = []
        self.warmed_up: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.run.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.warmed_up.append((grid, args, options))


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_inside_kernels_do_not_run() -> None:
    kernel: Any = Kernel()
    compile_ahead.compile_ahead(lambda: launch(kernel, (3,), 1, SIZE=2), torch.device("cuda", 0), 2)
    assert kernel.warmed_up == [((3,), (1,), {"SIZE": 2})]
    assert not kernel.run
    launch(kernel, (4,), 5)
    assert kernel.run == [((4,), (5,), {})]


def test_what_was_compiled_before_is_not_compiled_again_while_the_cache_is_there(tmp_path: Path) -> None:
    done: list[str] = []

    def ahead(known_as: str | None) -> None:
        compile_ahead.compile_ahead(lambda: done.append(known_as or ""), torch.device("cuda", 0), 2, known_as=known_as)

    for known_as in ("a", "a", "b", None, None):
        ahead(known_as)
    assert done == ["a", "b", "", ""]
    shutil.rmtree(tmp_path / "cache")
    ahead("a")
    assert done[-1] == "a"


def test_other_sources_may_launch_other_kernels(tmp_path: Path) -> None:
    done: list[int] = []
    sources = tmp_path / "sources"
    sources.mkdir()
    for number, text in enumerate(("a = 1", "a = 1", "a = 2")):
        (sources / "step.py").write_text(text)
        compile_ahead.compile_ahead(
            lambda number=number: done.append(number), torch.device("cuda", 0), 2, known_as="a", sources=sources
        )
    assert done == [0, 2]


def test_work_that_fails_leaves_launches_as_they_were() -> None:
    def work() -> None:
        assert is_compiling_ahead()
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        compile_ahead.compile_ahead(work, torch.device("cuda", 0), 2, known_as="work")
    with pytest.raises(RuntimeError, match="no memory"):  # it was not done
        compile_ahead.compile_ahead(work, torch.device("cuda", 0), 2, known_as="work")
    assert not is_compiling_ahead()


def test_compilers_build_what_launches_the_kernel_in_their_threads() -> None:
    class Compiled:
        launchers = 0

        @property
        def run(self) -> None:
            Compiled.launchers += 1

    with compile_ahead._Compilers(2, torch.device("cuda", 0)) as compilers:
        kernels = [compilers.submit(Compiled) for _ in range(3)]
    assert all(isinstance(kernel.result(), Compiled) for kernel in kernels)
    assert Compiled.launchers == compilers.count == 3


def test_a_worker_needs_no_triton() -> None:
    """Where there is no GPU, it may be missing."""
    code = "import sys; sys.modules['triton'] = None; import runtime.worker"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
