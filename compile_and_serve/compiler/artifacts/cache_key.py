"""The fields of an artifact's key: everything that it depends on."""

from __future__ import annotations

import inspect
import json
import platform
import sys
import uuid
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.model import ModelSource
from compile_and_serve.compiler.rewrite.graph_pass import GraphPass
from compile_and_serve.compiler.rewrite.user_passes import source_of
from compile_and_serve.custom_ops.jit.cpp import cpu_identity
from compile_and_serve.custom_ops.jit.sources import PACKAGE, digest, kernel_digest, source_digest
from compile_and_serve.custom_ops.library import op_info
from compile_and_serve.custom_ops.mesh import PIPE, SINGLE_RANK, Mesh
from compile_and_serve.custom_ops.platform import platform_of

_COMPILER = PACKAGE / "compiler"


def toolchain_fields(device: torch.device) -> dict[str, Any]:
    """Versions of the tools, and capabilities of the device."""
    fields: dict[str, Any] = {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
        "platform": f"{sys.platform} {platform.machine()}",
        "device": device.type,
    }
    platform_here = platform_of(device)
    if platform_here.runs_triton_kernels:
        major, minor = platform_here.compute_capability
        fields |= {
            "capability": f"sm_{major}{minor} {platform_here.name}",
            "triton": _installed_version("triton"),
            "cuda": torch.version.cuda,
            # Inductor writes the index into the generated code.
            "device_index": platform_here.indexed_device.index,
        }
    else:
        fields["capability"] = torch.backends.cpu.get_cpu_capability()
        fields["cpu"] = digest(cpu_identity())  # Inductor builds for exactly this CPU,
        fields["threads"] = torch.get_num_threads()  # and writes the number of threads into the generated code.
    return fields


def plan_fields(
    spec: ModelSource,
    passes: Sequence[GraphPass],
    disabled: frozenset[str],
    kernels: frozenset[str],
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh = SINGLE_RANK,
) -> dict[str, Any]:
    """Key of a whole model's plan: everything that its captured and rewritten graph depends on."""
    inputs = [(one.name, one.dtype, one.dims, *(["optional"] if one.optional else [])) for one in spec.inputs]
    return {
        **toolchain_fields(device),
        "config": digest(json.dumps(spec.config, sort_keys=True)),
        "architecture": type(spec.module).__name__,
        "step": digest(repr(inputs), repr(spec.state), repr(spec.outputs)),
        "layers": sum(len(group.layers) for group in spec.state),
        # Not the rank: all ranks have the same plan. Nor the stages, which are cut out of it.
        "mesh": {axis: mesh.of_axis(axis) for axis in mesh.divided_axes if axis != PIPE},
        "tp_plan": digest(json.dumps(dict(spec.tp_plan), sort_keys=True)),
        "dtype": str(dtype),
        "passes": [_pass_key(p) for p in passes if p.name not in disabled],
        "kernels": sorted(kernels),
        "weights": digest(repr([(name, one.plain(dtype), one.parts) for name, one in spec.quantized_weights.items()])),
        "model_source": digest(*_module_sources(spec.module)),
        "sources": compiler_sources(),
    }


def piece_fields(fingerprint: str, ops: dict[str, int], device: torch.device) -> dict[str, Any]:
    """Key of a compiled piece: what it computes, the versions of our ops in it (`op_versions`), the toolchain, and how it is used."""
    return {**toolchain_fields(device), "adaptor": _adaptor_sources(), "fingerprint": fingerprint, "ops": ops}


def op_versions(gm: GraphModule) -> dict[str, int]:
    """Versions of the `cas` ops that a graph calls."""
    infos = filter(None, (op_info(node.target) for node in gm.graph.nodes))
    return dict(sorted((info.name, info.version) for info in infos))


def _pass_key(graph_pass: GraphPass) -> str:
    """The pass's own key. For a user's pass also its source, so that editing it invalidates artifacts."""
    if type(graph_pass).__module__.startswith("compile_and_serve.compiler.passes."):
        return graph_pass.cache_key()  # `compiler_sources` covers its source
    source = source_of(graph_pass)
    # Without a source, the key is unique: no artifact is ever reused.
    origin = f"source {digest(source)}" if source is not None else f"no source, {uuid.uuid4().hex}"
    return f"{graph_pass.cache_key()} from {type(graph_pass).__module__}, {origin}"


def _module_sources(module: torch.nn.Module) -> list[str]:
    """Text of every file that defines a class of the model, except torch's."""
    classes = {type(child) for child in module.modules()}
    names = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")}
    return [inspect.getsource(sys.modules[name]) for name in sorted(names)]


def compiler_sources() -> str:
    """Changes with any source of the compiler and of the kernels, so that compiled and measured results do not outlive an edit."""
    return digest(source_digest(_COMPILER), kernel_digest())


@cache
def _adaptor_sources() -> str:
    """Changes with the files that decide how Inductor is called (options, the range of lengths, decompositions) and what is stored."""
    return digest(*((_COMPILER / name).read_text() for name in ("inductor.py", "built_kernels.py", "compat.py")))


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
