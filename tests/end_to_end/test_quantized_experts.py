"""Experts that compressed-tensors stores quantized: the tokens of the model with the dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compile_and_serve import LLM, SamplingParams
from tests.support.group_checkpoints import write_grouped
from tests.support.moe_models import write_moe
from tests.support.quantized_checkpoints import compressed_tensors_config, write_quantized
from tests.support.transformers_models import greedy_tokens

pytestmark = pytest.mark.slow
PROMPTS = [[7, 21, 300, 9, 44], [5, 6], list(range(30, 53))]
NUM_TOKENS = 16


def packed(bits: int, symmetric: bool, group_size: int | None) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "group_size": group_size,
        "strategy": "group" if group_size else "channel",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def with_plain_attention(quantized: Path, dequantized: Path, folder: Path) -> Path:
    """The quantized checkpoint with only its experts quantized, so that no activation is rounded."""
    plain = load_file(dequantized / "model.safetensors")
    tensors = {n: t for n, t in load_file(quantized / "model.safetensors").items() if ".self_attn." not in n}
    shutil.copytree(quantized, folder)
    save_file(tensors | {n: t for n, t in plain.items() if ".self_attn." in n}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["ignore"] += ["re:.*self_attn.*", "lm_head", "re:.*mlp.gate$"]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (compressed_tensors_config("float", "channel", None), {}),
        (compressed_tensors_config("int", "channel", "token"), {}),
        (packed(4, False, 32), {"tensor_parallel_size": 2}),
        (packed(8, True, None), {}),
    ],
    ids=["fp8-channel-weight-only", "int8-channel", "int4-zero-points-two-ranks", "int8-packed"],
)
@pytest.mark.exhaustive_cases(but=["fp8"])
def test_tokens_are_those_of_the_dequantized_weights(config: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    plain = write_moe(tmp_path / "plain", "Qwen3MoeForCausalLM", moe_intermediate_size=64)
    write = write_grouped if config["format"] == "pack-quantized" else write_quantized
    quantized, dequantized = write(plain, tmp_path / "written", config)
    folder = with_plain_attention(quantized, dequantized, tmp_path / "model")
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        cache_dir=tmp_path / "cache",
        num_kv_blocks=64,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        **options,
    ) as llm:
        report = llm.info.compile_report
        assert report["pass_sites.fuse_experts.matched"] == 3
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    expected = greedy_tokens(dequantized, PROMPTS, NUM_TOKENS)
    assert [output.outputs[0].token_ids for output in outputs] == expected
