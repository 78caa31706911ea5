"""The FastAPI application: routers, middleware and error handlers around one `AsyncEngine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi_offline import FastAPIOffline

from compile_and_serve import __version__
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.adapters import ServedAdapters
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.engine import AsyncEngine, EngineClient
from compile_and_serve.serve.errors import install_error_handlers
from compile_and_serve.serve.inspect import router as graphs
from compile_and_serve.serve.metrics import Metrics
from compile_and_serve.serve.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from compile_and_serve.serve.parsers.selection import select_parsers
from compile_and_serve.serve.routers import adapters as adapter_routes
from compile_and_serve.serve.routers import chat, completions, health, models, tokens
from compile_and_serve.serve.settings import ServerSettings

ROUTERS = (chat.router, completions.router, models.router, tokens.router, health.router)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    *,
    num_replicas: int = 1,
    on_engine_death: Callable[[str], None] | None = None,
    templates: TemplatePool | None = None,
    adapters: ServedAdapters | None = None,
) -> FastAPI:
    """The application for an engine that is ready. Its lifespan reads the engine's outputs and finally stops the engine.

    tokenizer: None if the engine works on token ids only (skip_tokenizer_init). on_engine_death: called with the reason.
    Raises `ParserError` for parsers that the settings name and that do not exist.
    templates: renders chat templates; by default a pool that the lifespan closes. adapters: those that are loaded.
    """
    inputs = InputProcessor(tokenizer, client.info)
    metrics = Metrics(settings.served_model_names[0])
    metrics.describe_engine(client.info)
    if num_replicas > 1:
        metrics.describe_replicas(num_replicas)
    engine = AsyncEngine(client, inputs, metrics, on_death=on_engine_death)
    parsers = select_parsers(tokenizer, settings)
    pool = templates or TemplatePool(seconds=settings.template_timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.shutdown(drain=False)  # `server._finish` has already let running requests finish
        if templates is None:
            pool.close()

    app = FastAPIOffline(
        title="compile-and-serve",
        version=__version__,
        description=f"OpenAI-compatible inference of {', '.join(settings.served_model_names)}.",
        lifespan=lifespan,
        root_path=settings.root_path,
        swagger_ui_parameters={"tryItOutEnabled": True, "persistAuthorization": True},
    )
    app.router.strict_content_type = False  # `JsonRoute` checks the header
    app.state.context = ServerContext(
        settings=settings, engine=engine, inputs=inputs, metrics=metrics, templates=pool, parsers=parsers,
        adapters=adapters or ServedAdapters(client, settings.served_model_names, settings.lora_dir),
    )  # fmt: skip
    for router in ROUTERS:
        app.include_router(router)
    if settings.lora_dir is not None:
        app.include_router(adapter_routes.router)
    if settings.graphs_dir is not None:
        app.include_router(graphs.router)
    install_error_handlers(app)
    _leave_out_422(app)
    # The last middleware added is the outermost: a 401 needs CORS headers too.
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        public = ("/metrics",) if settings.is_local else ()
        app.add_middleware(ApiKeyMiddleware, api_keys=settings.api_keys, public=public)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=list(settings.allowed_methods),
            allow_headers=list(settings.allowed_headers),
            allow_credentials=settings.allow_credentials,
        )
    return app


def _leave_out_422(app: FastAPI) -> None:
    """Remove FastAPI's own validation error from the documentation: here validation errors are 400."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
