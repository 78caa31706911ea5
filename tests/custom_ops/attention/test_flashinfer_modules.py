"""What is said when FlashInfer's modules cannot be built; without FlashInfer and a GPU."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_and_serve.custom_ops.attention import flashinfer_modules
from compile_and_serve.custom_ops.attention.flashinfer_modules import FlashInferModules


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlashInferModules:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(FlashInferModules, "name", lambda self, variant: variant)
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
) -> None:  # fmt: skip
    def fail(verbose: bool) -> None:
        raise RuntimeError(output)

    monkeypatch.setattr(modules, "_spec", lambda variant: SimpleNamespace(build=fail))
    with caplog.at_level(logging.WARNING, flashinfer_modules.__name__):
        modules.build("fa3")
    assert modules.status() == {"fa3": f"failed: {cause}"}
    assert caplog.messages == [
        f"FlashInfer's fa3 prefill module could not be built; Triton's kernels stay in use: {cause}"
    ]
    assert not modules.is_built("fa3")


def test_a_window_and_a_cap_have_modules_of_their_own(modules: FlashInferModules) -> None:
    other = FlashInferModules(torch.bfloat16, 256, modules.device, modules.module_dir, has_window=True, has_cap=True)
    assert modules._arguments()[-3:] == (False, False, False)
    assert other._arguments()[-3:] == (True, True, False)


def test_the_import_lets_steps_run_meanwhile(modules: FlashInferModules, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = sys.getswitchinterval(), []
    monkeypatch.setattr(modules, "is_built", lambda variant: True)
    fake = SimpleNamespace(get_batch_prefill_module=lambda *arguments: seen.append(sys.getswitchinterval()))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(prefill=fake))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", fake)
    modules.load_in_background()
    assert modules._loading is not None
    modules._loading.join()
    assert seen == [pytest.approx(1e-4)]
    assert sys.getswitchinterval() == before
