"""The server's flags about access, connections, logs and tracing. `serve_command.py` has those about the API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from compile_and_serve.serve.cli.api_keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, read_api_keys
from compile_and_serve.serve.cli.config_file import apply_config_file

ACCESS_PANEL, CONNECTION_PANEL, LOG_PANEL = "Access", "Connections", "Logs and traces"


def server_flags(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file that maps flags to values, like 'max-num-seqs: 64'; 'model' may be in it too. Flags of the command line win.",
            callback=apply_config_file,
            is_eager=True,
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Require this bearer token (repeatable). /graphs also accepts it as a password. The server hides the key from "
            f"`ps`, but your shell's history keeps it: prefer --api-key-file or the environment variable {API_KEY_VARIABLE} "
            "(several keys separated by commas). With several keys, requests share cached prefixes only with requests of the "
            "same key.",
            rich_help_panel=ACCESS_PANEL,
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with API keys, one per line.", rich_help_panel=ACCESS_PANEL)] = None,
    admin_api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Require this bearer token for admin and LoRA routes, which API keys then do not open (repeatable). It opens "
            f"everything else too. Also from the environment variable {ADMIN_KEY_VARIABLE}.",
            rich_help_panel=ACCESS_PANEL,
        ),
    ] = None,
    admin_api_key_file: Annotated[
        Path | None, typer.Option(help="File with admin keys, one per line.", rich_help_panel=ACCESS_PANEL)
    ] = None,
    enable_admin_routes: Annotated[
        bool,
        typer.Option(
            "--enable-admin-routes",
            help="Serve /sleep, /wake_up, /is_sleeping and /reset_prefix_cache. Without an admin key, whoever may send requests may "
            "use them.",
            rich_help_panel=ACCESS_PANEL,
        ),
    ] = False,
    api_server_count: Annotated[
        int,
        typer.Option(
            help="API processes that share the port, for more streams than one core can write. They share one engine.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = 1,
    uds: Annotated[
        Path | None,
        typer.Option(
            help="Listen on this Unix socket, which only your user can open, instead of --host and --port.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="PEM certificate; the server then speaks HTTPS only.", rich_help_panel=CONNECTION_PANEL)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="PEM key, if it is not in --ssl-certfile.", rich_help_panel=CONNECTION_PANEL)
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="PEM certificates of the CAs that may sign clients' certificates.", rich_help_panel=CONNECTION_PANEL)
    ] = None,
    ssl_require_client_cert: Annotated[
        bool,
        typer.Option(
            "--ssl-require-client-cert", help="Refuse clients without a certificate of --ssl-ca-certs.", rich_help_panel=CONNECTION_PANEL
        ),
    ] = False,
    ssl_ciphers: Annotated[
        str | None, typer.Option(help="OpenSSL's list of ciphers for TLS 1.2.", rich_help_panel=CONNECTION_PANEL)
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End a request that takes longer with HTTP 504. A client can set an earlier deadline with the header "
            "X-Request-Timeout. By default there is no limit.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None,
    stream_keepalive: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Send a comment in a stream that was silent for this long, so that proxies keep it open; 0: never.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = 15.0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="json: one JSON object per line, of all processes.", rich_help_panel=LOG_PANEL)
    ] = "text",
    access_log: Annotated[bool, typer.Option(help="Log every request.", rich_help_panel=LOG_PANEL)] = True,
    throughput_log: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="While there is load, log the throughput at this interval; 0: never.", rich_help_panel=LOG_PANEL
        ),
    ] = 10.0,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send OpenTelemetry traces to this OTLP/HTTP endpoint, e.g. http://localhost:4318/v1/traces. Needs "
            "compile-and-serve[otel].",
            rich_help_panel=LOG_PANEL,
        ),
    ] = None,
) -> dict[str, Any]:
    """The flags as arguments of `ServerSettings`. Raises `ValueError` for flags that do not fit together."""
    from compile_and_serve.serve.tls import TlsSettings

    given = [
        name
        for name, value in (
            ("--ssl-keyfile", ssl_keyfile),
            ("--ssl-ca-certs", ssl_ca_certs),
            ("--ssl-ciphers", ssl_ciphers),
            ("--ssl-require-client-cert", ssl_require_client_cert),
        )
        if value
    ]
    if ssl_certfile is None and given:
        raise ValueError(f"{given[0]} needs --ssl-certfile.")
    if ssl_require_client_cert and ssl_ca_certs is None:
        raise ValueError("--ssl-require-client-cert needs --ssl-ca-certs.")
    tls = None
    if ssl_certfile is not None:
        tls = TlsSettings(
            certfile=ssl_certfile,
            keyfile=ssl_keyfile,
            ca_certs=ssl_ca_certs,
            ciphers=ssl_ciphers,
            require_client_certificate=ssl_require_client_cert,
        )
        tls.context()  # raises now, not after the model has loaded
    return {
        "api_keys": read_api_keys(api_key, api_key_file),
        "admin_keys": read_api_keys(admin_api_key, admin_api_key_file, flag="--admin-api-key", variable=ADMIN_KEY_VARIABLE),
        "admin_routes": enable_admin_routes,
        "api_server_count": api_server_count,
        "uds": uds,
        "tls": tls,
        "request_timeout": request_timeout,
        "stream_keepalive": stream_keepalive,
        "log_format": log_format,
        "access_log": access_log,
        "throughput_log": throughput_log,
        "otlp_traces_endpoint": otlp_traces_endpoint,
    }
