"""How an API process starts: what it runs, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass

from compile_and_serve.runtime.child_process import boot_code
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.logs import LogFormat
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.serve.settings import ServerSettings

BOOT_CODE = boot_code("compile_and_serve.serve.api_process")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiBootstrap:
    """What an API process needs to start.

    engine_folders: where the engines' sockets lie. listener_fd: an inherited listening socket; None: bind the settings' host and port
    beside the others. folder: of the API processes' own sockets. adapters: those that are loaded. num_restarts: how often the process of
    this number has died; after a death the others know the adapters.
    """

    process: int
    num_restarts: int
    config: EngineConfig
    settings: ServerSettings
    adapters: list[LoRARequest]
    engine_folders: list[str]
    listener_fd: int | None
    folder: str
    log_level: int
    log_format: LogFormat
