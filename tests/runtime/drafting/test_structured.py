"""Structured output and stop strings with drafts, right and wrong ones."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from compile_and_serve import LLM, SamplingParams, StructuredOutputsParams
from compile_and_serve.runtime.drafting import speculator
from compile_and_serve.runtime.llm.llm import RequestOutput
from tests.support.drafters import check_every_draft


class Continuations:
    """Drafts how known sequences go on; every fifth token is wrong."""

    def __init__(self, sequences: Sequence[list[int]], vocab_size: int) -> None:
        self.sequences, self.vocab_size, self.rng = sequences, vocab_size, random.Random(0)

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        known = next(one for one in self.sequences if one[: len(token_ids)] == list(token_ids))
        right = known[len(token_ids) :][:max_tokens]
        return [self.rng.randrange(self.vocab_size) if self.rng.random() < 0.2 else token for token in right]

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        pass


def requests(marker: list[int]) -> list[SamplingParams]:
    hex_pairs = StructuredOutputsParams(regex="([0-9a-f]{2} ){12}")
    after = StructuredOutputsParams(regex="[0-9]{5}", begins_after=[marker])
    return [
        *(SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs=hex_pairs) for seed in range(4)),
        SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=hex_pairs, frequency_penalty=0.7),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=after),
        SamplingParams(
            temperature=1.0, seed=7, max_tokens=50, min_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{4,}")
        ),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    ]


def generate(llm: LLM, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([f"{min(index, 7)} is a number" for index in range(len(params))], params, use_tqdm=False)


@pytest.fixture
def options() -> dict[str, object]:
    return {
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "max_model_len": 256,
        "num_threads": 1,
        "max_num_seqs": 8,
        "num_kv_blocks": 256,
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_grammars_markers_and_stop_strings_hold(
    method: str, tiny_llama_dir: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_llama_dir), **options) as llm:
        free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        start = llm.generate("5 is a number", free, use_tqdm=False)[0].outputs[0].token_ids
        params = requests(start[6:8])
        plain = generate(llm, params)
        text = plain[-1].outputs[0].text
        params.append(SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[text[10:13]]))
        plain = generate(llm, params)
        vocab_size = llm.info.vocab_size
    sequences = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in plain]
    check_every_draft(monkeypatch)
    config: dict[str, object] = {"method": method, "num_speculative_tokens": 4}
    if method == "ngram":
        monkeypatch.setattr(speculator, "make_drafter", lambda config, **_: Continuations(sequences, vocab_size))
    else:
        config["model"] = str(tiny_llama_dir)
    for is_asynchronous in (False, True):
        with LLM(str(tiny_llama_dir), speculative_config=config, async_scheduling=is_asynchronous, **options) as drafting:
            drafted = generate(drafting, params)
            accepted = drafting.engine.core.stats().spec_decode_num_accepted_tokens
        for with_drafts, without in zip(drafted, plain, strict=True):
            got, expected = with_drafts.outputs[0], without.outputs[0]
            assert (got.token_ids, got.text, got.stop_reason) == (expected.token_ids, expected.text, expected.stop_reason)
        assert accepted > (80 if method == "ngram" else 20)  # the model knows no grammar
    assert re.fullmatch("([0-9a-f]{2} ){12}", plain[0].outputs[0].text)
    assert plain[-1].outputs[0].stop_reason == text[10:13]
