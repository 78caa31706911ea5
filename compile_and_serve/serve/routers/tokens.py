"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.text.special_text import ChatText
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.errors import ApiError, user_errors
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.http.responses import json_response
from compile_and_serve.serve.protocol.fields import check_fields
from compile_and_serve.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from compile_and_serve.serve.routers.common import ERROR_RESPONSES

router = APIRouter(tags=["Utility"], route_class=JsonRoute)
MAX_CHARACTERS = 1 << 19  # of a text; tokenizing takes about 100 bytes per character


def check_length(text: str, param: str) -> None:
    """Raise a 413 for a text that is too long to be tokenized here."""
    if len(text) > MAX_CHARACTERS:
        raise ApiError(413, f"The text has {len(text)} characters, but at most {MAX_CHARACTERS} are accepted here.", param)


@router.post("/tokenize", summary="Text to token ids", responses=ERROR_RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request, context: Context) -> Response:
    """Token ids of a prompt, or of a conversation as the chat endpoint renders it."""
    context.adapters.check_model(body.model)
    check_fields(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", "prompt")
    return await context.bodies.run(request, lambda: _tokenize(body, context), renders=body.messages is not None)


def _tokenize(body: TokenizeRequest, context: ServerContext) -> Response:
    with user_errors():
        tokenizer = context.inputs.require_tokenizer("tokenize")
        if body.prompt is not None:
            text, add = ChatText(body.prompt), body.add_special_tokens is not False
        else:
            text = context.prompts.render(body, context.prompts.tool_use(body, only_prompt=True))
            add = bool(body.add_special_tokens)
    check_length(text.text, "messages" if body.prompt is None else "prompt")
    with user_errors():
        ids = tokenizer.encode(text, add_special_tokens=add)
    answer = {"count": len(ids), "max_model_len": context.inputs.info.max_model_len, "tokens": ids}
    answer["token_strs"] = [tokenizer.backend.id_to_token(i) for i in ids] if body.return_token_strs else None
    return json_response(answer)


@router.post("/detokenize", summary="Token ids to text", responses=ERROR_RESPONSES)
async def detokenize(body: DetokenizeRequest, request: Request, context: Context) -> Response:
    """The text of token ids. Special tokens are included unless `skip_special_tokens` is true."""
    context.adapters.check_model(body.model)
    check_fields(body)
    return await context.bodies.run(request, lambda: _detokenize(body, context))


def _detokenize(body: DetokenizeRequest, context: ServerContext) -> Response:
    vocab = context.inputs.info.vocab_size
    wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < vocab), None)
    if wrong is not None:
        raise ApiError(400, f"tokens contains the id {wrong!s:.200}, but ids are 0 to {vocab - 1}.", "tokens")
    with user_errors():
        tokenizer = context.inputs.require_tokenizer("detokenize")
    return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))})
