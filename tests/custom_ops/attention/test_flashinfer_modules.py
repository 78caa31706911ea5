"""Built modules of FlashInfer: copied, loaded, and what is said when that fails; without FlashInfer and a GPU."""

from __future__ import annotations

import logging
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_and_serve.custom_ops.attention import flashinfer_modules
from compile_and_serve.custom_ops.attention.flashinfer_modules import FlashInferModules, flashinfer_unavailable_reason


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlashInferModules:
    monkeypatch.setattr(flashinfer_modules, "version", lambda _: "1.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return FlashInferModules(torch.bfloat16, 128, torch.device("cuda"), tmp_path)


NO_HEADER = "x.h:52:10: fatal error: curand_kernel.h: No such file"
NO_SUCH_GPU = "nvcc fatal   : Unsupported gpu architecture 'compute_90a'"
NO_LIBRARY = "/usr/bin/ld: cannot find -lcuda: No such file"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (f"Ninja build failed. Ninja output:\n[1/9] nvcc -I/errors x.cu\n{NO_HEADER}\n  52 |", NO_HEADER),
        (f"Ninja build failed.\nc++ a.o -lcuda\n{NO_LIBRARY}\ncollect2: error: ld returned 1 exit status", NO_LIBRARY),
        ("no nvcc" + "!" * 1000, "no nvcc" + "!" * 293),
        (f"Ninja build failed. Ninja output:\n\n{NO_SUCH_GPU}\nninja: stopped", NO_SUCH_GPU),
        ("\n", "RuntimeError"),
    ],
)
def test_a_failed_build_is_one_line(
    modules: FlashInferModules, output: str, cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(verbose: bool) -> None:
        raise RuntimeError(output)

    monkeypatch.setattr(modules, "_spec", lambda variant: SimpleNamespace(build=fail))
    with caplog.at_level(logging.WARNING, flashinfer_modules.__name__):
        modules.build("fa3")
    assert modules.status() == {"fa3": f"failed: {cause}"}
    assert caplog.messages == [f"FlashInfer's fa3 prefill module could not be built; Triton's kernels stay in use: {cause}"]
    assert not modules.is_built("fa3")


def test_a_window_and_a_cap_have_modules_of_their_own(modules: FlashInferModules) -> None:
    other = FlashInferModules(torch.bfloat16, 256, modules.device, modules.module_dir, has_window=True, has_cap=True)
    assert modules._arguments()[-3:] == (False, False, False)
    assert other._arguments()[-3:] == (True, True, False)


def test_built_modules_are_copied_and_loaded_without_flashinfer(
    modules: FlashInferModules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=lambda path: loaded.append(path) or "module"))
    assert modules.load("fa3") is None
    library = tmp_path / "library.so"
    library.write_text("kernels")
    monkeypatch.setattr(modules, "_spec", lambda variant: SimpleNamespace(build=lambda verbose: None, jit_library_path=library))
    modules.build("fa3")
    assert [modules.load("fa3"), modules.load("fa3")] == ["module"] * 2
    assert loaded == [str(modules.module_dir / "fa3-bfloat16-128.so")]

    other = FlashInferModules(torch.bfloat16, 128, modules.device, tmp_path / "other")
    assert modules.export_to(tmp_path / "artifact") == [tmp_path / "artifact" / modules.key / "fa3-bfloat16-128.so"]
    assert other.import_from(tmp_path / "artifact") == [other.path("fa3")]
    assert other.import_from(tmp_path / "artifact") == []
    assert other.path("fa3").read_text() == "kernels"
    assert other.status() == {"fa3": "built"}


def test_a_module_that_does_not_load_is_said_once(
    modules: FlashInferModules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("file too short")

    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=fail))
    modules.module_dir.mkdir()
    modules.path("fa3").touch()
    with caplog.at_level(logging.WARNING, flashinfer_modules.__name__):
        assert [modules.load("fa3"), modules.load("fa3")] == [None, None]
    assert caplog.messages == [
        "FlashInfer's fa3 prefill module could not be loaded and was deleted; Triton's kernels stay in use: file too short"
    ]
    assert modules.status() == {"fa3": "failed: file too short"}
    assert not modules.path("fa3").exists()


def test_a_step_waits_for_modules_that_are_being_loaded(modules: FlashInferModules, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, loaded = threading.Event(), threading.Event(), []

    def load(path: str) -> object:
        begun.set()
        assert may_end.wait(60)
        loaded.append(object())
        return loaded[-1]

    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=load))
    modules.module_dir.mkdir()
    modules.path("fa3").touch()
    modules.load_in_background()
    assert begun.wait(60)
    threading.Timer(0.05, may_end.set).start()
    assert modules.load("fa3") is loaded[0]
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("version", "is_known"), [("0.6.10.post1", False), ("0.6.11", True), ("0.6.15.post1", True), ("0.7.4", True), ("0.7.5", False)]
)
def test_only_known_versions_are_called(version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(runs_cuda_kernels=True, compute_capability=(9, 0))
    monkeypatch.setattr(flashinfer_modules, "platform_of", lambda device: platform)
    monkeypatch.setattr(flashinfer_modules, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_modules, "version", lambda name: version)
    reason = flashinfer_unavailable_reason(torch.device("cuda"))
    assert reason == (None if is_known else f"how the kernels of FlashInfer {version} are called is not known (install >=0.6.11,<0.7.5)")


def test_the_extra_has_the_known_versions() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    first, unknown = (".".join(map(str, one)) for one in (flashinfer_modules.FIRST_VERSION, flashinfer_modules.FIRST_UNKNOWN_VERSION))
    assert f"flashinfer-python>={first},<{unknown}" in extras["cuda"]
