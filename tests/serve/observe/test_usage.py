"""`usage` in answers."""

from __future__ import annotations

from compile_and_serve.runtime.text.output_processor import CompletionDelta
from compile_and_serve.serve.protocol.usage import Usage


def test_loaded_tokens_are_told_by_tier() -> None:
    usage = Usage(prompt_tokens=100, with_details=True)
    usage.add(CompletionDelta(index=0, text="", token_ids=[1], num_cached_tokens=64))
    assert usage.as_dict()["prompt_tokens_details"] == {"cached_tokens": 64}
    usage.add(CompletionDelta(index=1, text="", token_ids=[1], num_cached_tokens=96, num_loaded_tokens={"host": 32, "disk": 16}))
    details = {"cached_tokens": 160, "cached_tokens_details": {"device": 112, "host": 32, "disk": 16}}
    assert usage.as_dict()["prompt_tokens_details"] == details
