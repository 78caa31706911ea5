"""Probes, version, load and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from compile_and_serve import __version__
from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import error_response
from compile_and_serve.serve.http.responses import json_response

router = APIRouter(tags=["Utility"])


@router.get("/health", summary="Whether the engine is alive", responses={503: {"description": "The engine is not healthy"}})
async def health(context: Context) -> Response:
    """200 while every engine process sends heartbeats; 503 with the reason after 10 seconds of silence, or when one step,
    or anything else that the engine does between two messages, takes more than two minutes. Names the graph passes that
    failed `--verify-passes`, if any.
    """
    if (problem := context.engine.health_problem()) is not None:
        return error_response(503, problem)
    prefix = "failed_passes."
    report = context.inputs.info.compile_report
    failed = {name.removeprefix(prefix): reason for name, reason in report.items() if name.startswith(prefix)}
    return json_response({"status": "ok"} | ({"failed_passes": failed} if failed else {}))


@router.get("/ready", summary="Whether new requests are accepted", responses={503: {"description": "No new requests are accepted"}})
async def ready(context: Context) -> Response:
    """200 while new requests are accepted, 503 while the server sleeps or shuts down or the engine is dead.

    `to_come`: what the engine still does between requests, after which it is at full speed: how many `captures` of CUDA graphs,
    `choices` of kernels by measurement, and `builds` are left. Without it, nothing is left.
    """
    if not context.engine.ready:
        what = "sleeps" if context.engine.sleeping else "is shutting down"
        return error_response(503, context.engine.dead_reason or f"The server {what}.")
    pending_work = context.engine.pending_work
    return json_response({"status": "ready"} | ({"to_come": pending_work} if pending_work else {}))


@router.post("/ping", include_in_schema=False)
@router.get("/ping", summary="Whether the server process runs", response_class=Response)
async def ping() -> Response:
    """200 as long as the API process runs."""
    return Response(status_code=200)


@router.get("/version", summary="Version of the server")
async def version() -> Response:
    """The version of the installed distribution."""
    return json_response({"version": __version__})


@router.get("/load", summary="Sequences in flight")
async def load(context: Context) -> Response:
    """The number of sequences that wait or run."""
    return json_response({"server_load": context.engine.load})


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(context: Context) -> Response:
    """Counters, gauges and histograms in Prometheus' text format, up to a second old."""
    return Response(await context.rendered_metrics.text(), media_type=CONTENT_TYPE_LATEST)
