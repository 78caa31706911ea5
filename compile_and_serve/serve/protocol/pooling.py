"""Bodies of the routes for embeddings, pooling, classes, scores and reranking."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from compile_and_serve.runtime.pooling_params import PoolingParams
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.protocol.completions import PROMPT_SCHEMA, prompts_of
from compile_and_serve.serve.protocol.fields import MAX_ID, RequestModel, Strings

EXAMPLE: dict[str, Any] = {"input": ["The capital of France", "Paris"]}
MAX_INPUTS = 2048  # of one request, as in OpenAI's API


class PoolingFields(RequestModel):
    """Fields that all these requests share. None means the default."""

    truncate_prompt_tokens: int | None = Field(default=None, description="Keep only this many tokens; -1: as many as fit.")
    truncation_side: Literal["left", "right"] | None = Field(default=None, description="Where tokens are cut off; by default left.")
    add_special_tokens: bool | None = True
    request_id: str | None = Field(default=None, max_length=MAX_ID)
    priority: int | None = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_ID)
    prompt_name: str | None = Field(
        default=None,
        max_length=MAX_ID,
        description="Which of the checkpoint's prompts is put before each text; by default the checkpoint's own.",
    )
    user: str | None = Field(default=None, description="Who of the API key's users it is, for --fair-by-user.")
    use_activation: bool | None = Field(default=None, description="Normalize embeddings, turn class logits into scores; true by default.")

    def params(self) -> PoolingParams:
        """The engine's parameters."""
        return PoolingParams(
            use_activation=self.use_activation is not False,
            prompt_name=self.prompt_name,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
        )


class InputFields(PoolingFields):
    """One or more inputs, each pooled by itself."""

    # A union type would try each of its four forms on every token id.
    input: Any = Field(
        default=None, description="A text, a list of texts, a list of token ids, or a list of such lists.", json_schema_extra=PROMPT_SCHEMA
    )
    texts: Strings | None = Field(default=None, description="Another name of input.")

    def inputs(self) -> list[str | list[int]]:
        """The list of inputs. Raises a 400 for any other form."""
        name = "texts" if self.input is None and self.texts is not None else "input"
        if (given := getattr(self, name)) is None:
            raise ApiError(400, "The field input is missing.", "input")
        found = prompts_of(given, name)
        if len(found) > MAX_INPUTS:
            raise ApiError(400, f"{name} has {len(found)} elements, but may have {MAX_INPUTS}.", name)
        return found


class EmbeddingRequest(InputFields):
    """OpenAI's embedding request with vLLM's additions."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    encoding_format: Literal["float", "base64"] | None = Field(default="float", description="base64: little-endian float32.")
    dimensions: int | None = Field(default=None, description="Cut the embedding to this many numbers, then normalize it.")
    normalize: bool | None = Field(default=None, description="false: as the model computed it.")

    def params(self) -> PoolingParams:
        shared = super().params()
        return PoolingParams(
            use_activation=shared.use_activation and self.normalize is not False,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            truncate_prompt_tokens=shared.truncate_prompt_tokens,
            truncation_side=shared.truncation_side,
        )


class PoolingRequest(EmbeddingRequest):
    """`/pooling`: any task of the model."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        default=None, description="By default what the model does: embed, classify or token_classify."
    )


class ClassifyRequest(InputFields):
    """`/classify`."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})


class SparseRequest(InputFields):
    """`/embed_sparse`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "the sea"}]})

    inputs_: Any = Field(default=None, alias="inputs", description="Another name of input.", json_schema_extra=PROMPT_SCHEMA)

    def inputs(self) -> list[str | list[int]]:
        if self.input is None and self.inputs_ is not None:
            self.input = self.inputs_
        return super().inputs()


class ScoreRequest(PoolingFields):
    """`/score`: one text with many, or as many with as many."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text_1": "a cat", "text_2": ["a dog", "the sea"]}]})

    text_1: str | Strings | None = None
    text_2: str | Strings | None = None
    queries: str | Strings | None = Field(default=None, description="Another name of text_1.")
    documents: str | Strings | None = Field(default=None, description="Another name of text_2.")

    def texts(self) -> tuple[str | list[str], str | list[str]]:
        """Both sides. Raises a 400 if one is missing."""
        first = self.text_1 if self.text_1 is not None else self.queries
        second = self.text_2 if self.text_2 is not None else self.documents
        if first is None or second is None:
            name = "text_1" if first is None else "text_2"
            raise ApiError(400, f"The field {name} is missing.", name)
        return first, second


class RerankRequest(PoolingFields):
    """`/rerank`, as in Jina's and Cohere's API with `documents`, and as in Text Embeddings Inference with `texts`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "a cat", "documents": ["a dog", "the sea"]}]})

    query: str
    # A union type would give two errors for every wrong element.
    documents: Any = Field(
        default=None,
        description='Texts, or objects with "text".',
        json_schema_extra={"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}},
    )
    top_n: int | None = Field(default=None, ge=0, description="Return only the best top_n documents; 0 or null: all.")
    return_documents: bool | None = True
    texts: Strings | None = Field(default=None, description="Instead of documents. The answer is then a list of indices and scores.")
    return_text: bool | None = Field(default=False, description="Of `texts`: return each text with its score.")
    raw_scores: bool | None = Field(default=False, description="Of `texts`: scores as the model computed them.")
    truncate: bool | None = Field(default=False, description="Of `texts`: cut off what does not fit.")
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(default="right", description="Where `truncate` cuts.")

    def params(self) -> PoolingParams:
        if self.texts is None:
            return super().params()
        return PoolingParams(
            use_activation=not self.raw_scores,
            truncate_prompt_tokens=-1 if self.truncate else self.truncate_prompt_tokens,
            truncation_side="left" if (self.truncation_direction or "right").lower() == "left" else "right",
        )

    def documents_texts(self) -> list[str]:
        """The documents' texts. Raises a 400 for another form."""
        if self.documents is not None and self.texts is not None:
            raise ApiError(400, "Give either documents or texts.", "texts")
        if self.texts is not None:
            if not self.texts:
                raise ApiError(400, "texts must be a list of texts.", "texts")
            return self.texts
        if self.documents is None:
            raise ApiError(400, "The field documents is missing.", "documents")
        given = self.documents if isinstance(self.documents, list) else []
        texts = [one.get("text") if isinstance(one, dict) else one for one in given]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ApiError(400, 'documents must be a list of texts or of objects with "text".', "documents")
        return [str(text) for text in texts]
