"""`/`: a page to chat with the served model. It calls the server's own API and fetches nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from compile_and_serve.serve.context import Context

STATIC = Path(__file__).parent / "static"

router = APIRouter(include_in_schema=False)


@router.get("/", response_class=HTMLResponse)
async def playground(request: Request, context: Context) -> HTMLResponse:
    """The page. Links to /graphs only where there is an explorer."""
    settings = context.settings
    graphs = '<a href="graphs">compiled graphs</a>' if settings.graphs_dir is not None else ""
    page = (
        _static("index.html")
        .replace("{{model}}", html.escape(settings.served_model_names[0]))
        .replace("{{graphs}}", graphs)
        .replace("{{needs-key}}", "true" if settings.api_keys else "false")
        .replace("{{style}}", _static("style.css"))
        .replace("{{script}}", _static("playground.js"))
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": _policy(), "X-Content-Type-Options": "nosniff"})


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """Only our script and style run, and the page talks to its own server alone."""
    script, style = (base64.b64encode(hashlib.sha256(_static(name).encode()).digest()).decode() for name in ("playground.js", "style.css"))
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
