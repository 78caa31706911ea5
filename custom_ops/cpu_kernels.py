"""The CPU kernels of csrc/cpu: built at first use, loaded into the dispatcher, and the reason when they are not there."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_state: tuple[str | None] | None = None


def load_cpu_kernels() -> bool:
    """Build (once per machine) and load the C++ kernels. → whether they are in use; `cpu_kernels_status` says why not."""
    global _state
    _state = ("the CPU kernels are not built yet",)
    return _state[0] is None


def cpu_kernels_status() -> str | None:
    """None when the C++ kernels are in use, else one sentence why the torch reference runs instead."""
    return _state[0] if _state is not None else "the CPU kernels were not loaded yet"
