"""Engine, scheduler, KV cache, sampling; `from runtime import LLM, SamplingParams` for use without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.llm import LLM
    from runtime.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazy: the API process imports submodules of this package and must not pay for the engine's imports.
    if name == "LLM":
        from runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from runtime.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
