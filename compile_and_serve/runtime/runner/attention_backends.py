"""Which attention backend runs: by name, or the first whose capabilities cover the model and the device."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch

from compile_and_serve.compiler.artifacts.cache_key import toolchain_fields
from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, AttentionLayer
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.runner.device import resolve_kv_cache_dtype

logger = logging.getLogger(__name__)

# Name → class, fastest first; imported only when it is tried, so that a missing package is a reason and not a crash.
BACKENDS: Mapping[str, str] = {
    "cpu": "compile_and_serve.custom_ops.attention.cpu_backend:CpuAttention",
    "flashinfer": "compile_and_serve.custom_ops.attention.flashinfer_backend:FlashInferAttention",
    "triton": "compile_and_serve.custom_ops.attention.triton_backend:TritonAttention",
    "torch": "compile_and_serve.custom_ops.attention.torch_backend:TorchAttention",
}


MODULES_KIND = "attention-modules"  # in the artifact store


class KernelModules(Protocol):
    """Compiled kernels of a package that builds them at first use."""

    key: str  # package version and architecture
    variants: tuple[Any, ...]

    def build(self, variant: Any) -> None: ...

    def export_to(self, folder: Path) -> list[Path]: ...

    def import_from(self, folder: Path) -> list[Path]: ...

    def load_in_background(self) -> None: ...


@runtime_checkable
class BuildsModules(Protocol):
    """A backend whose kernels are built at first use."""

    def modules(
        self, dtype: torch.dtype, head_dim: int, device: torch.device, features: frozenset[AttentionFeature] = frozenset()
    ) -> KernelModules: ...


class AttentionBackendError(ValueError):
    """The backend that was asked for is not known, or does not run here."""


def select_attention_backend(
    name: str | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    features: frozenset[AttentionFeature] = frozenset(),
    group: str = KV_CACHES,
) -> AttentionBackend:
    """The backend called `name`, or (None) the first of `BACKENDS` that supports the combination.

    group: name of the state group, for the log.
    Raises `AttentionBackendError`: an unknown name lists the known ones, a forced one that does not run says why.
    """
    if name is not None and name not in BACKENDS:
        raise AttentionBackendError(f"There is no attention backend {name!r}: known are {', '.join(BACKENDS)}.")
    reasons: list[tuple[str, str]] = []
    for candidate in BACKENDS if name is None else (name,):
        backend: AttentionBackend | None = None
        try:
            backend = _load(candidate)
            reason = backend.unsupported_reason(
                device=device,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                head_dim=head_dim,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                block_size=block_size,
                features=features,
            )
        except ImportError as error:
            reason = f"it cannot be imported: {error}"
        if reason is None:
            assert backend is not None
            passed_over = "".join(f"; not {other}: {why}" for other, why in reasons)
            is_slow = platform_of(device).runs_triton_kernels and candidate == "torch" and name is None
            level = logging.WARNING if is_slow else logging.INFO
            slow = ", the plain reference: slow" if is_slow else ""
            where = "" if group == KV_CACHES else f" of {group}"
            logger.log(level, "Attention backend%s: %s%s%s.", where, candidate, slow, passed_over)
            return backend
        reasons.append((candidate, reason))
    if name is not None:
        raise AttentionBackendError(f"Attention backend {name!r} does not run here: {reasons[0][1]}.")
    raise AttentionBackendError(
        "No attention backend runs this model here: " + "; ".join(f"{other}: {why}" for other, why in reasons) + "."
    )


def backends_of_model(spec: ModelSpec, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> dict[str, AttentionBackend]:
    """The backend of each attention group of a model under these options; raises as `select_attention_backend` does.

    Kernel modules that an artifact brings are put where the backend finds them, so that nothing waits for their build. Built modules are
    loaded in threads while the model is compiled and read.
    """
    return {group.name: _backend_of_group(group, spec, config, device, dtype) for group in spec.state if group.is_attention}


def _backend_of_group(
    group: StateGroup, spec: ModelSpec, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    mesh = config.mesh
    layer = _layer(group)
    num_heads = int(spec.config.get("num_attention_heads", layer.num_kv_heads))
    backend = select_attention_backend(
        config.attention_backend,
        device=device,
        dtype=dtype,
        kv_cache_dtype=resolve_kv_cache_dtype(config.cache.dtype, dtype),
        head_dim=layer.head_dim,
        num_heads=max(1, num_heads // mesh.tensor),
        num_kv_heads=layer.of_rank(mesh).num_kv_heads,
        block_size=config.cache.tokens_per_block,
        features=group.features,
        group=group.name,
    )
    if isinstance(backend, BuildsModules):
        modules = backend.modules(dtype, layer.head_dim, device, group.features)
        if config.compile.artifact_dir is not None:
            entry = ArtifactStore(config.compile.artifact_dir, read_only=True).get(
                MODULES_KIND, _module_fields(modules, group, dtype, device)
            )
            if entry is not None and (taken := modules.import_from(entry.path)):
                logger.info("Took %d built attention modules from the artifact %s.", len(taken), entry.path)
        modules.load_in_background()
    return backend


def _layer(group: StateGroup) -> AttentionLayer:
    """What every layer of an attention group keeps: a backend serves layers that are alike."""
    assert len(set(group.layers)) == 1, f"layers of the state group {group.name} differ: declare a group for each kind"
    return cast(AttentionLayer, group.layers[0])


def keep_built_modules(
    backends: Mapping[str, AttentionBackend], spec: ModelSpec, device: torch.device, dtype: torch.dtype, root: Path
) -> int:
    """Build the backends' kernel modules and keep them in the artifact store `root`, where `backends_of_model` looks for them.

    → how many; 0 where no backend builds any. Takes a minute and more for FlashInfer's.
    """
    count = 0
    for group in spec.state:
        backend = backends.get(group.name)
        if not isinstance(backend, BuildsModules):
            continue
        head_dim = _layer(group).head_dim
        modules = backend.modules(dtype, head_dim, device, group.features)
        for variant in modules.variants:
            modules.build(variant)
        with tempfile.TemporaryDirectory() as folder:
            written = modules.export_to(Path(folder))
            if written:
                ArtifactStore(root).put(MODULES_KIND, _module_fields(modules, group, dtype, device), Path(folder))
        count += len(written)
    return count


def _module_fields(modules: KernelModules, group: StateGroup, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        **toolchain_fields(device),
        "modules": modules.key,
        "head_dim": _layer(group).head_dim,
        "dtype": str(dtype),
        "features": sorted(group.features),
    }


def _load(name: str) -> AttentionBackend:
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend
