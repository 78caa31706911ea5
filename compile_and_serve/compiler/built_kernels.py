"""The kernels that Inductor built for a piece: what is stored of them, and how they are loaded without Inductor.

Importing Inductor takes one to two seconds of a start with stored pieces. So beside a piece's module lies what its kernels need: the
libraries of C++ kernels, and the cubins of Triton kernels with the code that launches them. torch's launcher of cubins is C++.
A piece that needs more of Inductor has an `obstacle`; `load_pieces` then imports Inductor and says why.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.platform import platform_of

Launcher = Callable[..., None]

_CPP_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(", re.MULTILINE)
_TRITON_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\(", re.MULTILINE)
_IMPORT = re.compile(r"^from torch\._inductor[\w.]* import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)\n", re.MULTILINE)
_OTHER_USE = re.compile(r"^(?!\s*(?:#|from |import )).*\b(torch\._(?:inductor|dynamo)\b[\w.]*)", re.MULTILINE)
_EXTERN_KERNEL = re.compile(r"\bextern_kernels\.(\w+)")
_TIMED_CALLS = 5
_CLEARLY_FASTER = 0.97  # a kernel's first configuration is kept unless another one takes less than this share of its time


class TritonLaunch(TypedDict):
    """One configuration of a Triton kernel.

    file: its cubin, below the work folder. symbol: its function in there. shared: bytes of dynamic shared memory.
    launcher: text of a function `launcher(*args, stream)` that calls `launch` with `function`.
    """

    file: str
    symbol: str
    shared: int
    launcher: str


class TritonKernel(TypedDict):
    """mutated: positions of the arguments that the kernel changes in place."""

    launches: list[TritonLaunch]
    mutated: list[int]


class BuiltKernels(TypedDict):
    """A piece's kernels by their names in its module. obstacle: why Inductor must load the piece; None: it need not.

    cpp: paths of libraries, below the work folder.
    """

    obstacle: str | None
    cpp: dict[str, str]
    triton: dict[str, TritonKernel]


class _NeedsInductorError(Exception):
    """Its text is the obstacle."""


def built_kernels(source: str, run: Callable[..., Any]) -> BuiltKernels:
    """What is to be stored of a piece's kernels. source: text of its module. run: the module's function, whose kernels are built."""
    built = BuiltKernels(obstacle=None, cpp={}, triton={})
    try:
        scope = _module_scope(run)
        _check_uses(source, scope)
        for name in _CPP_KERNEL.findall(source):
            file = Path(scope[name].__self__.__file__)
            built["cpp"][name] = f"{file.parent.name}/{file.name}"
        for name in _TRITON_KERNEL.findall(source):
            built["triton"][name] = _triton_kernel(name, scope[name])
    except _NeedsInductorError as obstacle:
        return BuiltKernels(obstacle=str(obstacle), cpp={}, triton={})
    except (AttributeError, ImportError) as error:
        obstacle_of_torch = f"torch {torch.__version__} has other internals ({type(error).__name__}: {error})"
        return BuiltKernels(obstacle=obstacle_of_torch, cpp={}, triton={})
    return built


def _module_scope(run: Any) -> dict[str, Any]:
    """The names of the module that Inductor generated. Before torch 2.13, it wraps the module's function in one that aligns inputs."""
    functions = [run]
    for one in functions:
        function = getattr(one, "__func__", one)
        scope: dict[str, Any] = getattr(function, "__globals__", {})
        if "AsyncCompile" in scope and "call" in scope:
            return scope
        functions += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if callable(cell.cell_contents)]
    raise _NeedsInductorError("its module is not found")


def _check_uses(source: str, scope: dict[str, Any]) -> None:
    """Raise `_NeedsInductorError` if the module uses something that `load_module` does not give it."""
    names = {*_CPP_KERNEL.findall(source), *_TRITON_KERNEL.findall(source)}
    if source.count("async_compile.") != len(names) + 1 or not names <= scope.keys():  # one call waits for them
        raise _NeedsInductorError("it has kernels that are neither C++ nor Triton ones")
    if "extern_kernels" in scope:
        for name in sorted(set(_EXTERN_KERNEL.findall(source))):
            if getattr(scope["extern_kernels"], name, None) is not getattr(torch, name, source):
                raise _NeedsInductorError(f"it calls extern_kernels.{name}, which is not torch.{name}")
    head = _head(without_unused_imports(source, given=_GIVEN))
    if (left := _IMPORT.search(head)) is not None:
        raise _NeedsInductorError(f"it uses {left[1]}")
    if (other := _OTHER_USE.search(source)) is not None:
        raise _NeedsInductorError(f"it uses {other[1]}")


def _triton_kernel(name: str, kernel: Any) -> TritonKernel:
    """kernel: Inductor's `CachingAutotuner`, with its kernels compiled and loaded."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, StaticTritonCompileResult

    if type(kernel) is not CachingAutotuner or kernel.reset_to_zero_arg_names or kernel.inductor_meta.get("coordinate_descent_tuning"):
        raise _NeedsInductorError(f"{name} is not launched as usual")
    limit = kernel.inductor_meta.get("spill_threshold", 16)
    # Inductor does not measure configurations whose registers spill. If all do, it takes any.
    good = [one.config for one in kernel.launchers if (one.n_spills or 0) <= limit] or [one.config for one in kernel.launchers]
    results = [result for result in kernel.compile_results if any(result.config is config for config in good)]
    if not results or not all(isinstance(result, StaticTritonCompileResult) for result in results):
        raise _NeedsInductorError(f"{name} cannot be launched as a plain cubin")
    parameters = _parameters(results[0])[0]
    return TritonKernel(
        launches=[_triton_launch(result) for result in results], mutated=[parameters.index(one) for one in kernel.mutated_arg_names]
    )


def _parameters(result: Any) -> tuple[list[str], Collection[str]]:
    """The parameters of a `StaticTritonCompileResult`'s launcher, and the kernel's that are absent from the cubin."""
    _, parameters, absent = result._get_arg_lists(result.kernel.arg_names, result.kernel.declared_constexprs)
    return parameters, absent


def _triton_launch(result: Any) -> TritonLaunch:
    """result: a `StaticTritonCompileResult`, whose `make_launcher` makes the same function."""
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kernel = result.kernel
    parameters, absent = _parameters(result)
    values = [one for i, one in enumerate(kernel.arg_names) if i not in kernel.full_constexprs and one not in absent]
    scratch = kernel.has_global_scratch + kernel.has_profile_scratch  # pointers to memory that is not needed
    types, values = kernel.arg_tys + "O" * scratch, [*values, *["None"] * scratch]
    assert len(types) == len(values)
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    sizes = f"{grid.x_grid}, {grid.y_grid}, {grid.z_grid}, {kernel.num_warps}, {kernel.shared}"
    lines = [
        f"def launcher({', '.join(parameters)}, stream):",
        *grid.prefix,
        f"launch(function, {sizes}, {types!r}, ({', '.join(values)},), stream)",
    ]
    return TritonLaunch(
        file=f"triton/{triton_hash_to_path_key(kernel.hash)}/{kernel.name}.cubin",
        symbol=kernel.name,
        shared=kernel.shared,
        launcher="\n    ".join(lines),
    )


def has_all_files(built: BuiltKernels, work_dir: Path) -> bool:
    """Whether the folder has the files of all kernels."""
    triton = (launch["file"] for kernel in built["triton"].values() for launch in kernel["launches"])
    return all((work_dir / file).is_file() for file in (*built["cpp"].values(), *triton))


def scope_with_kernels(built: BuiltKernels, device: torch.device, work_dir: Path) -> dict[str, Any]:
    """What a piece's module needs in the place of its imports from Inductor."""
    return {"AsyncCompile": partial(_BuiltCompile, built, device, work_dir), "extern_kernels": torch}


_GIVEN = ("AsyncCompile", "extern_kernels")


class _BuiltCompile:
    """In the place of Inductor's `AsyncCompile` in a piece's module, whose kernels are built."""

    def __init__(self, built: BuiltKernels, device: torch.device, work_dir: Path) -> None:
        self._built, self._device, self._work_dir = built, device, work_dir

    def cpp_pybinding(self, argument_types: list[str], source: str) -> None:
        """Its library has the kernel."""

    def triton(self, name: str, source: str, device_str: str = "cuda") -> None:
        """Its cubin has the kernel."""

    def wait(self, scope: dict[str, Any]) -> None:
        """Give the module its kernels."""
        if self._built["cpp"]:
            show_data_pointers()
            scope |= {name: _load_library(self._work_dir / file).kernel for name, file in self._built["cpp"].items()}
        if self._built["triton"]:
            device = platform_of(self._device).indexed_device
            platform_of(device).make_current()  # this thread may be a new one
            platform_of(device).record_event()  # gives it CUDA's context, which loading a cubin needs
            scope |= {name: LoadedKernel(kernel, device, self._work_dir) for name, kernel in self._built["triton"].items()}


class LoadedKernel:
    """In the place of Inductor's `CachingAutotuner`. The first call outside of a graph's capture measures the configurations.

    run: launches the kernel. Takes its arguments, and a CUDA stream's handle as `stream`. launchers: one for each configuration.
    device: with its index.
    """

    run: Launcher

    def __init__(self, kernel: TritonKernel, device: torch.device, work_dir: Path) -> None:
        self._device, self._mutated = device, kernel["mutated"]
        self.launchers = [_load_cubin(launch, device, work_dir) for launch in kernel["launches"]]
        self.run = self.launchers[0] if len(self.launchers) == 1 else self._run_first

    def _run_first(self, *args: Any, stream: int) -> None:
        launcher = self.launchers[0]
        # While kernels are compiled ahead, steps may be small, and their values are undefined.
        if not platform_of(self._device).is_capturing() and not is_compiling_ahead():
            seconds = [self._seconds(one, args, stream) for one in self.launchers]
            if min(seconds) < seconds[0] * _CLEARLY_FASTER:
                launcher = self.launchers[seconds.index(min(seconds))]
            self.run = launcher
        launcher(*args, stream=stream)

    def _seconds(self, launcher: Launcher, args: Sequence[Any], stream: int) -> float:
        """The shortest time of some calls. They change copies of the arguments."""
        platform, seconds = platform_of(self._device), []
        for _ in range(1 + _TIMED_CALLS):
            values = [arg.clone() if i in self._mutated else arg for i, arg in enumerate(args)]
            start = platform.record_timed_event()
            launcher(*values, stream=stream)
            end = platform.record_timed_event()
            end.synchronize()
            seconds.append(end.seconds_since(start))
        return min(seconds[1:])


def _load_cubin(launch: TritonLaunch, device: torch.device, work_dir: Path) -> Launcher:
    cubins = torch._C._StaticCudaLauncher
    file = str(work_dir / launch["file"])
    *_, function, _registers, _spills = cubins._load_kernel(file, launch["symbol"], launch["shared"], device.index or 0)
    scope: dict[str, Any] = {"launch": cubins._launch_kernel, "function": function}
    exec(launch["launcher"], scope)
    launcher: Launcher = scope["launcher"]
    return launcher


def _load_library(file: Path) -> Any:
    """A library that Inductor built, as the Python module that it is. Its name is a hash of its content."""
    name = f"{file.name.partition('.')[0]}.kernel"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def show_data_pointers() -> None:
    """Set the variable in which a kernel's library finds the function that reads a tensor's address."""
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)


def without_unused_imports(source: str, given: Collection[str] = ()) -> str:
    """A generated module's text without the imports of Inductor that it does not use, nor those of the names that it is `given`.

    Left in, three of them would import kernel templates, the memory planner and the autotuner, which takes a second or two.
    """

    def count(name: str, text: str) -> int:
        return len(re.findall(rf"\b{name}\b", text))

    def shown(found: re.Match[str]) -> str:
        names = {name.rpartition(" ")[2] for name in found[1].split(", ")}.difference(given)
        return found[0] if any(count(name, source) > count(name, found[0]) for name in names) else "\n"

    head = _head(source)
    return _IMPORT.sub(shown, head) + source[len(head) :]


def _head(source: str) -> str:
    """A module's text before that of its first kernel, which has imports of its own."""
    return source.partition("'''")[0]
