"""The look that all pages share: their colors, light and dark, and the links from one to the others."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from compile_and_serve.serve.settings import ServerSettings

_STATIC = Path(__file__).parent / "static"


@cache
def look_style() -> str:
    """CSS that goes before a page's own."""
    return (_STATIC / "look.css").read_text(encoding="utf-8")


@cache
def theme_script() -> str:
    """JavaScript that makes a page light or dark, and the button `#theme` that switches."""
    return (_STATIC / "theme.js").read_text(encoding="utf-8")


def links(settings: ServerSettings, here: str) -> str:
    """HTML of the links to the server's other pages. here: the path of the page that shows them."""
    pages = [
        ("", "chat", True),
        ("requests", "requests", settings.admin_routes),
        ("graphs", "compiled graphs", settings.graphs_dir is not None),
    ]
    pages += [("docs", "API", not settings.disable_fastapi_docs), ("metrics", "metrics", True)]
    return " ".join(f'<a href="{path or "./"}">{name}</a>' for path, name, is_there in pages if is_there and path != here)


def security_policy(*, scripts: tuple[str, ...], style: str) -> str:
    """A Content-Security-Policy: only these scripts and this style run, and the page talks to its own server alone."""
    hashes = " ".join(f"'sha256-{_hash(one)}'" for one in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'sha256-{_hash(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
