"""Which kernels are handed to the compilers, with a compiler of the test's own in the place of Triton's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from compile_and_serve.custom_ops.jit import triton_launch as compile_ahead
from compile_and_serve.custom_ops.jit.sources import PACKAGE
from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead, launch
from compile_and_serve.runtime.runner.warm_up import compile_kernels


class Compiled:
    def __init__(self) -> None:
        self.run: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.run.append((grid, args))


class Kernel:
    """Stands for a Triton kernel: says how it was launched. compiles: as on a GPU; Triton's interpreter does not."""

    def __init__(self, fn: Any = None, *, compiles: bool = False) -> None:
        self.run: list[Any] = []
        self.warmed_up: list[Any] = []
        self.compiled: list[Compiled] = []
        self.fn = fn or (lambda x, number=0: None)
        self._compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Compiled | None:
            self.run.append((grid, args, options))
            if self._compiles:
                self.compiled.append(Compiled())
            return self.compiled[-1] if self._compiles else None

        return run

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.warmed_up.append((grid, args, options))


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_inside_kernels_do_not_run() -> None:
    kernel: Any = Kernel()
    x = torch.zeros(4)
    compile_ahead.compile_ahead(lambda: launch(kernel, (3,), x, SIZE=2), torch.device("cuda", 0), 2)
    assert kernel.warmed_up == [((3,), (x,), {"SIZE": 2})]
    assert not kernel.run
    for warps in (4, 8):
        launch(kernel, (4,), x, 5, num_warps=warps)
    assert kernel.run == [((4,), (x, 5), {"num_warps": 4}), ((4,), (x, 5), {"num_warps": 8})]


def some_kernel(
    x_ptr: Any, y_ptr: Any, number: int, scale: float, SIZE: tl.constexpr, WIDE: tl.constexpr = 3, PDL: tl.constexpr = False
) -> None: ...


def test_a_kernel_compiled_for_the_like_is_launched_without_a_search() -> None:
    kernel: Any = Kernel(some_kernel, compiles=True)
    x, y = torch.zeros(16), torch.ones(16)
    launch(kernel, (3,), x, None, 7, 0.5, PDL=True, SIZE=2, num_warps=4)
    launch(kernel, (5, 2), y, None, 9, 1.5, PDL=True, SIZE=2, num_warps=4)
    assert len(kernel.run) == 1
    assert kernel.compiled[0].run == [((5, 2, 1), (y, None, 9, 1.5, 2, 3, True))]
    for args, options in (
        ((y[1:], None, 7, 0.5), {}),  # not at a multiple of 16 bytes
        ((y.half(), None, 7, 0.5), {}),
        ((y, None, 32, 0.5), {}),
        ((y, None, 1, 0.5), {}),
        ((y, None, 1 << 31, 0.5), {}),
        ((y, y, 7, 0.5), {}),
        ((y, None, 7, 0.5), {"SIZE": 3}),
        ((y, None, 7, 0.5), {"num_warps": 8}),
    ):
        for _ in range(2):
            launch(kernel, (3,), *args, **({"PDL": True, "SIZE": 2, "num_warps": 4} | options))
    assert len(kernel.run) == len(kernel.compiled) == 9
    assert [len(compiled.run) for compiled in kernel.compiled] == [1] * 9


def test_a_launch_keeps_none_of_its_tensors() -> None:
    kernel: Any = Kernel(some_kernel, compiles=True)
    tensors = [torch.zeros(16) for _ in range(3)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors:
        launch(kernel, (3,), tensor, None, 7, 0.5, SIZE=2)
    kernel.run.clear()
    kernel.compiled[0].run.clear()
    tensors.clear()
    del tensor
    assert len(kernel.compiled) == 1
    assert [reference() for reference in gone] == [None] * 3
    for given in ({"y_ptr": torch.zeros(16), "number": 7, "scale": 0.5}, {"scale": 0.5}):
        with pytest.raises(AssertionError, match="passed by position"):
            launch(kernel, (3,), torch.zeros(16), *(None, 7)[: 3 - len(given)], **given, SIZE=2)


def test_arguments_of_one_kind_are_one_kernel_to_triton() -> None:
    """Triton's own words for an argument that a kernel is compiled for."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    from triton.backends.nvidia.compiler import CUDABackend

    memory = torch.zeros(256)
    values: list[Any] = [None, True, False, 0.0, 1.0, 2.5]
    values += [sign * n + d for sign in (1, -1) for n in (0, 1, 2, 16, 64, 1 << 31, 1 << 32, 1 << 62) for d in (-1, 0, 1)]
    values += [memory[i:].to(dtype) if i else memory[i:] for i in (0, 1, 4) for dtype in (torch.float32, torch.bfloat16)]
    values += [memory[i:] for i in range(6)]
    kernel: Any = Kernel(compiles=True)
    words: list[Any] = []  # Triton's for the arguments of each compiled kernel
    for value in values:
        said = libtriton.native_specialize_impl(CUDABackend, value, False, True, True)
        launches = [len(compiled.run) for compiled in kernel.compiled]
        launch(kernel, (1,), memory, value)
        if len(kernel.compiled) > len(words):
            words.append(said)
        else:
            [used] = [i for i, count in enumerate(launches) if len(kernel.compiled[i].run) > count]
            assert words[used] == said, value
    assert len(words) < len(values)


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
        compile_ahead.compile_ahead(lambda number=number: done.append(number), torch.device("cuda", 0), 2, known_as="a", sources=sources)
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


def test_compilers_build_what_launches_the_kernel_in_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        launchers = 0

        @property
        def run(self) -> None:
            Compiled.launchers += 1

    kernels: list[Any] = []

    @contextmanager
    def compile_mode(compilers: Any, **options: Any) -> Iterator[None]:
        """As Triton's: hands compilations to the executor."""
        kernels.extend(compilers.submit(Compiled) for _ in range(3))
        yield

    monkeypatch.setattr("triton.AsyncCompileMode", compile_mode)
    assert compile_ahead.compile_ahead(lambda: None, torch.device("cuda", 0), 2) == 3
    assert all(isinstance(kernel.result(), Compiled) for kernel in kernels)
    assert Compiled.launchers == 3


@pytest.mark.slow
def test_a_worker_needs_no_triton() -> None:
    """Where there is no GPU, it may be missing."""
    code = "import sys; sys.modules['triton'] = None; import compile_and_serve.runtime.runner.worker"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_cache_key_is_computed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache

    assert hasattr(cache.triton_key, "cache_info"), "Triton does not keep the key"
    threads: list[str] = []
    monkeypatch.setattr(cache, "triton_key", lambda: threads.append(threading.current_thread().name))
    compile_ahead.prepare_cache_key().join()
    assert threads == ["triton-key"]


def test_what_was_compiled_ahead_needs_no_runner(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    made = []

    def make_runner() -> Any:
        made.append(1)
        raise LookupError

    def compile_for(known_as: str | None) -> int:
        return compile_kernels(make_runner, torch.float32, device, threads=1, known_as=known_as)

    marker = compile_ahead._marker("a model", device, PACKAGE / "runtime")
    marker.parent.mkdir()
    marker.touch()
    assert compile_for("a model") == 0
    assert not made
    for other in ("another model", None):
        with pytest.raises(LookupError):
            compile_for(other)
