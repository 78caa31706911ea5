"""The FastAPI application: routers, middleware and error handlers around one `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from compile_and_serve import __version__
from compile_and_serve.runtime.audio.transcriber import Transcriber
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.admin import ADMIN_PATHS, CorsExceptAdmin
from compile_and_serve.serve.chat_prompts import ChatPrompts
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.engine.adapters import ServedAdapters
from compile_and_serve.serve.engine.body_work import BodyWork
from compile_and_serve.serve.engine.engine import AsyncEngine, EngineClient
from compile_and_serve.serve.engine.media_work import MediaWork
from compile_and_serve.serve.errors import install_error_handlers
from compile_and_serve.serve.http.content_encoding import ContentEncodingMiddleware
from compile_and_serve.serve.http.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from compile_and_serve.serve.http.openapi import describe_errors
from compile_and_serve.serve.http.probes import ProbeMiddleware
from compile_and_serve.serve.http.refusals import RefusalMiddleware
from compile_and_serve.serve.http.request_scope import REQUEST_ID_HEADER, DeadlineMiddleware, RequestMiddleware
from compile_and_serve.serve.http.tenant_middleware import TenantMiddleware
from compile_and_serve.serve.inspect import router as graphs
from compile_and_serve.serve.live import router as live
from compile_and_serve.serve.observe.metrics import Metrics, render_families, with_prefix
from compile_and_serve.serve.observe.orca import OrcaMiddleware
from compile_and_serve.serve.observe.rendered import RenderedMetrics
from compile_and_serve.serve.observe.throughput import ThroughputLog
from compile_and_serve.serve.observe.tracing import Tracing
from compile_and_serve.serve.playground import router as playground
from compile_and_serve.serve.processes.siblings import Siblings
from compile_and_serve.serve.response_store import ResponseStore
from compile_and_serve.serve.routers import adapters as adapter_routes
from compile_and_serve.serve.routers import (
    audio,
    chat,
    completions,
    elastic,
    health,
    information,
    invocations,
    messages_api,
    models,
    pooling,
    profile,
    responses_api,
    sleep,
    tokens,
)
from compile_and_serve.serve.served_parsers import served_parsers
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.tenants.rate_limits import LocalRateLimits, RateLimits, SharedRateLimits
from compile_and_serve.serve.tenants.registry import Tenants
from compile_and_serve.serve.transcription.work import TranscriptionWork

ROUTERS = (
    chat.router,
    completions.router,
    responses_api.router,
    messages_api.router,
    pooling.router,
    audio.router,
    models.router,
    tokens.router,
    invocations.router,
    health.router,
)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    *,
    num_replicas: int = 1,
    on_engine_death: Callable[[str], None] | None = None,
    templates: TemplatePool | None = None,
    adapters: ServedAdapters | None = None,
    process: int = 0,
    siblings: Siblings | None = None,
) -> FastAPI:
    """The application for an engine that is ready. Its lifespan reads the engine's outputs and finally stops the engine.

    tokenizer: None if the engine works on token ids only (skip_tokenizer_init). on_engine_death: called with the reason.
    Raises `ParserError` for parsers that the settings name and that do not exist.
    templates: renders chat templates; by default a pool that the lifespan closes. adapters: those that are loaded.
    process: number of this API process among its siblings.
    """
    inputs = InputProcessor(tokenizer, client.info)
    metrics = Metrics(settings.served_model_names[0])
    metrics.describe_engine(client.info)
    if num_replicas > 1:
        metrics.describe_replicas(num_replicas)
    tenants = Tenants(settings)
    rates: RateLimits = LocalRateLimits(tenants.all) if process == 0 or siblings is None else SharedRateLimits(siblings.ask_first)
    rated = {one.name for one in tenants.all if one.tokens_per_minute is not None}
    engine = AsyncEngine(client, inputs, metrics, on_death=on_engine_death, process=process, siblings=siblings, rates=rates, rated=rated)
    info = client.info.media
    media = MediaWork(info, tokenizer, metrics.observe_media)
    longest = None if info is None else info.max_audio_seconds
    transcriptions = TranscriptionWork(Transcriber.of(info, tokenizer), longest, metrics.observe_media)
    parsers = served_parsers(tokenizer, settings)
    pool = templates or TemplatePool()

    tracing = None
    if settings.otlp_traces_endpoint is not None:
        tracing = Tracing(settings.otlp_traces_endpoint, settings.served_model_names[0])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        throughput = ThroughputLog(metrics.tokens, metrics.last_stats)
        line = asyncio.create_task(throughput.run(settings.throughput_log)) if settings.throughput_log else None
        yield
        if line is not None:
            line.cancel()
        await engine.shutdown()  # `server._finish` has already let running requests finish
        media.close()
        transcriptions.close()
        if templates is None:
            pool.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    async def render_metrics() -> bytes:
        text = metrics.render() if siblings is None else render_families(await siblings.metrics())
        return with_prefix(text, settings.metrics_prefix)

    make_app = FastAPI if settings.disable_fastapi_docs else FastAPIOffline
    no_documents: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url")) if settings.disable_fastapi_docs else {}
    app = make_app(
        title="compile-and-serve",
        version=__version__,
        description=f"OpenAI-compatible inference of {', '.join(settings.served_model_names)}.",
        lifespan=lifespan,
        **no_documents,
        root_path=settings.root_path,
        swagger_ui_parameters={"tryItOutEnabled": True, "persistAuthorization": True},
    )
    app.router.strict_content_type = False  # `JsonRoute` checks the header
    store = ResponseStore(settings.response_store_bytes, settings.response_store_seconds, max_background=settings.max_background_responses)
    app.state.context = ServerContext(
        settings=settings,
        engine=engine,
        inputs=inputs,
        metrics=metrics,
        rendered_metrics=RenderedMetrics(render_metrics),
        parsers=parsers,
        prompts=ChatPrompts(inputs, pool, parsers, settings, media.texts),
        bodies=BodyWork(engine, pool, tokenizer),
        media=media,
        transcriptions=transcriptions,
        fingerprint=f"cas-{__version__}-{client.info.dtype.removeprefix('torch.')}",
        adapters=adapters or ServedAdapters(client, settings.served_model_names, settings.lora_dir),
        stored_responses=store if settings.response_store_bytes else None,
        siblings=siblings,
        rates=rates,
    )
    app.include_router(playground.router)
    for router in ROUTERS:
        app.include_router(router)
    if settings.tokenizer_info:
        app.include_router(information.tokenizer_router)
    if settings.admin_routes:
        app.include_router(information.admin_router)
        app.include_router(sleep.router)
        app.include_router(elastic.router)
        app.include_router(live.router)
    if settings.profile_dir is not None:
        app.include_router(profile.router)
    if settings.lora_dir is not None:
        app.include_router(adapter_routes.router)
    if settings.graphs_dir is not None:
        app.include_router(graphs.router)
    install_error_handlers(app)
    describe_errors(app, needs_key=bool(settings.api_keys))
    # The last middleware added is the outermost. Web pages read errors too, so what answers them is inside of CORS.
    app.add_middleware(OrcaMiddleware, metrics=metrics)
    app.add_middleware(ProbeMiddleware)
    app.add_middleware(ContentEncodingMiddleware, max_bytes=settings.max_body_bytes)
    audio_limits = {audio.PREFIX: max(settings.max_audio_bytes, settings.max_body_bytes)}
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes, of_paths=audio_limits)
    if tenants.is_needed:
        app.add_middleware(TenantMiddleware, tenants=tenants, rates=rates, metrics=metrics)
    if settings.api_keys or settings.admin_keys:
        app.add_middleware(
            ApiKeyMiddleware,
            api_keys=settings.api_keys,
            admin_keys=settings.admin_keys,
            admin_paths=ADMIN_PATHS,
            public=("/metrics",) if settings.is_local else (),
        )
    app.add_middleware(RefusalMiddleware)
    app.add_middleware(DeadlineMiddleware, timeout=settings.request_timeout)
    if settings.allowed_origins:
        app.add_middleware(
            CorsExceptAdmin,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    app.add_middleware(RequestMiddleware, access_log=settings.access_log, book=engine.book, tracing=tracing)
    return app
