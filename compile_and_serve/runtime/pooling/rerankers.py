"""Rerankers that are decoders: the score of a pair of texts is how much likelier one answer ("yes") is than another ("no").

config.json, or --hf-overrides, names the answers in `classifier_from_token`: the negative and the positive one, or the positive one alone.
sentence-transformers' module `LogitScore` says the same by token ids. `pair_template` is the prompt, with {query} and {document}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_and_serve.runtime.config import ModelConfig
from compile_and_serve.runtime.pooling.files import PoolingFilesError, logit_score_ids
from compile_and_serve.runtime.pooling.texts import PAIR_PARTS

_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that '
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def with_answers(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The config with `classifier_token_ids`, the ids of its answers, if it is a reranker's. Raises `PoolingFilesError`."""
    if (ids := logit_score_ids(model)) is not None:
        return {**config, "classifier_token_ids": ids}
    answers = config.get("classifier_from_token")
    if answers is None:
        return dict(config)
    if not isinstance(answers, list) or len(answers) not in (1, 2) or not all(isinstance(one, str) for one in answers):
        raise PoolingFilesError(f"classifier_from_token must be a list of one or two tokens, got {answers!r:.100}.")
    import tokenizers

    file = model.path / "tokenizer.json"
    if not file.is_file():
        raise PoolingFilesError(f"classifier_from_token needs the tokenizer of the model, but there is no {file}.")
    vocabulary = tokenizers.Tokenizer.from_file(str(file))
    found = {answer: vocabulary.token_to_id(answer) for answer in answers}
    for answer, token_id in found.items():
        if token_id is None:
            raise PoolingFilesError(f"classifier_from_token names {answer!r:.100}, which is no token of the model.")
    return {**config, "classifier_token_ids": [found[answer] for answer in answers]}


def pair_template(config: Mapping[str, Any]) -> str | None:
    """The prompt of a pair of texts; None: the tokenizer joins them. Raises `PoolingFilesError`."""
    if "classifier_token_ids" not in config:
        return None
    template = config.get("pair_template", _QWEN3 if config.get("model_type") == "qwen3" else None)
    if not isinstance(template, str) or not {"{query}", "{document}"} <= set(PAIR_PARTS.findall(template)):
        raise PoolingFilesError(
            "A reranker that is a decoder needs its prompt: set pair_template with --hf-overrides, a text with {query} and {document}."
        )
    return template
