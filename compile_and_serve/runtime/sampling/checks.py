"""Checks of sampling parameters against the model's vocabulary. The API process uses them too, so torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from compile_and_serve.runtime.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORD_TOKENS, SamplingParams, SamplingParamsError

_SHOWN = 20  # wrong ids that a message names


def verify_token_ids(params: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `SamplingParamsError` for a token id outside [0, vocab_size), or for bad words that are too long."""
    _verify("logit_bias", params.logit_bias or (), vocab_size)
    _verify("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _verify("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _verify("stop_token_ids", stop_token_ids, vocab_size)
    verify_bad_words(len(sequence) for sequence in params.bad_words_token_ids)
    for sequence in params.bad_words_token_ids:
        if not sequence:
            raise SamplingParamsError("bad_words", "bad_words must not contain a word that has no tokens.")
        _verify("bad_words", sequence, vocab_size)


def verify_bad_words(lengths: Iterable[int]) -> None:
    """Raise `SamplingParamsError` for bad words so long that they would slow down or break the steps of all requests.

    lengths: number of tokens of each word, or a lower bound of it.
    """
    total = 0
    for length in lengths:
        total += length
        if length > MAX_BAD_WORD_TOKENS:
            raise SamplingParamsError(
                "bad_words", f"Each of bad_words may have {MAX_BAD_WORD_TOKENS} tokens, but one has at least {length}: shorten it."
            )
    if total > MAX_BAD_TOKENS:
        raise SamplingParamsError(
            "bad_words", f"bad_words may have {MAX_BAD_TOKENS} tokens together, but they have at least {total}: use fewer."
        )


def verify_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raise `SamplingParamsError` for more log-probabilities than the engine gives. max_logprobs: -1 is no limit."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is None or max_logprobs == -1:
            continue
        if (vocab_size if value == -1 else value) > max_logprobs:
            asked = f"{value}" if value >= 0 else f"-1, the whole vocabulary of {vocab_size}"
            raise SamplingParamsError(name, f"{name} must be in [0, {max_logprobs}] (--max-logprobs), got {asked}.")


def _verify(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if not wrong:
        return
    shown = ", ".join(str(token_id) for token_id in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    ids = "token ids" if len(wrong) > 1 else "token id"
    raise SamplingParamsError(param, f"{param} has {ids} {shown:.500}{more}, but the model's ids are 0 to {vocab_size - 1}.")


def with_vocabulary(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """`params` with the number of tokens in place of -1 log-probabilities."""
    changes = {
        name: vocab_size
        for name in ("logprobs", "prompt_logprobs")
        if (value := getattr(params, name)) is not None and not 0 <= value <= vocab_size
    }
    return msgspec.structs.replace(params, **changes) if changes else params
