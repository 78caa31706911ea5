"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`. Served only with `--lora-dir`."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Response

from compile_and_serve.serve.admin import AdminRoute
from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.http.responses import json_response
from compile_and_serve.serve.protocol.fields import RequestModel
from compile_and_serve.serve.routers.common import ERROR_RESPONSES


def _check_allowed(context: Context) -> None:
    settings = context.settings
    if not (settings.admin_keys or settings.allow_lora_without_admin_key):
        raise ApiError(403, "This route needs an admin key: the server has none (--admin-api-key, or --allow-lora-without-admin-key).")


router = APIRouter(tags=["Adapters"], route_class=AdminRoute, dependencies=[Depends(_check_allowed)])


class UnloadRequest(RequestModel):
    lora_name: str


class LoadRequest(UnloadRequest):
    """lora_path: a folder that PEFT saved, below the server's --lora-dir; relative to it, or absolute.

    pinned: the adapter keeps its slot on the device from its first use until it is unloaded.
    """

    lora_path: str
    pinned: bool = False


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter", responses=ERROR_RESPONSES)
async def load_adapter(body: LoadRequest, context: Context) -> Response:
    """Make an adapter available as a model. Every replica checks its files first."""
    await context.adapters.load(body.lora_name, body.lora_path, pinned=body.pinned)
    return json_response({"status": "loaded", "id": body.lora_name})


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter", responses=ERROR_RESPONSES)
async def unload_adapter(body: UnloadRequest, context: Context) -> Response:
    """Take no new requests for an adapter. Those in progress finish."""
    await context.adapters.unload(body.lora_name)
    return json_response({"status": "unloaded", "id": body.lora_name})
