"""`LLM.embed`, `encode`, `classify`, `reward` and `score`. Names and results are those of vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from compile_and_serve.runtime.pooling.results import TOKEN_TASKS, check_task, prepare, rows_of, similarity, with_roles, with_rows
from compile_and_serve.runtime.pooling_params import PoolingParams, PoolingTask

if TYPE_CHECKING:
    import torch

    from compile_and_serve.runtime.lora.request import LoRARequest
    from compile_and_serve.runtime.messages import StepData
    from compile_and_serve.runtime.sampling_params import SamplingParams
    from compile_and_serve.runtime.text.input_processor import InputProcessor


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt for the engine. prompt: its text, if known."""

    prompt: str | None
    token_ids: list[int]
    sampling: SamplingParams
    step_data: StepData
    pooling: PoolingParams


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """data: float32 [D], or [T, D] of the tasks of tokens."""

    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Output]):
    """A prompt and its result."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Output
    finished: bool = True


class PoolingMethods(ABC):
    """The part of `LLM` for models that pool."""

    _inputs: InputProcessor

    @abstractmethod
    def _pool(self, prompts: list[PooledPrompt], lora_request: Any, *, show_progress: bool) -> list[tuple[str, np.ndarray]]:
        """(request id, float32 [N, D]) of each prompt."""

    def embed(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True, lora_request: LoRARequest | None = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding of every prompt, normalized unless the parameters say otherwise.

        prompts: as in `generate`. Raises `UnsupportedTaskError` if the model was not loaded for embeddings, and the other errors of
        `generate`.
        """
        found = self._run_pooling(prompts, "embed", pooling_params, lora_request, use_tqdm)
        return [PoolingRequestOutput(i, ids, EmbeddingOutput(rows[0].tolist())) for i, ids, rows in found]

    def encode(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | None = None,
        pooling_task: PoolingTask = "token_embed",
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model pools of every prompt, as tensors: by default an embedding of each token."""
        import torch

        found = self._run_pooling(prompts, pooling_task, pooling_params, lora_request, use_tqdm)
        outputs = []
        for request_id, ids, rows in found:
            data = torch.from_numpy(rows.copy() if pooling_task in TOKEN_TASKS else rows[0].copy())
            outputs.append(PoolingRequestOutput(request_id, ids, PoolingOutput(data)))
        return outputs

    def classify(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True, lora_request: LoRARequest | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The scores of a classifier's classes."""
        found = self._run_pooling(prompts, "classify", pooling_params, lora_request, use_tqdm)
        return [PoolingRequestOutput(i, ids, ClassificationOutput(rows[0].tolist())) for i, ids, rows in found]

    def reward(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True, lora_request: LoRARequest | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a reward model gives: of each token [T, classes], or of the whole prompt [classes]. Raw by default."""
        info = self._inputs.info.pooling
        task: PoolingTask = "classify" if info is not None and "classify" in info.tasks else "token_classify"
        params = pooling_params or PoolingParams(use_activation=False)
        return self.encode(prompts, pooling_params=params, pooling_task=task, use_tqdm=use_tqdm, lora_request=lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The similarity of pairs of texts: one text with many, or as many with as many.

        The cosine of their embeddings, of late interaction the sum of the largest products of tokens, or the score of a classifier with a
        single class. prompt_token_ids are both texts' tokens.
        """
        pooling, params = check_task("score", self._inputs.info), pooling_params or PoolingParams()
        pairs = with_roles(pairs_of(data_1, data_2), pooling)
        if pooling.kind == "classify":
            prompts = self._pooled_prompts([first for first, _ in pairs], params, [second for _, second in pairs])
            found = self._pool(prompts, lora_request, show_progress=use_tqdm)
            return [
                PoolingRequestOutput(request_id, prompt.token_ids, ScoringOutput(float(rows[0, 0])))
                for prompt, (request_id, rows) in zip(prompts, found, strict=True)
            ]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        prompts = self._pooled_prompts(texts, params)
        found = self._pool(prompts, lora_request, show_progress=use_tqdm)
        by_text = {text: (rows, prompt) for text, prompt, (_, rows) in zip(texts, prompts, found, strict=True)}
        outputs = []
        for number, (first, second) in enumerate(pairs):
            (first_ND, one), (second_ND, other) = by_text[first], by_text[second]
            ids = [*one.token_ids, *other.token_ids]
            outputs.append(PoolingRequestOutput(str(number), ids, ScoringOutput(similarity(first_ND, second_ND, pooling))))
        return outputs

    def _pooled_prompts(
        self, prompts: Sequence[Any], params: PoolingParams, pairs: Sequence[str | None] | None = None
    ) -> list[PooledPrompt]:
        """pairs: the second text of each prompt."""
        texts = [prompt if isinstance(prompt, str) else prompt.get("prompt") for prompt in prompts]
        given = [prompt if isinstance(prompt, str) else prompt["prompt_token_ids"] for prompt in prompts]
        ready = prepare(self._inputs, list(zip(given, pairs or [None] * len(given), strict=True)), params)
        return [PooledPrompt(text, one.token_ids, one.sampling, one.step_data, params) for text, one in zip(texts, ready, strict=True)]

    def _run_pooling(
        self, prompts: Any, task: PoolingTask, params: PoolingParams | None, lora_request: Any, show_progress: bool
    ) -> list[tuple[str, list[int], np.ndarray]]:
        check_task(task, self._inputs.info)
        params = with_rows(params or PoolingParams(), task)
        many = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        prepared = self._pooled_prompts(many, params)
        found = self._pool(prepared, lora_request, show_progress=show_progress)
        return [(i, prompt.token_ids, rows) for prompt, (i, rows) in zip(prepared, found, strict=True)]

    def _rows(self, pooled: Any, params: PoolingParams) -> np.ndarray:
        info = self._inputs.info.pooling
        assert info is not None
        return rows_of(pooled, params, info)


def pairs_of(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of texts: one with each of many, or as many with as many. Raises `ValueError` for other numbers."""
    first = [data_1] if isinstance(data_1, str) else list(data_1)
    second = [data_2] if isinstance(data_2, str) else list(data_2)
    if len(first) == 1:
        first *= len(second)
    if not first or len(first) != len(second):
        raise ValueError(f"There are {len(first)} texts to compare with {len(second)}: give one with many, or as many with as many.")
    return list(zip(first, second, strict=True))
