"""DeepGEMM's float8 products: how they are called, and that they build. No GPU is needed."""

from __future__ import annotations

import ctypes
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.jit.cuda import find_nvcc
from compile_and_serve.custom_ops.quantization import group_major_scales, quantize_activations
from compile_and_serve.custom_ops.quantized import deep_gemm
from compile_and_serve.custom_ops.quantized.cutlass_gemm import GemmArguments
from compile_and_serve.custom_ops.quantized.deep_gemm import DEEP, VERSION, deep_gemm_library, run_deep_gemm

FP8 = torch.float8_e4m3fn


def unbuildable() -> str:
    try:
        find_nvcc()
        deep_gemm_library(132)
    except BuildError as error:
        return str(error)
    return ""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str | None) -> None:
    def distribution(name: str) -> SimpleNamespace:
        if version is None:
            raise PackageNotFoundError(name)
        return SimpleNamespace(version=version, locate_file=folder.joinpath)

    monkeypatch.setattr(deep_gemm, "distribution", distribution)


def test_without_the_package_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, None)
    with pytest.raises(BuildError, match=rf"headers were not found: install sgl-deep-gemm=={VERSION} \(extra \[cuda\]\)"):
        deep_gemm_library(132)
    install(monkeypatch, tmp_path, "0.1.4.post1")
    with pytest.raises(BuildError, match=rf"sgl-deep-gemm 0\.1\.4\.post1 .* is not known: install sgl-deep-gemm=={VERSION}"):
        deep_gemm_library(132)


def test_the_extra_installs_the_known_version() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"sgl-deep-gemm=={VERSION}; sys_platform == 'linux'" in extras["cuda"]


def test_each_number_of_multiprocessors_has_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, VERSION)
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "VERSION").write_text(VERSION)
    monkeypatch.setattr("compile_and_serve.custom_ops.jit.cuda.find_nvcc", lambda: "/bin/true")
    assert deep_gemm_library(132).path() == deep_gemm_library(132).path() != deep_gemm_library(114).path()


def test_scales_are_copied_unless_they_lie_as_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, groups = 37, 3
    read: list[tuple[int, torch.Tensor]] = []

    def launch(library: object, config: str, args: GemmArguments) -> None:
        size = groups * 40  # of 40 tokens
        values = torch.frombuffer((ctypes.c_float * size).from_address(args.a_scale), dtype=torch.float32).view(groups, 40)
        read.append((args.a_scale, values[:, :num_tokens].clone()))
        assert (config, args.m, args.n, args.k, args.residual) == (DEEP[0], num_tokens, 64, 300, None)

    monkeypatch.setattr(deep_gemm, "launch_gemm", launch)
    a, scale = quantize_activations(torch.randn(num_tokens, 300), FP8, per_group=True)
    b, b_scale = torch.zeros(64, 300).to(FP8), torch.ones(1, groups)
    group_major = group_major_scales(num_tokens, groups, scale.device).copy_(scale)
    for given in (scale, group_major, torch.cat((scale[:1], scale)).t().contiguous().t()[1:]):  # the last begins between 16 bytes
        out = run_deep_gemm(ctypes.CDLL(None), DEEP[0], a, b, given, b_scale)
        assert (out.shape, out.dtype) == ((num_tokens, 64), torch.bfloat16)
    assert all(torch.equal(values, scale.t()) for _, values in read)
    assert [address == group_major.data_ptr() for address, _ in read] == [False, True, False]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(unbuildable()), reason=unbuildable())
def test_it_builds_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = deep_gemm_library(132)
    library = replace(whole, variants=whole.variants[1:])
    built = library.build()
    assert built == library.path() != whole.path()
    assert hasattr(ctypes.CDLL(str(built)), f"cas_scaled_gemm_{DEEP[1]}")
