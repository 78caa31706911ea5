"""LongRoPE and dynamic RoPE: tokens below, at and beyond the original length, in chunks, with prefix hits across it.

The reference of a class whose `generate` computes all keys again when a sequence outgrows the original length (Phi-3) is its forward
without a cache: transformers 5.17 then passes on the last token alone, and loses the text. That of others is `generate`, by a fresh
model for each prompt: a dynamic RoPE remembers the longest sequence that it has seen.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from tests.support.transformers_models import greedy_tokens, load_reference, write_random_model

ORIGINAL, HALF_HEAD = 64, 8
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 4 for i in range(HALF_HEAD)],
    "long_factor": [2.0 + i for i in range(HALF_HEAD)],
    "original_max_position_embeddings": ORIGINAL,
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
NEW_TOKENS = 16
RNG = random.Random(0)
TEXT = [RNG.randrange(3, 96) for _ in range(120)]
LENGTHS = (5, 57, 63, 64, 65, 90)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def make(folder: Path, architecture: str, **changes: Any) -> Path:
    return write_random_model(folder, architecture, **SIZES, **changes)


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in answers], [answer.num_cached_tokens for answer in answers]


def engine(folder: Path, **options: Any) -> LLM:
    """Prompts come in chunks of 32 tokens at most."""
    given = {"enforce_eager": True, "max_num_batched_tokens": 32, "max_num_seqs": 4} | options
    return LLM(str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, **given)


def without_cache(folder: Path, prompt: list[int]) -> list[int]:
    model, ids = load_reference(folder, torch.float32), list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"rope_scaling": LONGROPE, "original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 4 * ORIGINAL}
    return make(tmp_path_factory.mktemp("phi3"), "Phi3ForCausalLM", **changes)


def test_phi3_is_computed_again_where_it_outgrows_its_original_length(phi3: Path) -> None:
    llm = engine(phi3, async_scheduling=True)
    prompts = [TEXT[:length] for length in LENGTHS]
    expected = [without_cache(phi3, prompt) for prompt in prompts]
    found, _ = run(llm, prompts)
    assert found == expected
    # The first 48 tokens of all are equal, but only those beyond the original length have each other's keys.
    again, cached = run(llm, prompts)
    assert again == expected
    assert cached == [0, 48, 48, 48, 64, 80]
    longer = [*TEXT[:81], 7]
    assert run(llm, [longer]) == ([without_cache(phi3, longer)], [80])
    other = [*TEXT[60:], *TEXT[:30]]
    for length, hits in ((40, 0), (70, 0), (60, 32), (59, 48), (69, 64)):
        one = other[:length]
        tokens, cached = run(llm, [one])
        assert (tokens, cached) == ([without_cache(phi3, one)], [hits])


def test_drafts_end_at_the_original_length(phi3: Path) -> None:
    llm = engine(phi3, speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
    prompts = [(TEXT[:6] * 20)[:length] for length in (40, 60, 62)]
    assert run(llm, prompts)[0] == [without_cache(phi3, prompt) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "hits"),
    [
        ({"rope_scaling": LONGROPE, "max_position_embeddings": 4 * ORIGINAL}, 80),
        ({"rope_scaling": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, "max_position_embeddings": ORIGINAL}, 0),
    ],
    ids=["longrope", "dynamic"],
)
def test_other_classes_keep_the_keys_that_they_have(tmp_path: Path, changes: dict[str, Any], hits: int) -> None:
    folder = make(tmp_path, "LlamaForCausalLM", **changes)
    llm = engine(folder)
    prompts = [TEXT[:length] for length in LENGTHS]
    expected = [greedy_tokens(folder, [prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert run(llm, prompts)[0] == expected
    again, cached = run(llm, prompts)
    assert again == expected
    assert cached[1:] == [48, 48, 48, 64, 80]
    # With dynamic RoPE, prompts of another length have other keys.
    longer = TEXT[:91]
    assert run(llm, [longer]) == (greedy_tokens(folder, [longer], NEW_TOKENS), [hits])


@pytest.mark.slow
def test_a_compiled_model_follows_the_length(phi3: Path) -> None:
    prompts = [TEXT[:length] for length in LENGTHS]
    found, _ = run(engine(phi3, enforce_eager=False), prompts)
    assert found == [without_cache(phi3, prompt) for prompt in prompts]


def test_overrides_extend_the_positions(phi3: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="positions end at 256: lower --max-model-len, or extend them with --hf-overrides"):
        engine(phi3, max_model_len=300)
    engine(phi3, max_model_len=300, hf_overrides={"max_position_embeddings": 512})
    folder = make(tmp_path, "LlamaForCausalLM", max_position_embeddings=ORIGINAL)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    llm = engine(folder, max_model_len=200, hf_overrides={"rope_scaling": yarn})
    assert run(llm, [TEXT[:90]])[0] != run(engine(folder, hf_overrides={"max_position_embeddings": 200}), [TEXT[:90]])[0]
