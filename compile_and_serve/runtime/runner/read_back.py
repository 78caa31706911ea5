"""`ReadBack`: takes what steps sampled to the host, where that has memory of its own."""

from __future__ import annotations

import logging

import numpy as np
import torch

from compile_and_serve.custom_ops.platforms.protocol import Platform

logger = logging.getLogger(__name__)

_TURNS = 3  # two steps may be in flight, and the result of a third may still be read


class ReadBack:
    """The device's kernels write into the host's memory. A copy would queue among those of the KV cache's blocks in the copy engine, and
    the next step behind it.
    """

    def __init__(self, platform: Platform, max_rows: int) -> None:
        self._host = [[platform.host_zeros(max_rows, dtype) for dtype in (torch.int64, torch.float32)] for _ in range(_TURNS)]
        self._turn = 0
        self._views: list[list[torch.Tensor]] | None = None
        try:
            self._views = [[platform.device_view(one) for one in pair] for pair in self._host]
        except RuntimeError as error:
            logger.warning("Sampled tokens are copied to the host, because kernels cannot write there: %s", error)

    def take(self, tokens_S: torch.Tensor, best_S: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """int64 and float32 [S] of the host, of the device's integers and floats. They are complete once the device has done the work up to
        here, and hold until the third call from now.
        """
        turn, rows = self._turn % _TURNS, len(tokens_S)
        self._turn += 1
        for number, values_S in enumerate((tokens_S, best_S)):
            if self._views is None:
                self._host[turn][number][:rows].copy_(values_S, non_blocking=True)
            else:
                torch.add(values_S, 0, out=self._views[turn][number][:rows])  # `copy_` would use the copy engine
        tokens, best = self._host[turn]
        return tokens.numpy()[:rows], best.numpy()[:rows]
