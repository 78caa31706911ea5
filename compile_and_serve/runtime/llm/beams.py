"""The results of `LLM.beam_search`, in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass

from compile_and_serve.runtime.beam_search import BeamSearch, BeamSearchParams
from compile_and_serve.runtime.messages import FinishReason
from compile_and_serve.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """tokens: prompt and continuation. text: theirs, None without a tokenizer. cum_logprob: of the continuation."""

    tokens: list[int]
    text: str | None
    cum_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(prompt: list[int], search: BeamSearch, tokenizer: Tokenizer | None, params: BeamSearchParams) -> BeamSearchOutput:
    """The output of a search that has ended."""
    sequences = []
    for beam in search.results():
        tokens = [*prompt, *beam.token_ids]
        shown = tokens[:-1] if beam.ended and not params.include_stop_str_in_output else tokens
        text = None
        if tokenizer is not None:
            text = tokenizer.decode(shown, skip_special_tokens=not params.include_stop_str_in_output)
        sequences.append(
            BeamSearchSequence(tokens, text, beam.logprob, "stop" if beam.ended else "length", tokens[-1] if beam.ended else None)
        )
    return BeamSearchOutput(sequences)
