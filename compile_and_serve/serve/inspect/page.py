"""The explorer as one HTML page with its style, scripts, libraries and data. The page fetches nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from compile_and_serve.serve.inspect.data import collapsed_text, near_misses
from compile_and_serve.serve.look import look_style, theme_script

STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("dom.js", "pipeline.js", "graph.js", "diff.js", "numbers.js", "app.js")
_LIBRARIES = ("dagre", "diff")


def build_page(report: Mapping[str, Any], links: str = "") -> str:
    """The explorer's page. report: from `load_dump`. links: HTML of links to other pages of the server."""
    data = dict(report) | {
        "near_misses": near_misses(report["compilation"]["passes"]),
        "texts": [collapsed_text(report, graph) for graph in report["graphs"]],
    }
    slim = data | {"graphs": [{k: v for k, v in graph.items() if k != "steps"} for graph in data["graphs"]]}
    title = f"{report['model']['architecture']} · compile-and-serve"
    # The data lies in a script element, where "<" could end it.
    text = json.dumps(slim, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        _static("index.html")
        .replace("{{title}}", html.escape(title))
        .replace("{{links}}", links)
        .replace("{{style}}", look_style() + _static("style.css"))
        .replace("{{scripts}}", _scripts())
        .replace("{{data}}", text)
    )


def serve_page(report: Mapping[str, Any], *, host: str, port: int, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve the explorer until interrupted. on_ready: called with the URL. Raises `ValueError` if it cannot listen."""
    body = build_page(report).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.split("?")[0] in ("/", "/index.html")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body) if found else 0))
            self.end_headers()
            if found:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"Cannot listen on {host}:{port}: {error}. Choose another --port.") from None
    with server:
        on_ready(f"http://{host}:{server.server_port}")
        server.serve_forever()


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _scripts() -> str:
    parts = []
    for library in _LIBRARIES:
        licence = _static(f"vendor/{library}.LICENSE.txt").replace("*/", "* /")
        parts.append(f"<script>/*! {library}\n{licence}*/\n{_static(f'vendor/{library}.min.js')}</script>")
    parts.append(f"<script>{theme_script()}</script>")
    parts += [f"<script>{_static(name)}</script>" for name in _SCRIPTS]
    return "\n".join(parts)
