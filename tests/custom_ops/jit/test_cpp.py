"""Building on first use: one build for several processes, and one sentence when it cannot be done."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_and_serve.custom_ops.jit.cpp import BuildError, build_library, find_compiler

ROOT = Path(__file__).resolve().parents[3]
needs_compiler = pytest.mark.skipif(
    subprocess.run(["sh", "-c", "command -v g++ || command -v clang++"], capture_output=True).returncode != 0, reason="no C++ compiler"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    return path


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)


@needs_compiler
def test_second_call_reuses_the_library(source: Path) -> None:
    library = build_library("answer", [source])
    assert ctypes.CDLL(str(library)).answer() == 42
    built_at = library.stat().st_mtime_ns
    assert build_library("answer", [source]) == library
    assert library.stat().st_mtime_ns == built_at


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "half", "one bit", "no checksum", "half a checksum"])
def test_a_damaged_library_is_rebuilt_and_reported_once(source: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    library = build_library("answer", [source])
    checksum, built = library.with_name(f"{library.name}.sha256"), library.read_bytes()
    if damage == "no checksum":
        checksum.unlink()
    elif damage == "half a checksum":
        checksum.write_bytes(checksum.read_bytes()[:20])
    else:
        flipped = built[:1000] + bytes([built[1000] ^ 1]) + built[1001:]
        library.write_bytes({"empty": b"", "half": built[: len(built) // 2], "one bit": flipped}[damage])
    for _ in range(2):
        assert build_library("answer", [source]) == library
    assert [str(library) in record.message for record in caplog.records if "rebuilt" in record.message] == [True]
    assert ctypes.CDLL(str(library)).answer() == 42
    assert sorted(file.name for file in library.parent.iterdir()) == sorted(
        [library.name, checksum.name, library.with_suffix(".lock").name]
    )


@needs_compiler
def test_a_library_that_the_machine_cannot_read_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_library("answer", [source])
    built = library.stat()

    def fails(file: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("compile_and_serve.custom_ops.jit.checked_library._digest", fails)
    with pytest.raises(BuildError, match="Too many open files"):
        build_library("answer", [source])
    assert library.stat() == built


@needs_compiler
def test_the_next_build_removes_what_a_killed_one_left(source: Path) -> None:
    library = build_library("answer", [source])
    left = library.parent / f".{library.stem}-build-abc"
    left.mkdir()
    library.unlink()
    build_library("answer", [source])
    assert not left.exists()


@needs_compiler
def test_changed_source_is_another_library(source: Path) -> None:
    library = build_library("answer", [source])
    source.write_text(source.read_text().replace("42", "43"))
    changed = build_library("answer", [source])
    assert changed != library
    assert ctypes.CDLL(str(changed)).answer() == 43


@needs_compiler
def test_changed_header_is_another_library(source: Path) -> None:
    header = source.with_suffix(".h")
    header.write_text("// one\n")
    library = build_library("answer", [source], [header])
    header.write_text("// two\n")
    assert build_library("answer", [source], [header]) != library


@pytest.mark.slow
@needs_compiler
def test_two_processes_share_one_build(source: Path, tmp_path: Path) -> None:
    code = (
        "import logging, sys; from pathlib import Path; from compile_and_serve.custom_ops.jit.cpp import build_library\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"print(build_library('answer', [Path({str(source)!r})]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0][0] == results[1][0]
    assert sum("building the answer kernels" in errors for _, errors in results) == 1
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1


@needs_compiler
def test_compiler_error_names_the_file(source: Path) -> None:
    source.write_text("int answer() { return nothing; }\n")
    with pytest.raises(BuildError, match=r"failed on answer\.cpp: .*nothing"):
        build_library("answer", [source])


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"install g\+\+"):
        find_compiler()


@pytest.mark.slow
def test_without_compiler_the_reference_runs(tmp_path: Path) -> None:
    code = """
import torch
from compile_and_serve.custom_ops.attention.cpu_backend import CpuAttention
from compile_and_serve.custom_ops.jit.cpu_kernels import cpu_kernels_status
from compile_and_serve.custom_ops.linear.fused_linear import fused_linear, pack_linear_weight
from compile_and_serve.custom_ops.linear.fused_linear import packed_linear_unsupported_reason, packed_shape
cpu = torch.device("cpu")
x, weight = torch.randn(5, 64), torch.randn(32, 64)
print(packed_linear_unsupported_reason(device=cpu, dtype=torch.float32))
assert packed_shape(32, 64, device=cpu, dtype=torch.float32) == (32, 64)
assert pack_linear_weight(weight) is weight
y = fused_linear(x, weight, 32, torch.ones(64), silu_mul=True, residual_TO=torch.ones(5, 16))
gate, up = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) @ weight.T).chunk(2, -1)
torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up + 1)
combination = dict(device=cpu, dtype=torch.float32, kv_cache_dtype=torch.float32, head_dim=64, num_heads=9, num_kv_heads=3, block_size=16)
assert CpuAttention().unsupported_reason(**combination) == cpu_kernels_status()
"""
    result = run_python(code, PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert result.stdout.strip() == "no C++ compiler was found: install g++ (or set CXX to one)"
    assert result.stderr.count("install g++") == 1  # logged once


def test_unwritable_cache_is_one_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be written|no C\\+\\+ compiler"):
        build_library("answer", [source])
