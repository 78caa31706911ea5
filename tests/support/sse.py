"""Reading of server-sent events in tests."""

from __future__ import annotations

import json
from typing import Any


def read_events(body: str) -> list[Any]:
    """The events of a whole stream as JSON values, "[DONE]" as it is."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines), lines
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
