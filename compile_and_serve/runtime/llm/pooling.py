"""`LLM.embed`, `encode`, `classify`, `reward` and `score`. Names and results are those of vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from compile_and_serve.runtime.pooling.results import TOKEN_TASKS, check_task, prepare, rows_of, similarity, with_roles, with_rows
from compile_and_serve.runtime.pooling_params import Pooled, PoolingParams, PoolingTask

if TYPE_CHECKING:
    import torch

    from compile_and_serve.runtime.engine.client import SyncEngine
    from compile_and_serve.runtime.engine.sync_replicas import SyncReplicas
    from compile_and_serve.runtime.lora.request import LoRARequest
    from compile_and_serve.runtime.messages import StepData
    from compile_and_serve.runtime.sampling_params import SamplingParams
    from compile_and_serve.runtime.text.input_processor import InputProcessor


PREPARED = 64  # prompts prepared at once while a device computes others


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
    engine: SyncEngine | SyncReplicas

    @abstractmethod
    def _pool(
        self,
        prompts: Iterable[PooledPrompt],
        count: int,
        lora_request: Any,
        convert: Callable[[np.ndarray], Output],
        *,
        show_progress: bool,
    ) -> list[PoolingRequestOutput[Output]]:
        """Of each of `count` prompts, what `convert` makes of its rows, float32 [N, D]."""

    def embed(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True, lora_request: LoRARequest | None = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding of every prompt, normalized unless the parameters say otherwise.

        prompts: as in `generate`. Raises `UnsupportedTaskError` if the model was not loaded for embeddings, and the other errors of
        `generate`, those of a wrong prompt perhaps only when other prompts have run.
        """
        return self._run_pooling(prompts, "embed", pooling_params, lora_request, use_tqdm, lambda rows: EmbeddingOutput(rows[0].tolist()))

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

        def convert(rows: np.ndarray) -> PoolingOutput:
            return PoolingOutput(torch.from_numpy(rows.copy() if pooling_task in TOKEN_TASKS else rows[0].copy()))

        return self._run_pooling(prompts, pooling_task, pooling_params, lora_request, use_tqdm, convert)

    def classify(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True, lora_request: LoRARequest | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The scores of a classifier's classes."""
        return self._run_pooling(
            prompts, "classify", pooling_params, lora_request, use_tqdm, lambda rows: ClassificationOutput(rows[0].tolist())
        )

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
            prompts = self._prepared([first for first, _ in pairs], params, [second for _, second in pairs])
            return self._pool(prompts, len(pairs), lora_request, lambda rows: ScoringOutput(float(rows[0, 0])), show_progress=use_tqdm)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        found = self._pool(self._prepared(texts, params), len(texts), lora_request, lambda rows: rows, show_progress=use_tqdm)
        by_text = dict(zip(texts, found, strict=True))
        outputs = []
        for number, (first, second) in enumerate(pairs):
            one, other = by_text[first], by_text[second]
            ids = [*one.prompt_token_ids, *other.prompt_token_ids]
            outputs.append(PoolingRequestOutput(str(number), ids, ScoringOutput(similarity(one.outputs, other.outputs, pooling))))
        return outputs

    def _prepared(self, prompts: Sequence[Any], params: PoolingParams, pairs: Sequence[str] | None = None) -> Iterator[PooledPrompt]:
        """Prompts for the engine, some of which the device computes while the next ones are prepared. pairs: the second text of each."""
        size = PREPARED if self.engine.tokens_ahead else max(1, len(prompts))
        for begin in range(0, len(prompts), size):
            part = slice(begin, begin + size)
            yield from self._pooled_prompts(prompts[part], params, None if pairs is None else pairs[part])

    def _pooled_prompts(
        self, prompts: Sequence[Any], params: PoolingParams, pairs: Sequence[str | None] | None = None
    ) -> list[PooledPrompt]:
        """pairs: the second text of each prompt."""
        texts = [prompt if isinstance(prompt, str) else prompt.get("prompt") for prompt in prompts]
        given = [prompt if isinstance(prompt, str) else prompt["prompt_token_ids"] for prompt in prompts]
        ready = prepare(self._inputs, list(zip(given, pairs or [None] * len(given), strict=True)), params)
        return [PooledPrompt(text, one.token_ids, one.sampling, one.step_data, params) for text, one in zip(texts, ready, strict=True)]

    def _run_pooling(
        self,
        prompts: Any,
        task: PoolingTask,
        params: PoolingParams | None,
        lora_request: Any,
        show_progress: bool,
        convert: Callable[[np.ndarray], Output],
    ) -> list[PoolingRequestOutput[Output]]:
        """convert: rows of a prompt, float32 [N, D] → its output."""
        check_task(task, self._inputs.info)
        params = with_rows(params or PoolingParams(), task)
        many = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        return self._pool(self._prepared(many, params), len(many), lora_request, convert, show_progress=show_progress)

    def _converted(self, params: PoolingParams, convert: Callable[[np.ndarray], Output], pooled: Pooled) -> Output:
        info = self._inputs.info.pooling
        assert info is not None
        return convert(rows_of(pooled, params, info))


def pairs_of(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of texts: one with each of many, or as many with as many. Raises `ValueError` for other numbers."""
    first = [data_1] if isinstance(data_1, str) else list(data_1)
    second = [data_2] if isinstance(data_2, str) else list(data_2)
    if len(first) == 1:
        first *= len(second)
    if not first or len(first) != len(second):
        raise ValueError(f"There are {len(first)} texts to compare with {len(second)}: give one with many, or as many with as many.")
    return list(zip(first, second, strict=True))
