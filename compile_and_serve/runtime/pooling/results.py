"""Turns pooled rows into embeddings, class scores and similarities on the host, for the server and `LLM`.

Shape legend: N rows of a result (1, except for token_embed), D features or classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from compile_and_serve.runtime.messages import EngineInfo, StepData
from compile_and_serve.runtime.pooling.texts import encode_texts, joined
from compile_and_serve.runtime.pooling_params import Pooled, PoolingInfo, PoolingParams, PoolingTask
from compile_and_serve.runtime.sampling_params import SamplingParams, SamplingParamsError
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.special_text import ChatText

TOKEN_TASKS: tuple[PoolingTask, ...] = ("token_embed", "token_classify")  # their results have a row for each token


class UnsupportedTaskError(ValueError):
    """The model cannot do what was asked for (HTTP 501). The message is one sentence."""


def check_task(task: PoolingTask, info: EngineInfo) -> PoolingInfo:
    """The engine's pooling if it does `task`. Raises `UnsupportedTaskError`."""
    pooling = info.pooling
    if pooling is not None and task in pooling.tasks:
        return pooling
    does = "generates text; start it with --runner pooling" if pooling is None else f"does {', '.join(pooling.tasks)}"
    raise UnsupportedTaskError(f"This model cannot do the task {task}: it {does}.")


def check_generates(info: EngineInfo) -> None:
    """Raise `UnsupportedTaskError` if the engine generates no text."""
    if info.pooling is not None:
        raise UnsupportedTaskError(f"This model generates no text: it does {', '.join(info.pooling.tasks)} (see --runner).")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt for the engine. step_data: as in `EngineRequest`."""

    token_ids: list[int]
    sampling: SamplingParams
    step_data: StepData


Prompts = Sequence[tuple[str | Sequence[int], str | None]]  # a text or token ids, with the second text of a pair or None


def prepare(inputs: InputProcessor, prompts: Prompts, params: PoolingParams, *, add_special_tokens: bool = True) -> list[PreparedPrompt]:
    """Prompts for the engine. A classifier of pairs takes pairs. Raises `SamplingParamsError`, `PromptTooLongError` or `TokenizerError`."""
    pooling = inputs.info.pooling
    assert pooling is not None, "check_task comes first"
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, pooling)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=0,
        detokenize=False,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side=params.truncation_side,
    )
    prefix = _prefix(params, pooling)
    ready = [(prefix + prompt if isinstance(prompt, str) and pair is None else prompt, pair) for prompt, pair in prompts]
    texts = [(prompt, pair) for prompt, pair in ready if isinstance(prompt, str)] if pooling.keeps_specials else []
    encoded = iter(
        encode_texts(
            inputs,
            texts,
            add_special_tokens=add_special_tokens,
            truncate=params.truncate_prompt_tokens,
            truncation_side=params.truncation_side,
        )
        if texts
        else ()
    )
    found: list[PreparedPrompt] = []
    for given, pair in ready:
        prompt: str | ChatText | Sequence[int] = given
        step_data: StepData = {}
        if isinstance(prompt, str) and pooling.keeps_specials:
            (prompt, step_data), pair = next(encoded), None
        elif isinstance(prompt, str) and pair is not None and pooling.pair_template is not None:
            prompt, pair = joined(pooling.pair_template, prompt, pair), None
        found.append(PreparedPrompt(*inputs.prepare(prompt, sampling, add_special_tokens=add_special_tokens, pair=pair), step_data))
    return found


def _check_dimensions(dimensions: int, pooling: PoolingInfo) -> None:
    if not (pooling.kind == "embed" and 1 <= dimensions <= pooling.width):
        limits = f"in [1, {pooling.width}]" if pooling.kind == "embed" else "left out for a classifier"
        raise SamplingParamsError("dimensions", f"dimensions must be {limits}, got {dimensions}.")
    if pooling.dimensions and dimensions not in pooling.dimensions:
        known = ", ".join(map(str, pooling.dimensions))
        raise SamplingParamsError("dimensions", f"dimensions is {dimensions}, but the model's embeddings can be cut to {known}.")


def _prefix(params: PoolingParams, pooling: PoolingInfo) -> str:
    """What the checkpoint puts before a text. Raises `SamplingParamsError` for a name that it does not have."""
    name = pooling.default_prompt if params.prompt_name is None else params.prompt_name
    if name is None:
        return ""
    if name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        raise SamplingParamsError("prompt_name", f"prompt_name is {name!r:.100}, but the model's prompts are: {known}.")
    return pooling.prompts[name]


def rows_of(pooled: Pooled, params: PoolingParams, info: PoolingInfo) -> np.ndarray:
    """The result of a request: float32 [N, D]. Embeddings are cut to `dimensions` and normalized, class logits become scores."""
    rows_ND = np.frombuffer(pooled.data, dtype=np.float32).reshape(pooled.rows, -1)
    if params.dimensions is not None:
        rows_ND = rows_ND[:, : params.dimensions]
    if not params.use_activation:
        return rows_ND
    if info.kind == "embed":
        if not info.is_normalized:
            return rows_ND
        norms_N1 = np.linalg.norm(rows_ND.astype(np.float64), axis=1, keepdims=True)
        return (rows_ND / np.maximum(norms_N1, 1e-12)).astype(np.float32)
    return activate(rows_ND, info)


def activate(logits_ND: np.ndarray, info: PoolingInfo) -> np.ndarray:
    """Scores of class logits: float32 [N, D]."""
    if info.activation == "none":
        return logits_ND
    if info.activation == "sigmoid":
        return (0.5 * (1 + np.tanh(0.5 * logits_ND.astype(np.float64)))).astype(np.float32)
    powers_ND = np.exp(logits_ND.astype(np.float64) - logits_ND.max(axis=1, keepdims=True))
    return (powers_ND / powers_ND.sum(axis=1, keepdims=True)).astype(np.float32)


def similarity(first_ND: np.ndarray, second_ND: np.ndarray, info: PoolingInfo) -> float:
    """Of two texts: the cosine of their embeddings, or, in late interaction, the sum over the first one's tokens of the largest product
    with one of the second one's (arXiv:2004.12832)."""
    if info.is_late:
        return float((first_ND @ second_ND.T).max(axis=1).sum())
    return cosine(first_ND[0], second_ND[0])


def with_roles(pairs: Sequence[tuple[str, str]], info: PoolingInfo) -> list[tuple[str, str]]:
    """Pairs of texts as the model compares them. Late interaction has a prompt for queries and one for documents, or none."""
    if not info.is_late:
        return list(pairs)
    return [(info.prompts.get("query", "") + first, info.prompts.get("document", "") + second) for first, second in pairs]


def cosine(first_D: np.ndarray, second_D: np.ndarray) -> float:
    """Cosine similarity of two vectors."""
    first, second = first_D.astype(np.float64), second_D.astype(np.float64)
    return float(first @ second / max(float(np.linalg.norm(first) * np.linalg.norm(second)), 1e-12))


def with_rows(params: PoolingParams, task: PoolingTask) -> PoolingParams:
    """The parameters of a task: those of tokens take all rows."""
    return msgspec.structs.replace(params, pooling="all") if task in TOKEN_TASKS else params
