"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.http.responses import json_response

router = APIRouter(tags=["OpenAI"])

# OpenAI's API had this list once. Clients of vLLM, which kept it, read it.
_PERMISSION = {
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


@router.get("/v1/models", summary="Models of this server")
async def list_models(context: Context) -> Response:
    """Every name that a request may give in `model`."""
    names = [*context.settings.served_model_names, *context.adapters.names]
    return json_response({"object": "list", "data": [_model(name, context) for name in names]})


@router.get("/v1/models/{model_id:path}", summary="One model", responses={404: {"description": "No such model"}})
async def retrieve_model(model_id: str, context: Context) -> Response:
    """One model's card, with its longest sequence in tokens."""
    name, _ = context.adapters.check_model(model_id)
    return json_response(_model(name, context))


def _model(name: str, context: ServerContext) -> dict[str, Any]:
    base = context.settings.served_model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "compile-and-serve",
        "root": base,
        "parent": None if context.adapters.get(name) is None else base,
        "max_model_len": context.inputs.info.max_model_len,
        "permission": [{"id": f"modelperm-{name}", "object": "model_permission", "created": context.started, **_PERMISSION}],
    }
