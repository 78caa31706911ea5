"""`--speculative-config`: vLLM's keys, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compile_and_serve.runtime.drafting.config import parse_speculative_config
from compile_and_serve.runtime.speculative_config import SpeculativeConfig


def test_json_and_mapping_say_the_same() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 6, "prompt_lookup_min": 2}
    config = parse_speculative_config(given)
    assert config == parse_speculative_config(json.dumps(given))
    assert config == SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=6, prompt_lookup_min=2)
    assert config.ngram_lengths == (2, 6)
    assert config.num_speculative_tokens == 4
    assert parse_speculative_config(None) is None


def test_defaults() -> None:
    for method, num_tokens in {"ngram": 5, "suffix": 24, "mtp": 1}.items():
        config = parse_speculative_config({"method": method})
        assert config is not None
        assert (config.num_speculative_tokens, config.ngram_lengths) == (num_tokens, (3, 5))
    for given in ({"prompt_lookup_max": 4}, {"prompt_lookup_min": 4}):
        config = parse_speculative_config({"method": "ngram", **given})
        assert config is not None
        assert config.ngram_lengths == (4, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "must be a JSON object"),
        ("[1]", "must be an object like"),
        ({"method": "ngram", "num_tokens": 3, "draft": 1}, "has no key num_tokens, draft: known are method, model, num_spec"),
        ({}, "method must be one of ngram, suffix, draft_model, eagle, eagle3, mtp, medusa, dflash, got None"),
        ({"method": "magic"}, "method must be one of ngram, suffix, draft_model, eagle, eagle3, mtp, medusa, dflash, got 'magic'"),
        ({"method": "draft_model"}, "model must be a folder or a Hub id, got None"),
        ({"method": "draft_model", "model": 3}, "model must be a folder or a Hub id, got 3"),
        ({"method": "ngram", "model": "x"}, "the method 'ngram' takes no model: remove it"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 64, got 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer from 1 to 64, got True"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min must be at most prompt_l"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "must be a number from 0 to 1, got 2"),
        ({"method": "suffix", "synthetic_acceptance_rate": "x"}, "must be a number from 0 to 1, got 'x'"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": Infinity}', "must be a number from 0 to 64, got inf"),
        ({"method": "suffix", "disable_by_batch_size": 0}, "disable_by_batch_size must be an integer at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_sentence(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match="speculative_config") as error:
        parse_speculative_config(given)
    assert message in str(error.value)
    assert str(error.value).count("\n") == 0
