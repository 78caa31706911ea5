"""`/scale_elastic_ep` and `/is_scaling_elastic_ep`, as vLLM has them. Served only with `--enable-admin-routes`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from pydantic import Field

from compile_and_serve.serve.admin import AdminRoute
from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import ApiError, user_errors
from compile_and_serve.serve.http.responses import json_response
from compile_and_serve.serve.protocol.fields import RequestModel
from compile_and_serve.serve.routers.common import ERROR_RESPONSES

router = APIRouter(tags=["Admin"], route_class=AdminRoute)


class ScaleRequest(RequestModel):
    """new_data_parallel_size: groups of ranks that the engine is to have. drain_timeout: seconds after which the answer does not wait."""

    new_data_parallel_size: int = Field(ge=1)
    drain_timeout: float = Field(default=120.0, gt=0.0)


@router.post("/scale_elastic_ep", summary="Let ranks join or leave", responses=ERROR_RESPONSES)
async def scale(context: Context, body: ScaleRequest) -> Response:
    """Change the number of data-parallel groups that share experts, with --enable-elastic-ep. No request is lost: those that run go on with
    the new ranks. Answers once these serve; after drain_timeout with 408, while the change goes on.
    """
    size = body.new_data_parallel_size
    try:
        with user_errors():
            await asyncio.wait_for(context.engine.scale(size), body.drain_timeout)
    except TimeoutError:
        raise ApiError(
            408, f"The change to {size} groups takes longer than drain_timeout. It goes on: ask /is_scaling_elastic_ep."
        ) from None
    return json_response({"message": f"Scaled to {size} data parallel engines"})


@router.post("/is_scaling_elastic_ep", summary="Whether ranks are joining or leaving")
async def is_scaling(context: Context) -> Response:
    """True until the new ranks serve."""
    return json_response({"is_scaling_elastic_ep": await context.engine.is_scaling()})
