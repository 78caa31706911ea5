"""`/start_profile` and `/stop_profile`. Served only with `--profile-dir`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from compile_and_serve.serve.admin import AdminRoute
from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import user_errors
from compile_and_serve.serve.http.responses import json_response

router = APIRouter(tags=["Admin"], route_class=AdminRoute)


@router.post("/start_profile", summary="Begin a profile")
async def start_profile(context: Context) -> Response:
    """Record what the device and the host do from the next step on. Steps take longer meanwhile."""
    with user_errors():
        await context.engine.client.utility("profile", None, {"folder": ""})
    return json_response({"is_profiling": True})


@router.post("/stop_profile", summary="End the profile")
async def stop_profile(context: Context) -> Response:
    """Write the profile, a Chrome trace for each rank, to --profile-dir. Pieces and ops have their names and the model's source lines."""
    folder = str(context.settings.profile_dir)
    with user_errors():
        await context.engine.client.utility("profile", None, {"folder": folder})
    return json_response({"is_profiling": False, "folder": folder})
