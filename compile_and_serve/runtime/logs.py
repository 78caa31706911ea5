"""Log lines as JSON objects (structlog), and the id of the request that a line is about."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["text", "json"]

# Of the request whose handler runs. Log lines as JSON carry it.
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)


class JsonHandler(logging.StreamHandler[Any]):
    """Writes records to standard error, one JSON object per line: time, level, logger, event, and the record's `extra` fields.

    who: the process, e.g. "rank 1"; "" is the main one.
    """

    def __init__(self, who: str = "") -> None:
        super().__init__(sys.stderr)
        import structlog

        def add_context(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
            if (request_id := current_request_id.get()) is not None:
                event.setdefault("request_id", request_id)
            event.pop("message", None)  # `event`, set by another handler's formatter
            if who:
                event["process"] = who
            return event

        self.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[
                    structlog.stdlib.add_log_level,
                    structlog.stdlib.add_logger_name,
                    structlog.stdlib.ExtraAdder(),
                    structlog.processors.TimeStamper(fmt="iso", utc=True),
                    add_context,
                ],
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.format_exc_info,
                    structlog.processors.JSONRenderer(ensure_ascii=False),
                ],
            )
        )


def current_format() -> LogFormat:
    """The format of this process's log, for the processes that it starts."""
    return "json" if any(isinstance(handler, JsonHandler) for handler in logging.getLogger().handlers) else "text"
