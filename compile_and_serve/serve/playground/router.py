"""`/`: a page to chat with the served model. It calls the server's own API and fetches nothing else."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from compile_and_serve.serve.context import Context
from compile_and_serve.serve.look import links, look_style, security_policy, theme_script

STATIC = Path(__file__).parent / "static"

router = APIRouter(include_in_schema=False)


@router.get("/", response_class=HTMLResponse)
async def playground(request: Request, context: Context) -> HTMLResponse:
    """The page. Links only to pages that the server has."""
    settings = context.settings
    page = (
        _static("index.html")
        .replace("{{model}}", html.escape(settings.served_model_names[0]))
        .replace("{{links}}", links(settings, ""))
        .replace("{{needs-key}}", "true" if settings.api_keys else "false")
        .replace("{{style}}", _style())
        .replace("{{theme}}", theme_script())
        .replace("{{script}}", _static("playground.js"))
    )
    policy = security_policy(scripts=(theme_script(), _static("playground.js")), style=_style())
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return look_style() + _static("style.css")
