"""What the contents of the KV cache depend on beside their keys, as 32 bytes. Files are shared where it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from compile_and_serve import __version__
from compile_and_serve.runtime.config import EngineConfig

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # of a file of weights: to read all of it would take as long as loading it
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")


def fingerprint(config: EngineConfig, page_bytes: int) -> bytes:
    """Of the model's files, the options that change keys and values, and the layout of pages."""
    digest = sha256()
    model = replace(config.model, path=Path(), model="", download_dir=None)
    cache = (config.cache.dtype, config.cache.state_dtype, config.cache.tokens_per_block)
    compiled = (config.compile.quantization, config.compile.quantization_exclude, config.mesh)
    speculative = None if config.speculative is None else replace(config.speculative, model=None)
    digest.update(repr((__version__, model, cache, compiled, speculative, page_bytes)).encode())
    for path in (config.model.path, config.drafter_path, config.model.merge_lora):
        for part in () if path is None else contents_of(path):
            digest.update(sha256(part).digest())
    return digest.digest()


def contents_of(path: Path) -> Iterator[bytes]:
    """Of a folder its config and samples of its weights, or of a single file; names of files do not matter."""
    files = [path] if path.is_file() else sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    for name in ("config.json", "adapter_config.json"):
        if (path / name).is_file():
            yield (path / name).read_bytes()
    for file in files:
        size = file.stat().st_size
        yield str(size).encode()
        with file.open("rb") as stream:
            for number in range(_SAMPLES):
                stream.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                yield stream.read(_SAMPLE_BYTES)
