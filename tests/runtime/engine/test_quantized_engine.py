"""`--quantization` through the engine: from the option to the tokens and what the report says; SmolLM2 keeps its wits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.options import make_engine_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "num_kv_blocks": 64, "num_threads": 2}


def test_options(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = str(tiny_llama_dir)
    config = make_engine_config(model, quantization="int8", quantization_exclude=["lm_head", "*.0.*"])
    assert config.compile.quantization == "int8"
    assert config.compile.quantization_exclude == ("lm_head", "*.0.*")
    for options, message in (
        ({"quantization": "int3"}, "quantization must be one of fp8, fp8-block"),
        ({"quantization_exclude": ["lm_head"]}, "quantization_exclude must be given together with quantization"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine_config(model, **options)
    with pytest.raises(ValueError, match="leave out --quantization or --enforce-eager"):
        LLM(model, quantization="int8", enforce_eager=True, **OPTIONS)
    with pytest.raises(ValueError, match="exclusion 'o_proj' matches no linear of this model"):
        LLM(model, quantization="int8", quantization_exclude=["o_proj"], cache_dir=tmp_path, **OPTIONS)


@pytest.mark.exhaustive
def test_the_engine_says_what_is_quantized(tiny_llama_dir: Path, tmp_path: Path) -> None:
    tokens = {}
    for quantization in (None, "int8-weight-only"):
        options = OPTIONS | {"quantization": quantization, "cache_dir": tmp_path, "dtype": "float32"}
        with LLM(str(tiny_llama_dir), **options) as llm:
            [output] = llm.generate("Hello there", GREEDY, use_tqdm=False)
            tokens[quantization] = list(output.outputs[0].token_ids)
            sites = llm.info.compile_report["pass_sites.quantize_linears.matched"]
        assert sites == (0 if quantization is None else 4 * 2 + 1)
    assert tokens["int8-weight-only"][0] == tokens[None][0]  # not a near tie; from the second on they may part


_START = """
import sys
from compile_and_serve import LLM, SamplingParams
with LLM(sys.argv[1], quantization="int8", cache_dir=sys.argv[2], dtype="float32", device="cpu", num_kv_blocks=64, num_threads=1) as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate("Hello there", greedy, use_tqdm=False)
    print(llm.info.compile_report["artifact"], output.outputs[0].token_ids)
"""


@pytest.mark.exhaustive
def test_a_second_start_from_the_artifact(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """In a process of its own: nothing but the artifact and the checkpoint says that kernels of 8-bit weights are needed."""
    starts = [
        subprocess.run(
            [sys.executable, "-c", _START, str(tiny_llama_dir), str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
        )
        .stdout.splitlines()[-1]
        .split(maxsplit=1)
        for _ in range(2)
    ]
    assert [artifact for artifact, _ in starts] == ["made", "hit"]
    assert starts[0][1] == starts[1][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", ["int8-weight-only", "fp8"])
def test_smollm2_still_answers(smollm2_gguf: Path, quantization: str) -> None:
    with LLM(str(smollm2_gguf), quantization=quantization, max_model_len=256, **OPTIONS) as llm:
        question = [{"role": "user", "content": "Name three primary colors."}]
        [output] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    text = output.outputs[0].text
    assert all(color in text for color in ("Red", "Blue", "Yellow")), text
