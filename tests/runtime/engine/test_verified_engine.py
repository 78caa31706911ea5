"""An engine whose pipeline has a wrong pass: with verification it starts without that pass, says so, and answers right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler import pipeline
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.reports.dump_format import REPORT
from tests.support.wrong_passes import DropsResidual

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answer(model: Path, **options: Any) -> tuple[list[int], dict[str, int | float | str]]:
    options |= {"max_num_seqs": 4, "max_model_len": 64, "num_kv_blocks": 32, "num_threads": 1, "use_cache": False}
    with LLM(str(model), dtype="float32", device="cpu", **options) as llm:
        [output] = llm.generate("Hello there", GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids), llm.info.compile_report


def test_wrong_pass_is_named_and_the_answers_are_right(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = answer(tiny_llama_dir, enforce_eager=True)
    functionalize, canonicalize, *others = default_passes()
    monkeypatch.setattr(pipeline, "default_passes", lambda config: (functionalize, canonicalize, DropsResidual(), *others))
    wrong, _ = answer(tiny_llama_dir)
    assert wrong != expected  # the planted pass does harm
    tokens, report = answer(tiny_llama_dir, verify_passes=True, dump_dir=tmp_path / "dump")
    assert tokens == expected
    assert "relative error" in str(report["failed_passes.drops_residual"])
    dumped = json.loads((tmp_path / "dump" / REPORT).read_text())
    assert list(dumped["compilation"]["failed_passes"]) == ["drops_residual"]
    assert dumped["engine"]["kv_cache_tokens"] == 32 * 16
