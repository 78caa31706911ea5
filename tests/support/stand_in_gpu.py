"""A stand-in for a GPU, with which Inductor generates and compiles a piece's Triton kernels for Hopper where there is no GPU.

For a process of its own: what it changes in torch and Triton stays changed. `Cubins` notes the launches of kernels, which do not run.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform

DEVICE = torch.device("cuda", 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=227 << 10,
    total_memory=140 << 30,
    gcnArchName="",
)


class Gpu(CpuPlatform):
    """Tensors are the CPU's."""

    runs_cpp_kernels = False
    runs_triton_kernels = True


class Cubins:
    """In the place of torch's launcher of cubins. launches: function and the other arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def _load_kernel(self, file: str, name: str, shared: int, device: int) -> tuple[Any, ...]:
        """As torch: a module since 2.12, the function, its registers, and how many of them spill."""
        assert Path(file).read_bytes().startswith(b"\x7fELF")
        function = f"{Path(file).parent.name}/{name}"
        has_module = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
        return (*([function] if has_module else []), function, 32, 0)

    def _launch_kernel(self, *args: Any) -> None:
        self.launches.append(args)


def stand_in_gpu() -> Cubins:
    """Make torch, Triton and this project believe in one GPU."""
    register_platform("cuda", Gpu)
    torch.version.cuda = torch.version.cuda or "13.0"
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda device=None: _PROPERTIES
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: _PROPERTIES.name
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: None
    cuda.set_device = lambda device: None
    cuda._exchange_device = cuda._maybe_exchange_device = lambda index: 0
    cuda._DeviceGuard = lambda index: nullcontext()
    for name in ("_lazy_init", "synchronize"):
        setattr(cuda, name, lambda device=None: None)
    parts: Any = torch._C
    parts._cuda_getCurrentRawStream = lambda index: 7
    parts._dynamo.guards._empty_strided_cuda = parts._dynamo.guards._empty_strided_cpu
    parts._StaticCudaLauncher = cubins = Cubins()
    os.environ.pop("TRITON_INTERPRET", None)
    return cubins


def use_hopper_backend() -> None:
    """Have Triton compile for Hopper. Imports Inductor, which would look for a driver."""
    import torch._subclasses.fake_tensor
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
