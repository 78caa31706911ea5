"""A graph compiler for LLM inference with a thin server on top.

`from compile_and_serve import LLM, SamplingParams` serves a model from Python, without a server.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_and_serve.runtime.beam_search import BeamSearchParams
    from compile_and_serve.runtime.llm.llm import LLM
    from compile_and_serve.runtime.lora.request import LoRARequest
    from compile_and_serve.runtime.pooling_params import PoolingParams
    from compile_and_serve.runtime.sampling_params import SamplingParams
    from compile_and_serve.runtime.structured.params import StructuredOutputsParams

    __version__: str

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "PoolingParams", "SamplingParams", "StructuredOutputsParams", "__version__"]

_MODULES = {
    "BeamSearchParams": "compile_and_serve.runtime.beam_search",
    "LLM": "compile_and_serve.runtime.llm.llm",
    "LoRARequest": "compile_and_serve.runtime.lora.request",
    "PoolingParams": "compile_and_serve.runtime.pooling_params",
    "SamplingParams": "compile_and_serve.runtime.sampling_params",
    "StructuredOutputsParams": "compile_and_serve.runtime.structured.params",
}


@cache
def _version() -> str:
    """Version of the installed distribution, or "unknown" if it is not installed."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version("compile-and-serve")
    except metadata.PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    # Lazy, because the command line and the API process import this package but do not need torch.
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
