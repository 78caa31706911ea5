"""Which backend is chosen, and what is said when one cannot be."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch

import compile_and_serve.runtime.runner.attention_backends as backends
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.runtime.config import EngineConfig, ModelConfig
from compile_and_serve.runtime.runner.attention_backends import (
    AttentionBackendError,
    backends_of_model,
    keep_built_modules,
    select_attention_backend,
)
from tests.support.tiny_models import tiny_spec

SHAPE = {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "block_size": 16}
CPU = {"device": torch.device("cpu"), "dtype": torch.float32, "kv_cache_dtype": torch.float32} | SHAPE


class Picky:
    name = "picky"

    def unsupported_reason(self, **combination: object) -> str | None:
        return None if combination["dtype"] == torch.bfloat16 else "it takes bfloat16 only"


class Easy(Picky):
    name = "easy"

    def unsupported_reason(self, **combination: object) -> str | None:
        return None


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"picky": f"{__name__}:Picky", "missing": "no_such_package.module:Backend", "easy": f"{__name__}:Easy"}
    monkeypatch.setattr(backends, "BACKENDS", known)


@pytest.mark.usefixtures("registry")
def test_the_first_that_runs_is_chosen() -> None:
    assert select_attention_backend(None, **CPU).name == "easy"
    assert select_attention_backend(None, **(CPU | {"dtype": torch.bfloat16})).name == "picky"
    assert select_attention_backend("easy", **(CPU | {"dtype": torch.bfloat16})).name == "easy"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "There is no attention backend 'nothing': known are picky, missing, easy."),
        ("picky", "Attention backend 'picky' does not run here: it takes bfloat16 only."),
        ("missing", "Attention backend 'missing' does not run here: it cannot be imported: No module named 'no_such_package'."),
    ],
)
def test_a_forced_backend_that_cannot_run_says_why(name: str, sentence: str) -> None:
    with pytest.raises(AttentionBackendError) as error:
        select_attention_backend(name, **CPU)
    assert str(error.value) == sentence


@pytest.mark.usefixtures("registry")
def test_when_none_runs_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(backends.BACKENDS, "easy")
    with pytest.raises(AttentionBackendError, match="picky: it takes bfloat16 only; missing: it cannot be imported"):
        select_attention_backend(None, **CPU)


def test_there_is_one_for_the_cpu() -> None:
    assert select_attention_backend(None, **CPU).name in ("cpu", "torch")
    assert select_attention_backend("torch", **CPU).name == "torch"


def test_latent_caches_have_one_everywhere() -> None:
    latent = {**CPU, "head_dim": 576, "num_heads": 16, "num_kv_heads": 1, "features": frozenset(["latent"])}
    chosen = select_attention_backend(None, **latent)
    assert chosen.name in ("triton", "torch")  # the kernels where Triton's interpreter is on
    assert hasattr(chosen, "mla_forward")
    with pytest.raises(AttentionBackendError, match="no kernel for latent caches"):
        select_attention_backend("cpu", **latent)


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_known_name_is_its_backends_own(name: str) -> None:
    module, _, attribute = backends.BACKENDS[name].partition(":")
    try:
        backend = getattr(import_module(module), attribute)()
    except ImportError as error:
        pytest.skip(f"{name} needs a package that is not installed: {error}")
    assert backend.name == name


class FakeModules:
    """Kernel modules as a package that builds them would have them: files in a folder."""

    key = "package-1.0-sm90"
    variants = ("a", "b")

    def __init__(self, folder: Path) -> None:
        self.folder, self.built, self.num_loads = folder, [], 0

    def build(self, variant: str) -> None:
        self.built.append(variant)
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{variant}.so").write_text(f"kernels {variant}")

    def export_to(self, folder: Path) -> list[Path]:
        return [Path(shutil.copy(file, folder)) for file in sorted(self.folder.glob("*.so"))]

    def import_from(self, folder: Path) -> list[Path]:
        self.folder.mkdir(exist_ok=True)
        return [Path(shutil.copy(file, self.folder)) for file in sorted(folder.glob("*.so"))]

    def load_in_background(self) -> None:
        self.num_loads += 1


class BuildingBackend(TorchAttention):
    def __init__(self, folder: Path) -> None:
        self._modules = FakeModules(folder)

    def modules(self, dtype: torch.dtype, head_dim: int, device: torch.device, features: frozenset[str] = frozenset()) -> FakeModules:
        return self._modules


def test_built_modules_travel_in_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cpu = tiny_spec(), torch.device("cpu")
    builder = BuildingBackend(tmp_path / "here")
    assert keep_built_modules({"kv_caches": builder}, spec, cpu, torch.float32, tmp_path / "artifact") == 2
    assert keep_built_modules({"kv_caches": TorchAttention()}, spec, cpu, torch.float32, tmp_path / "artifact") == 0

    other = BuildingBackend(tmp_path / "there")
    monkeypatch.setattr("compile_and_serve.runtime.runner.attention_backends.select_attention_backend", lambda *args, **options: other)
    config = EngineConfig(model=ModelConfig(model="tiny", path=tmp_path), compile=CompileConfig(artifact_dir=tmp_path / "artifact"))
    assert backends_of_model(spec, config, cpu, torch.float32)["kv_caches"] is other
    assert (tmp_path / "there" / "b.so").read_text() == "kernels b"
    assert (other._modules.built, other._modules.num_loads) == ([], 1)

    damaged = next((tmp_path / "artifact" / "attention-modules").glob("*/a.so"))
    damaged.write_text("tampered")
    third = BuildingBackend(tmp_path / "elsewhere")
    monkeypatch.setattr("compile_and_serve.runtime.runner.attention_backends.select_attention_backend", lambda *args, **options: third)
    backends_of_model(spec, config, cpu, torch.float32)
    assert not (tmp_path / "elsewhere").exists()
