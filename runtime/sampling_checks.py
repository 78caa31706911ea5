"""Checks of sampling parameters that need to know the model's vocabulary. Light to import: the API process uses it as
well.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.sampling_params import SamplingParams, SamplingParamsError


def verify_token_ids(params: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `SamplingParamsError` (a sentence) for a token id that the model does not have."""
    _verify("logit_bias", params.logit_bias or (), vocab_size)
    _verify("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _verify("stop_token_ids", stop_token_ids, vocab_size)
    for sequence in params.bad_words_token_ids:
        if not sequence:
            raise SamplingParamsError("bad_words", "bad_words must not contain a word without tokens.")
        _verify("bad_words", sequence, vocab_size)


def _verify(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise SamplingParamsError(
                param, f"{param} has token id {token_id}, but the model's ids are 0 to {vocab_size - 1}."
            )
