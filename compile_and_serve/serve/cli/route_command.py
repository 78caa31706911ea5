"""`compile-and-serve route`: a router before servers that compute prompts and servers that generate."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

ROUTE_PANEL = "Servers"


def route_command(
    *,
    prefill: Annotated[
        list[str],
        typer.Option(metavar="URL", help="A server that computes prompts, without /v1 (repeatable).", rich_help_panel=ROUTE_PANEL),
    ],
    decode: Annotated[
        list[str], typer.Option(metavar="URL", help="A server that generates the answers (repeatable).", rich_help_panel=ROUTE_PANEL)
    ],
    prefill_events: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Where a --prefill server publishes its KV events, such as tcp://127.0.0.1:5557: one for each, in their order. By "
            "default the router remembers which prompts it sent where.",
            rich_help_panel=ROUTE_PANEL,
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block of these servers.", rich_help_panel=ROUTE_PANEL)] = 16,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 chooses a free one.")] = 8080,
) -> None:
    """Send each request to a server that computes its prompt, and on to one that generates the answer."""
    import uvicorn

    from compile_and_serve.serve.disaggregation.app import DisaggregatingRouter, create_router_app
    from compile_and_serve.serve.http.listener import open_socket

    for url in (*prefill, *decode):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no URL of a server: expected one like http://127.0.0.1:8000.")
    if prefill_events and len(prefill_events) != len(prefill):
        raise ValueError(f"--prefill-events is given {len(prefill_events)} times, but there are {len(prefill)} --prefill servers.")
    if block_size < 1:
        raise ValueError(f"--block-size must be at least 1, got {block_size}.")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = create_router_app(DisaggregatingRouter(prefill, decode, events=prefill_events or [], block_size=block_size))
    listener = open_socket(host, port)
    listener.listen(2048)  # who reads the next line may connect at once
    typer.echo(f"Routing on http://{host}:{listener.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5)).run(sockets=[listener])
