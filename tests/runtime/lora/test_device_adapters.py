"""The thread that reads adapters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from compile_and_serve.custom_ops.mesh import ORIGIN
from compile_and_serve.runtime.lora.device_adapters import DeviceAdapters


def test_the_reader_alone_computes_with_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        adapters = DeviceAdapters([], {}, {}, 8, device=torch.device("cpu"), dtype=torch.float32, coordinates=ORIGIN)
        assert adapters._reader.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
        assert ThreadPoolExecutor(1).submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
