"""`meta_device`: modules are built without memory and without initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def meta_device() -> Iterator[None]:
    """Parameters that are created in the block are on the meta device, and are not initialized: a checkpoint fills them."""
    with torch.device("meta"), _SkipInitialization():
        yield


class _SkipInitialization(TorchFunctionMode):
    """`torch.nn.init` leaves tensors as they are. PyTorch would import Dynamo, for two seconds, to draw numbers on the meta device."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)
