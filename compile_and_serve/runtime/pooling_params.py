"""What a request for an embedding or for class scores asks the engine for. This file imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

RowPooling = Literal["last", "mean", "cls", "max", "all"]
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]


class PoolingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Options of one pooling request.

    pooling: which of the prompt's rows become the result: the last, their mean, the first, the largest of each
        feature, or all of them; None is the engine's default.
    dimensions: length to which an embedding is cut before it is normalized (Matryoshka embeddings).
    use_activation: normalize embeddings to length 1, turn class logits into scores.
    prompt_name: of the checkpoint's prompts (`PoolingInfo.prompts`), the one that is put before a text; None is the checkpoint's default.
    truncate_prompt_tokens, truncation_side: as in `SamplingParams`. A model that reads whole prompts keeps its special tokens.
    """

    pooling: RowPooling | None = None
    dimensions: int | None = None
    use_activation: bool = True
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"

    @property
    def reads_all_tokens(self) -> bool:
        """Whether rows of early tokens are needed, which the prefix cache does not have."""
        return self.pooling not in (None, "last")


class PoolingInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What an engine pools.

    kind: "embed" gives hidden states, "classify" logits of classes. width: numbers per row. pooling: of requests that name none.
    activation: turns class logits into scores. labels: names of the classes, or nothing. is_normalized: embeddings have length 1, unless a
    request says otherwise. prompts: by name, what is put before a text. default_prompt: the name for requests without one. keeps_specials:
    a text that is cut keeps its special tokens. dimensions: lengths to which embeddings may be cut; none: any. pair_template: the prompt of
    two texts, with {query} and {document}; None: the tokenizer joins them.
    """

    kind: Literal["embed", "classify"]
    width: int
    pooling: RowPooling = "last"
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    labels: list[str] = []
    is_normalized: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    keeps_specials: bool = False
    dimensions: list[int] = []
    pair_template: str | None = None

    @property
    def is_late(self) -> bool:
        """Whether texts are compared token by token (late interaction, ColBERT)."""
        return self.kind == "embed" and self.pooling == "all"

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What requests may ask for. A classifier of pairs has a single class."""
        if self.is_late:
            return ("token_embed", "score")
        if self.kind == "embed":
            return ("embed", "token_embed", "score")
        if self.pooling == "all":
            return ("token_classify",)
        return ("classify", "score") if self.width == 1 else ("classify",)


class Pooled(msgspec.Struct, array_like=True):
    """The result of a request: float32 [rows, width] in the machine's byte order."""

    rows: int
    data: bytes
