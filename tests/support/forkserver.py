"""Processes forked from one that has imported torch and the compiler, so that each starts within milliseconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOAD = ["torch._dynamo", "torch._inductor.compile_fx", "tests.support.tiny_models", "tests.support.ranks"]


def forkserver() -> ForkServerContext:
    """A context for processes on the CPU. They have the environment and the modules of the server, which the first of them starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
