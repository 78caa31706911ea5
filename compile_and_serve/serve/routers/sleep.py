"""`/sleep`, `/wake_up`, `/is_sleeping` and `/reset_prefix_cache`. Served only with `--enable-admin-routes`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from compile_and_serve.serve.admin import AdminRoute
from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import ApiError, user_errors
from compile_and_serve.serve.http.responses import json_response

router = APIRouter(tags=["Admin"], route_class=AdminRoute)


@router.post("/sleep", summary="Free the device's memory")
async def sleep(context: Context, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["wait", "abort"] = "wait") -> Response:
    """Free the KV cache and the weights. Level 1 keeps the weights in host memory; level 2 drops them, and waking reads the checkpoint
    again. New requests get 503 at once. Accepted ones finish first, or with mode=abort end with what they have. Answers once the
    memory is free.
    """
    with user_errors():
        await context.engine.sleep(level, abort=mode == "abort")
    return json_response({"is_sleeping": True})


@router.post("/wake_up", summary="Bring the memory back")
async def wake_up(context: Context, tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None) -> Response:
    """Undo /sleep, or for the given tags only. Requests are accepted once weights and KV cache are back."""
    with user_errors():
        await context.engine.wake_up(None if tags is None else list(tags))
    return json_response({"is_sleeping": context.engine.sleeping})


@router.get("/is_sleeping", summary="Whether the server sleeps")
async def is_sleeping(context: Context) -> Response:
    """True from the moment in which new requests are refused."""
    return json_response({"is_sleeping": context.engine.sleeping})


@router.post("/reset_prefix_cache", summary="Forget cached prefixes")
async def reset_prefix_cache(context: Context) -> Response:
    """Forget the KV blocks of earlier requests. 409 while requests hold blocks."""
    answer = await context.engine.client.utility("reset_prefix_cache")
    if not answer["ok"]:
        raise ApiError(409, "Requests hold KV blocks, so the prefix cache was not reset: try again when none is running.")
    return json_response({"ok": True})
