"""A dump contains every stage as a file that can be run, and the pass report; an error in it does not stop the compilation."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.inductor import load_pieces
from compile_and_serve.compiler.model import Model
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.reports.dump import add_to_report
from compile_and_serve.compiler.reports.dump_format import REPORT, SCHEMA
from compile_and_serve.compiler.reports.run_dump import random_inputs, run
from compile_and_serve.models.registry import build_model
from tests.models.test_registry import EXPERTS
from tests.support.tiny_models import caches, fill, step, tiny_spec

CPU = torch.device("cpu")
RUN = default_passes()
FUSED = frozenset({"rope_attention", "fused_linear", "silu_mul", "add_rms_norm"})


def dumped(tmp_path: Path, kernels: frozenset[str] = FUSED, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Path, Model]:
    config = CompileConfig(cache_dir=tmp_path / "store", dump_dir=tmp_path / "dump", **options)
    spec = tiny_spec(layers=3, dtype=dtype)
    return tmp_path / "dump", compile_model(spec, config, device=CPU, dtype=dtype, kernels=kernels)


@pytest.fixture(scope="module")
def plain_dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """`dumped` with default options, for tests that only read it. The store is beside the dump."""
    return dumped(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def with_pieces(plain_dump: tuple[Path, Model], tmp_path: Path) -> Path:
    """A folder in whose store `dumped` finds the pieces."""
    shutil.copytree(plain_dump[0].parent / "store" / "piece", tmp_path / "store" / "piece")
    return tmp_path


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"dumped_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_pieces_compute_what_was_compiled(folder: Path, tolerance: float) -> int:
    pieces = sorted((folder / "90_split").glob("piece_*.py"))
    for file in pieces:
        piece = load(file)
        inputs = random_inputs(piece.INPUTS, tokens=7)
        expected = run(piece.forward, piece.INPUTS, inputs)
        generated = (folder / "91_compiled" / file.name).read_text()
        compiled = load_pieces({file.stem: generated}, torch.device("cpu"), folder / "kernels")[file.stem].run
        with torch.no_grad():
            for ours, theirs in zip(compiled(list(inputs)), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return len(pieces)


@pytest.mark.slow
def test_dumped_pieces_run_and_agree_with_the_compiled_ones(plain_dump: tuple[Path, Model], tmp_path: Path) -> None:
    folder, model = tmp_path / "dump", plain_dump[1]
    shutil.copytree(plain_dump[0], folder)  # kernels are built in it
    assert assert_pieces_compute_what_was_compiled(folder, 1e-4) == model.report["distinct_pieces"]


@pytest.mark.exhaustive
def test_dump_of_smollm2_runs(tmp_path: Path, smollm2_gguf: Path) -> None:
    from compile_and_serve.runtime.weights import read_config

    config = CompileConfig(cache_dir=tmp_path / "store", dump_dir=tmp_path / "dump")
    spec = build_model(read_config(smollm2_gguf), dtype=torch.float32)
    model = compile_model(spec, config, device=CPU, dtype=torch.float32, kernels=FUSED)
    assert assert_pieces_compute_what_was_compiled(tmp_path / "dump", 1e-3) == model.report["distinct_pieces"]


def test_every_stage_is_a_file_and_names_sort_by_stage(plain_dump: tuple[Path, Model]) -> None:
    folder, _ = plain_dump
    names = sorted(file.name for file in folder.iterdir())
    passes = [f"{i:02}_pass_{p.name}.py" for i, p in enumerate(RUN, start=2)]
    expected = ["00_dynamo_bytecode.py", "01_captured.py", *passes, "90_split", "91_compiled", "92_forward.py", REPORT]
    assert names == expected
    assert "def forward(self, input_ids, positions, kv_caches, logits_indices)" in (folder / names[0]).read_text()


@pytest.mark.slow
def test_graphs_run_and_every_line_has_dtype_shape_or_source(tmp_path: Path) -> None:
    folder, _ = dumped(tmp_path, kernels=frozenset(), dtype=torch.bfloat16)
    results: list[torch.Tensor] = []
    graphs = json.loads((folder / REPORT).read_text())["graphs"]
    for file in (folder / graph["file"] for graph in graphs):
        text = file.read_text()
        body = text[text.index("):\n") : text.index("    return ")].splitlines()[1:]
        assert all(re.match(r"    # models/[\w/]+\.py:\d+, in forward: ", line) or "  # " in line for line in body), file
        graph = load(file)
        results.append(run(graph.forward, graph.INPUTS, random_inputs(graph.INPUTS))[0])
    assert len(results) == 1 + len(default_passes()) - 4  # the four fusions had no kernel and did not run
    assert "# bfloat16[tokens, 64]" in text
    for result in results[1:3]:  # up to `merge_linears` the inputs are the same
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.exhaustive
def test_graphs_with_experts_and_latent_attention_are_programs(tmp_path: Path) -> None:
    spec = tiny_spec("DeepseekV2ForCausalLM", 2, torch.float32, **EXPERTS["DeepseekV2ForCausalLM"])
    config = CompileConfig(cache_dir=tmp_path / "store", dump_dir=tmp_path / "dump")
    compile_model(spec, config, device=CPU, dtype=torch.float32)
    last = json.loads((tmp_path / "dump" / REPORT).read_text())["graphs"][-1]["file"]
    done = subprocess.run(
        [sys.executable, tmp_path / "dump" / last],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("output 0: float32[3, 320]")


def test_report_has_the_passes_and_the_nodes(with_pieces: Path) -> None:
    folder, model = dumped(with_pieces, verify_passes=True)
    report = json.loads((folder / REPORT).read_text())
    assert report["schema"] == SCHEMA
    assert report["compilation"]["passes"] == json.loads(json.dumps(model.report["passes"]))
    assert [graph["name"] for graph in report["graphs"]] == ["captured", *(p.name for p in RUN)]
    for graph in report["graphs"]:
        steps = [step.get("op", "piece") for step in graph["steps"]]
        assert len(steps) == 7
        assert all(step["piece"] in report["pieces"] for step in graph["steps"] if "piece" in step)
    last = report["pieces"][report["graphs"][-1]["steps"][2]["piece"]]
    calls = [node for node in last["nodes"] if node["kind"] == "call"]
    assert [node["target"] for node in calls] == ["torch.ops.cas.fused_linear.default"] * 4
    assert calls[0]["source"].startswith("models/families/llama.py:")
    assert calls[0]["code"] == "return self.o_proj(out_THE.flatten(1))"
    used = Counter(step["piece"] for step in report["graphs"][-1]["steps"] if "piece" in step)
    assert {row["piece"]: row["count"] for row in report["split"]} == used


@pytest.mark.slow
def test_near_miss_is_in_the_report_with_its_line(tmp_path: Path) -> None:
    spec = tiny_spec(layers=2, dtype=torch.bfloat16)
    for layer in spec.module.model.layers:
        layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.float()
    config = CompileConfig(use_cache=False, dump_dir=tmp_path / "dump")
    compile_model(spec, config, device=CPU, dtype=torch.bfloat16, kernels=FUSED)
    report = json.loads((tmp_path / "dump" / REPORT).read_text())
    (row,) = [row for row in report["compilation"]["passes"] if row["name"] == "fuse_linears"]
    assert row["expected"] - row["matched"] == 2
    assert "different dtypes" in row["near_misses"][0]["reason"]
    assert re.search(r"models/families/llama\.py:\d+", row["near_misses"][0]["source"])


def test_dumping_changes_nothing(plain_dump: tuple[Path, Model]) -> None:
    folder, with_dump = plain_dump
    config = CompileConfig(cache_dir=folder.parent / "store")
    plain = compile_model(tiny_spec(layers=3), config, device=CPU, dtype=torch.float32, kernels=FUSED)
    assert plain.report["artifact"] == "hit"
    fill(with_dump)
    fill(plain)
    ours, theirs = (step(m, [1, 2, 3], 0, caches(tiny_spec(layers=3), torch.float32)) for m in (with_dump, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["a file in the way", "somebody's folder"])
def test_a_dump_that_fails_is_one_warning(with_pieces: Path, obstacle: str, caplog: pytest.LogCaptureFixture) -> None:
    if obstacle == "a file in the way":
        (with_pieces / "dump").write_text("precious")
        precious = with_pieces / "dump"
    else:
        (with_pieces / "dump").mkdir()
        precious = with_pieces / "dump" / "05_my_thesis.txt"
        precious.write_text("precious")
    with caplog.at_level(logging.WARNING):
        _, model = dumped(with_pieces)
    assert len(re.findall(r"The dump to .* is incomplete", caplog.text)) == 1
    assert precious.read_text() == "precious"
    fill(model)
    assert step(model, [1, 2], 0, caches(tiny_spec(layers=3), torch.float32)).isfinite().all()


@pytest.mark.slow
def test_a_dump_replaces_an_older_one(with_pieces: Path) -> None:
    folder, _ = dumped(with_pieces)
    (folder / "08_pass_of_an_older_version.py").write_text("")
    dumped(with_pieces)
    assert not (folder / "08_pass_of_an_older_version.py").exists()


def test_facts_are_added_to_a_report(plain_dump: tuple[Path, Model], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "dump"
    shutil.copytree(plain_dump[0], folder)
    before = json.loads((folder / REPORT).read_text())
    add_to_report(folder, "engine", {"kv_cache_tokens": 128, "share": float("nan")})
    facts = {"kv_cache_tokens": 128, "share": None}
    assert json.loads((folder / REPORT).read_text()) == before | {"engine": facts}
    with caplog.at_level(logging.WARNING):
        add_to_report(tmp_path / "nowhere", "engine", {})
    assert "could not be completed" in caplog.text
