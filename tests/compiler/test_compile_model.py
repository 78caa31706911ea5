"""The compiled model computes what the plain module computes, at every token count, on one capture."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from compile_and_serve.compiler import CompileConfig, compile_model, pipeline
from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.compiler.inductor import PendingPiece, PieceCompileError
from compile_and_serve.compiler.model import Model, WeightMismatchError
from compile_and_serve.compiler.rewrite.graph_pass import PassError
from compile_and_serve.models.spec import ModelSpec
from tests.support.tiny_models import caches, fill, step, tiny_spec

CPU = torch.device("cpu")
FUSED = frozenset({"rope_attention", "fused_linear"})


def compiled(tmp_path: Path, architecture: str = "LlamaForCausalLM", kernels: frozenset[str] = FUSED, dtype: torch.dtype = torch.float32):
    spec = tiny_spec(architecture, 2, dtype)
    model = compile_model(spec, CompileConfig(cache_dir=tmp_path), device=CPU, dtype=dtype, kernels=kernels)
    fill(model)
    return spec, model


MODELS = [
    pytest.param("LlamaForCausalLM", FUSED, id="fused-LlamaForCausalLM"),
    pytest.param("Qwen3ForCausalLM", FUSED, id="fused-Qwen3ForCausalLM"),
    pytest.param("LlamaForCausalLM", frozenset(), id="plain-LlamaForCausalLM"),
    pytest.param("Qwen3ForCausalLM", frozenset(), id="plain-Qwen3ForCausalLM", marks=pytest.mark.slow),
]
Made = Callable[[str, frozenset[str]], tuple[Path, ModelSpec, Model]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`compiled`, once for each model, with the store that it filled. Tests that write into a store copy it."""

    @cache
    def make(architecture: str, kernels: frozenset[str]) -> tuple[Path, ModelSpec, Model]:
        folder = tmp_path_factory.mktemp("store")
        return folder, *compiled(folder, architecture, kernels)

    return make


@pytest.fixture
def store(made: Made, tmp_path: Path) -> Path:
    """A copy of the store of the fused Llama."""
    return shutil.copytree(made("LlamaForCausalLM", FUSED)[0], tmp_path / "store")


def eager(architecture: str, dtype: torch.dtype = torch.float32):
    model = compile_model(tiny_spec(architecture, 2, dtype), CompileConfig(mode="eager"), device=CPU, dtype=dtype)
    fill(model)
    return model


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize(("architecture", "kernels"), MODELS)
def test_equals_eager_at_every_length_without_recompiling(made: Made, architecture: str, kernels: frozenset[str]) -> None:
    _, spec, model = made(architecture, kernels)
    reference = eager(architecture)
    ours, theirs = caches(spec, torch.float32), caches(spec, torch.float32)
    start = 0
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (7, 1, 2, 16, 37, 1):
            tokens = [(start + i) * 7 % 320 for i in range(length)]
            torch.testing.assert_close(step(model, tokens, start, ours), step(reference, tokens, start, theirs), rtol=1e-4, atol=1e-4)
            start += length
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_row_wise_fusions_equal_eager(tmp_path: Path) -> None:
    spec = tiny_spec(layers=2, dtype=torch.float32)
    config = CompileConfig(cache_dir=tmp_path, forced_passes=frozenset({"fuse_silu_mul", "fuse_add_rms_norm"}))
    kernels = frozenset({"silu_mul", "add_rms_norm"})
    model = compile_model(spec, config, device=CPU, dtype=torch.float32, kernels=kernels)
    sites = {name: counts["matched"] for name, counts in model.report["pass_sites"].items() if name in config.forced_passes}
    assert sites == {"fuse_silu_mul": 2, "fuse_add_rms_norm": 4}
    fill(model)
    for length in (5, 1):
        torch.testing.assert_close(
            step(model, list(range(length)), 0, caches(spec, torch.float32)),
            step(eager("LlamaForCausalLM"), list(range(length)), 0, caches(spec, torch.float32)),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize(("verb", "option"), [("force", "forced_passes"), ("disable", "disabled_passes")])
def test_an_unknown_pass_is_an_error_even_with_an_artifact(store: Path, verb: str, option: str) -> None:
    wish = {option: frozenset({"nonsense"})}
    with pytest.raises(PassError, match=f"Cannot {verb} unknown pass 'nonsense': the passes are functionalize, canon"):
        compile_model(tiny_spec(), CompileConfig(cache_dir=store, **wish), device=CPU, dtype=torch.float32, kernels=FUSED)
    with pytest.raises(PassError, match="An eager model goes through no passes"):
        compile_model(tiny_spec(), CompileConfig(mode="eager", **wish), device=CPU, dtype=torch.float32)


def test_second_compilation_reads_the_artifact(made: Made, store: Path) -> None:
    _, spec, first = made("LlamaForCausalLM", FUSED)
    again = tiny_spec()
    stages: list[str] = []
    second = compile_model(
        again,
        CompileConfig(cache_dir=store),
        device=CPU,
        dtype=torch.float32,
        kernels=FUSED,
        on_stage=lambda stage, seconds, detail: stages.append(stage),
    )
    assert stages == []
    fill(second)
    assert stages == ["load artifact"]
    assert second.report["artifact"] == "hit"
    torch.testing.assert_close(
        step(second, [1, 2, 3], 0, caches(spec, torch.float32)), step(first, [1, 2, 3], 0, caches(spec, torch.float32)), rtol=0, atol=0
    )


@pytest.mark.slow
def test_compiled_pieces_are_stored_although_another_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_piece, begun = pipeline.start_piece, []

    def third_fails(gm: GraphModule, *args: object) -> PendingPiece:
        begun.append(gm)
        if len(begun) == 3:
            raise PieceCompileError("the third fails")
        return start_piece(gm, *args)

    monkeypatch.setattr(pipeline, "start_piece", third_fails)
    with pytest.raises(PieceCompileError, match="the third fails"):
        compiled(tmp_path)
    assert [entry.kind for entry in ArtifactStore(tmp_path).entries()] == ["piece", "piece"]
    stages: list[str] = []
    compile_model(
        tiny_spec(),
        CompileConfig(cache_dir=tmp_path),
        device=CPU,
        dtype=torch.float32,
        kernels=FUSED,
        on_stage=lambda stage, seconds, detail: stages.append(detail.rpartition(" ")[2] if stage == "compile" else ""),
    )
    assert (stages.count("loaded"), stages.count("compiled")) == (2, 1)


@pytest.mark.exhaustive
def test_pieces_do_not_depend_on_the_example_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen at run time by the number of tokens, not by the example with which the graph was captured."""
    made = []
    for count in (2, 61):
        with monkeypatch.context() as patched:
            patched.setattr("compile_and_serve.compiler.capture.capture.EXAMPLE_TOKENS", count)
            compiled(tmp_path / str(count))
        files = (tmp_path / str(count)).glob("*/*/*.*")
        made.append({(f.parent.name, f.name): f.read_text() for f in files if f.suffix in (".py", ".txt")})
    assert made[0] == made[1]


def test_depth_shares_pieces(store: Path) -> None:
    deeper = compile_model(tiny_spec(layers=5), CompileConfig(cache_dir=store), device=CPU, dtype=torch.float32, kernels=FUSED)
    assert deeper.report["pieces"] == 6
    assert deeper.report["distinct_pieces"] == 3
    assert len(list((store / "piece").iterdir())) == 3


@pytest.mark.slow
def test_artifact_of_another_model_is_named_and_not_used(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CompileConfig(cache_dir=tmp_path / "other", artifact_dir=store)
    with caplog.at_level(logging.WARNING):
        model = compile_model(tiny_spec(vocab_size=352), config, device=CPU, dtype=torch.float32, kernels=FUSED)
    assert model.report["artifact"] == "made"
    assert "does not fit this plan: the nearest plan differs in config (" in caplog.text
    fitting = compile_model(tiny_spec(), config, device=CPU, dtype=torch.float32, kernels=FUSED)
    assert fitting.report["artifact"] == "hit"


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    model = compile_model(tiny_spec(), CompileConfig(mode="eager"), device=CPU, dtype=torch.float32)
    with pytest.raises(WeightMismatchError, match=r"lacks model.embed_tokens.weight, .* more\."):
        model.finish_loading()
    with pytest.raises(WeightMismatchError, match=r"model.norm.weight has shape \[3\], expected \[64\]"):
        model.assign("model.norm.weight", torch.zeros(3))


@pytest.mark.parametrize(("architecture", "kernels"), MODELS)
def test_no_unexpected_clone_in_the_generated_code(made: Made, architecture: str, kernels: frozenset[str]) -> None:
    """No piece copies a tensor that it only reads or takes a KV cache, and each buffer depends on the number of tokens."""
    folder, _, _ = made(architecture, kernels)
    sources = [file.read_text() for file in (folder / "piece").glob("*/piece.py")]
    assert len(sources) == 3
    allocated = 0
    for source in sources:
        assert "aten.clone" not in source
        assert "aten.copy" not in source
        assert ".clone(" not in source
        assert "kv_cache" not in source
        for shape in re.findall(r"empty_strided\w*\(\((.*?)\), ", source):
            allocated += 1
            assert re.search(r"[us]\d", shape), f"a buffer of constant shape ({shape}): a copy of a weight"
    assert allocated > 0 or kernels
