"""Turns user requests into engine requests: token ids, checked sampling parameters, stop ids and lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from compile_and_serve.custom_ops.step_data import MediaItem
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.media.prepared import PreparedMedia, place_media
from compile_and_serve.runtime.media.registry import MediaProcessor
from compile_and_serve.runtime.messages import EngineInfo, EngineRequest, StepData
from compile_and_serve.runtime.pooling_params import PoolingParams
from compile_and_serve.runtime.sampling.checks import verify_bad_words, verify_logprobs, verify_token_ids
from compile_and_serve.runtime.sampling_params import SamplingParams, SamplingParamsError
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.special_text import ChatText
from compile_and_serve.runtime.text.tokenizer import Tokenizer

_LONG_TEXT = 1 << 16  # characters; shorter texts are tokenized at once
_CUT_TOKENS = 64  # tokens near a cut in a text that may differ from those of the whole text


class PromptTooLongError(ValueError):
    """The prompt and the requested completion exceed the model's limit."""

    param = "prompt"


class InputProcessor:
    """Checks and completes requests. It keeps no state between them.

    tokenizer: None if requests contain only token ids. limit: tokens that prompt and completion may have together. prompt_limit: of the
    prompt; where an encoder reads it, it does not count for the other limit.
    Construction raises `ValueError` for a tokenizer of another model. Methods raise `ValueError` or a subclass with one
    sentence.
    """

    def __init__(self, tokenizer: Tokenizer | None, info: EngineInfo) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.limit = min(info.max_model_len, info.max_sequence_len or info.num_kv_blocks * info.block_size)
        self.prompt_limit = self.limit if info.max_source_len is None else info.max_source_len
        for token_id in [] if tokenizer is None else tokenizer.eos_token_ids:
            if not 0 <= token_id < info.vocab_size:
                raise ValueError(
                    f"The end-of-sequence id {token_id} is not an id of the model, whose ids are 0 to {info.vocab_size - 1}: "
                    "correct eos_token_id in generation_config.json, or the tokenizer."
                )

    def encode(
        self,
        text: str | ChatText,
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        max_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "left",
        pair: str | None = None,
    ) -> list[int]:
        """Token ids of a prompt.

        truncate: the request's truncate_prompt_tokens. Without it, a text that cannot fit raises `PromptTooLongError` before
        it is tokenized. max_tokens: the requested completion, for that message. truncation_side: of a text that is cut. pair: a second
        text, which the tokenizer joins to the first as its model expects. Raises `TokenizerError` for invalid text.
        """
        tokenizer = self.require_tokenizer("a text prompt")
        whole = text if isinstance(text, ChatText) else ChatText(text)
        length = len(whole.text)
        if truncate is None:
            self.check_length(length + len(pair or ""), max_tokens)
        if pair is not None:
            return tokenizer.encode_pair(whole.text, pair, add_special_tokens=add_special_tokens)
        # Tokenizing takes about 100 bytes per character, so only as much of a long text is tokenized as can be needed.
        needed = self.prompt_limit if truncate is None or truncate < 0 else min(truncate, self.prompt_limit)
        size = max(_LONG_TEXT, 4 * needed)
        while size < length:
            part = whole.cut(0, size) if truncate is None or truncation_side == "right" else whole.cut(length - size, length)
            ids = tokenizer.encode(part, add_special_tokens=add_special_tokens and truncate is not None)
            if len(ids) > needed + _CUT_TOKENS:
                if truncate is not None:
                    return ids
                raise PromptTooLongError(self._too_long(f"at least {len(ids) - _CUT_TOKENS}", max_tokens))
            size *= 2
        return tokenizer.encode(whole, add_special_tokens=add_special_tokens)

    def check_length(self, num_characters: int, max_tokens: int | None = 0) -> None:
        """Raise `PromptTooLongError` if no text of so many characters can fit. max_tokens: the requested completion."""
        at_least = num_characters // self.require_tokenizer("a text prompt").max_token_chars
        if at_least > self.prompt_limit:
            raise PromptTooLongError(self._too_long(f"at least {at_least}", max_tokens))

    def prepare(
        self, prompt: str | ChatText | Sequence[int], params: SamplingParams, *, add_special_tokens: bool = True, pair: str | None = None
    ) -> tuple[list[int], SamplingParams]:
        """The prompt's token ids for the engine, truncated if the request says so, and a completed copy of `params`.

        prompt: its text (see `encode`) or token ids. max_tokens None becomes the room that the prompt leaves. Bad words become token ids.
        Structured outputs become a checked grammar, which may take two seconds. Raises `SamplingParamsError`, `PromptTooLongError` or
        `TokenizerError`.
        """
        if isinstance(prompt, (str, ChatText)):
            prompt = self.encode(
                prompt,
                add_special_tokens=add_special_tokens,
                truncate=params.truncate_prompt_tokens,
                max_tokens=params.max_tokens,
                truncation_side=params.truncation_side,
                pair=pair,
            )
        params.verify()
        self._check_ids(params)
        prompt_ids = self._truncate(list(prompt), params)
        self._check_prompt(prompt_ids)
        is_source = self.info.max_source_len is not None
        room = self.limit - len(self.info.decoder_start if is_source else prompt_ids)
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if is_source and params.prompt_logprobs is not None:
            raise SamplingParamsError(
                "prompt_logprobs", "The model's encoder reads the prompt, whose tokens have no log-probabilities: leave them out."
            )
        if wanted > room or len(prompt_ids) > self.prompt_limit:
            raise PromptTooLongError(self._too_long(str(len(prompt_ids)), params.max_tokens))
        if params.stop or params.bad_words:
            self.require_tokenizer("stop strings and bad words")
        if params.stop and not params.detokenize:
            raise SamplingParamsError("stop", "Stop strings need detokenize=True, since they are searched in the text.")
        max_tokens = room if params.max_tokens is None else params.max_tokens
        changes: dict[str, object] = {"max_tokens": max_tokens}
        if params.min_tokens > room:
            raise SamplingParamsError(
                "min_tokens", f"min_tokens is {params.min_tokens}, but the prompt leaves room for only {room} tokens."
            )
        if params.structured_outputs is not None:
            changes["structured_outputs"] = self._checked(params.structured_outputs)
        if params.bad_words:
            words = self._bad_words(params.bad_words)
            changes["bad_words_token_ids"] = [word for word in words if len(word) <= max_tokens]  # longer ones cannot occur
        return prompt_ids, msgspec.structs.replace(params, **changes)

    def place(
        self,
        prompt: str | ChatText | Sequence[int],
        media: Sequence[PreparedMedia],
        processor: MediaProcessor,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[MediaItem], SamplingParams]:
        """A prompt's token ids with its media in their places and the parameters, for `prepare`, and the items for the engine.

        Raises as `encode` does, and `MediaError`; and `SamplingParamsError` if the prompt is to be truncated.
        """
        if media and params.truncate_prompt_tokens not in (None, -1):
            raise SamplingParamsError(
                "truncate_prompt_tokens", "A prompt with images or videos cannot be truncated: leave out truncate_prompt_tokens."
            )
        ids = self.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, (str, ChatText)) else prompt
        ids = processor.with_placeholders(ids, media)
        tokens, items = place_media(ids, media, processor.placeholders, three_rows=processor.three_rows)
        return tokens, items, msgspec.structs.replace(params, truncate_prompt_tokens=None) if items else params

    def engine_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        step_data: StepData | None = None,
        lora: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
    ) -> EngineRequest:
        """The engine request for a prompt and parameters that `prepare` has returned."""
        eos = self.tokenizer.eos_token_ids if self.tokenizer is not None else []
        structured = params.structured_outputs
        # A complete structured output ends in any case.
        ignores_eos = params.ignore_eos and (structured is None or structured.is_free)
        stops = list(dict.fromkeys([*params.stop_token_ids, *([] if ignores_eos else eos)]))
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            stop_token_ids=stops,
            eos_token_ids=list(eos),
            arrival_time=time.time(),
            priority=priority,
            cache_salt=cache_salt,
            step_data=step_data or {},
            prefix_key=None if lora is None else f"lora {lora.lora_int_id}",
            lora=lora,
            pooling=pooling,
        )

    def require_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises `ValueError`, which names what needs it, if there is none."""
        if self.tokenizer is None:
            raise ValueError(f"The engine runs without a tokenizer, which is needed for {what}: start it without skip_tokenizer_init.")
        return self.tokenizer

    def _too_long(self, prompt_tokens: str, max_tokens: int | None) -> str:
        if self.info.max_source_len is not None:
            return (
                f"The model's encoder reads {self.prompt_limit} tokens at most and its decoder gives "
                f"{self.limit - len(self.info.decoder_start)}, but the prompt has {prompt_tokens} and {max_tokens} were requested: "
                "shorten the prompt or lower max_tokens."
            )
        asked = "at least 1 token" if max_tokens is None else f"{max_tokens} tokens"
        whose = "This model's maximum context length is"
        if self.limit < self.info.max_model_len:
            whose = f"The model's maximum context length is {self.info.max_model_len}, the whole KV cache holds"
        return (
            f"{whose} {self.limit} tokens, but the prompt has {prompt_tokens} tokens and "
            f"{asked} of completion were requested: shorten the prompt or lower max_tokens."
        )

    def _checked(self, structured: StructuredOutputsParams) -> StructuredOutputsParams:
        tokenizer = self.require_tokenizer("structured output")
        if not tokenizer.eos_token_ids:
            raise SamplingParamsError(
                "structured_outputs", "structured_outputs needs an end-of-sequence id, which the tokenizer does not have."
            )
        if structured.compiled is not None:
            return structured
        from compile_and_serve.runtime.structured.checker import grammar_checker  # slow to import
        from compile_and_serve.runtime.structured.grammar import ANY_TEXT, forms_of

        is_free = structured.thinking_token_budget is not None and not forms_of(structured)
        if not all(structured.begins_after):
            raise SamplingParamsError("structured_outputs", "structured_outputs.begins_after must not hold empty lists.")
        try:
            grammar = ANY_TEXT if is_free else grammar_checker().check(structured, tokenizer.special_texts)
        except GrammarError as error:
            raise SamplingParamsError("structured_outputs", f"structured_outputs: {error}.") from error
        return StructuredOutputsParams(
            compiled=grammar,
            begins_after=structured.begins_after,
            thinking_token_budget=structured.thinking_token_budget if structured.begins_after else None,
            thinking_starts=structured.thinking_starts,
            may_end_before=structured.may_end_before,
            is_free=is_free,
        )

    def _check_ids(self, params: SamplingParams) -> None:
        verify_token_ids(params, params.stop_token_ids, self.info.vocab_size)
        verify_logprobs(params, self.info.max_logprobs, self.info.vocab_size)
        wrong = {token_id: bias for token_id, bias in (params.logit_bias or {}).items() if not -100.0 <= bias <= 100.0}
        if wrong:
            names = ", ".join(f"logit_bias[{token_id}]" for token_id in wrong)
            values = ", ".join(str(bias) for bias in wrong.values())
            raise SamplingParamsError("logit_bias", f"{names:.400} must be in [-100, 100], got {values:.400}.")

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise SamplingParamsError("prompt", "The prompt is empty, but it must have at least one token.")
        vocab = self.info.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            wrong = next(token_id for token_id in prompt if not 0 <= token_id < vocab)
            raise SamplingParamsError("prompt", f"The prompt has token id {wrong}, but the model's ids are 0 to {vocab - 1}.")

    def _truncate(self, prompt: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return prompt
        limit = self.prompt_limit
        if keep == -1:
            taken = 1 if params.max_tokens is None else params.max_tokens
            keep = limit if self.info.max_source_len is not None else max(limit - taken, 1)
        elif keep > limit:
            raise SamplingParamsError(
                "truncate_prompt_tokens", f"truncate_prompt_tokens is {keep}, but the model's limit is {limit} tokens."
            )
        return prompt[-keep:] if params.truncation_side == "left" else prompt[:keep]

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences of each word, at the start of a text and after a space."""
        tokenizer = self.require_tokenizer("bad words")
        # Lower bounds, before tokenizing takes time.
        verify_bad_words(len(word) // tokenizer.max_token_chars for word in words)
        sequences: list[list[int]] = []
        for word in words:
            plain = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(plain)
            # A variant of another length is the same word after a separate token for the space.
            if spaced != plain and len(spaced) == len(plain):
                sequences.append(spaced)
        verify_bad_words(map(len, sequences))
        return [sequence for sequence in sequences if sequence]
