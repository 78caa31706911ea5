"""`/graphs`: the explorer of the served model."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import error_response
from compile_and_serve.serve.inspect.data import DumpError, load_dump
from compile_and_serve.serve.inspect.page import build_page
from compile_and_serve.serve.look import links

router = APIRouter(tags=["Utility"])


@router.get("/graphs", summary="Explorer of the compiled model", response_class=HTMLResponse)
async def graphs(context: Context) -> Response:
    """One page with the compilation's graphs, passes, reasons and numbers. Needs --enable-graphs."""
    folder = context.settings.graphs_dir
    assert folder is not None, "the router is mounted only if there is a folder"
    try:
        return HTMLResponse(await asyncio.to_thread(lambda: build_page(load_dump(folder), links(context.settings, "graphs"))))
    except DumpError as error:
        return error_response(503, str(error))
