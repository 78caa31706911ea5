"""Which of fla-core's configurations its kernels try on a Hopper GPU.

The autotuner of a kernel compiles all of its configurations one after another, 1 to 2 s each, and a Gated DeltaNet prompt has 34 of them:
a minute of a first start. Those that are left here are of fla's own lists. A kernel or a device that is unknown here keeps its list.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from compile_and_serve.custom_ops.platform import platform_of

log = logging.getLogger(__name__)

# By kernel: (the block sizes, warps, stages; None: any).
_KEPT: dict[str, tuple[tuple[dict[str, int], int, int | None], ...]] = {
    "chunk_local_cumsum_scalar_kernel": (({}, 4, None),),
    "chunk_local_cumsum_vector_kernel": (({"BS": 64}, 4, None), ({"BS": 32}, 4, None)),
    # Gated DeltaNet
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": (({"BK": 64}, 2, None), ({"BK": 64}, 4, None)),
    "recompute_w_u_fwd_kernel": (({}, 4, 2), ({}, 4, 3)),
    # BV 32 has more programs, which few sequences need
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (({"BV": 32}, 4, 2), ({"BV": 32}, 4, 3), ({"BV": 64}, 4, 3)),
    "chunk_fwd_kernel_o": (({"BK": 128, "BV": 128}, 8, 3), ({"BK": 64, "BV": 64}, 4, 3)),
    # simple GLA
    "chunk_fwd_kernel_h": (({"BK": 64, "BV": 64}, 4, 3), ({"BK": 64, "BV": 32}, 4, 3), ({"BK": 32, "BV": 64}, 4, 3)),
    # Kimi Delta Attention
    "chunk_kda_fwd_kernel_inter_solve_fused": (({"BK": 64}, 2, None), ({"BK": 64}, 4, None)),
    "chunk_kda_fwd_kernel_intra_sub_chunk": (({}, 2, 3), ({}, 4, 3)),
    "recompute_w_u_fwd_kda_kernel": (({}, 4, 2), ({}, 4, 3)),
}


def limit_configs(device: torch.device) -> None:
    """Cut the lists of the kernels that are imported, on a Hopper GPU."""
    if platform_of(device).compute_capability[0] != 9:
        return
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fla.ops.")]
    before, after = limit_configs_of(value for module in modules for value in vars(module).values())
    log.info("fla-core's kernels try %d of %d configurations", after, before)


def limit_configs_of(kernels: Iterable[Any]) -> tuple[int, int]:
    """Cut the lists of autotuned kernels; whatever else is among `kernels` stays as it is. → configurations before and after

    A kernel of which no configuration is known, as of another version of fla-core, keeps its list.
    """
    before = after = 0
    autotuners = {id(tuner): (name, tuner) for kernel in kernels for name, tuner in _autotuners(kernel)}
    for name, tuner in autotuners.values():
        kept = [config for config in tuner.configs if any(_is_like(config, one) for one in _KEPT[name])]
        before += len(tuner.configs)
        if kept:
            tuner.configs[:] = kept
        after += len(tuner.configs)
    return before, after


def _autotuners(kernel: Any) -> Iterator[tuple[str, Any]]:
    """The autotuner in a kernel's layers (heuristics around an autotuner around a function), with the function's name."""
    tuner = None
    while hasattr(kernel, "fn"):
        if hasattr(kernel, "configs"):
            tuner = kernel
        kernel = kernel.fn
    name = getattr(kernel, "__name__", "")
    if tuner is not None and name in _KEPT:
        yield name, tuner


def _is_like(config: Any, wanted: tuple[dict[str, int], int, int | None]) -> bool:
    kwargs, num_warps, num_stages = wanted
    return config.kwargs == kwargs and config.num_warps == num_warps and num_stages in (None, config.num_stages)
