"""One replica's server, as a child of the supervisor (supervisor.py)."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import NoReturn

from compile_and_serve.runtime.child_process import (
    EXIT_FAILURE,
    boot_code,
    describe_error,
    exit_at_once,
    freeze_heap,
    read_bootstrap,
    set_up_child,
)
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.logs import LogFormat
from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.serve.processes.reports import report
from compile_and_serve.serve.settings import ServerSettings

BOOT_CODE = boot_code("compile_and_serve.serve.supervisor.replica_server")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaBootstrap:
    """What a replica's server needs to start. config, settings: of this server alone."""

    replica: int
    config: EngineConfig
    settings: ServerSettings
    log_level: int
    log_format: LogFormat


def main() -> NoReturn:
    """Entry point of a replica's server."""
    bootstrap: ReplicaBootstrap = read_bootstrap()
    set_up_child(who=f"replica {bootstrap.replica}", log_level=bootstrap.log_level, folder=None, log_format=bootstrap.log_format)
    from compile_and_serve.serve.server import run

    is_ready = False

    def on_ready(url: str, info: EngineInfo) -> None:
        nonlocal is_ready
        is_ready = True
        freeze_heap()
        report(None)

    try:
        status = run(bootstrap.config, bootstrap.settings, on_ready=on_ready)
    except Exception as error:
        status = EXIT_FAILURE
        sentence = str(error) if isinstance(error, ValueError) else describe_error(error)
        if is_ready:
            logger.error("The server failed.", exc_info=error)
        else:
            report(sentence)
    with contextlib.suppress(Exception):
        logging.shutdown()
    exit_at_once(status)
