"""`--quantization` with the name of a checkpoint's format, as vLLM takes it: checked against the files, which say it themselves."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from compile_and_serve.compiler.config import Quantization
from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.folder_config import read_folder_config

_SCHEMES = get_args(Quantization)
# vLLM's names, kernels included → the `quant_method`s of a quantization_config.
_FORMATS: dict[str, tuple[str, ...]] = {
    "auto_gptq": ("gptq",),
    "auto-round": ("auto-round",),
    "awq": ("awq",),
    "awq_marlin": ("awq",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("fp8",),
    "gguf": ("gguf",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "inc": ("auto-round",),
    "modelopt": ("modelopt",),
    "modelopt_fp4": ("modelopt", "modelopt_fp4"),
    "mxfp4": ("mxfp4",),
    "quark": ("quark",),
    "torchao": ("torchao",),
}


def names_a_format(given: str | None) -> bool:
    """Whether a value of `--quantization` only names how a checkpoint is stored."""
    return given in _FORMATS and given not in _SCHEMES


def scheme_to_apply(given: Quantization | None, path: Path) -> Quantization | None:
    """The scheme to quantize to while the weights are loaded; None: the weights stay as the checkpoint has them.

    given: a scheme, or the name of the checkpoint's format. Raises `WeightError` if the checkpoint has another one.
    """
    if given not in _FORMATS:
        return given
    stored = _stored_method(path)
    if stored in _FORMATS[given]:
        return None
    if given in _SCHEMES:
        return given
    if stored is None:
        raise WeightError(
            f"--quantization {given} is the format of quantized files, but {path.name} is not quantized: leave it out, or choose "
            f"{', '.join(_SCHEMES)} to quantize the weights while they are loaded."
        )
    raise WeightError(f"--quantization is {given}, but the weights in {path.name} are stored as {stored}: leave it out.")


def _stored_method(path: Path) -> str | None:
    """The format of a checkpoint's weights; None: they are not quantized. The files are checked where they are read."""
    if path.suffix == ".gguf":
        return "gguf"
    try:
        found = read_folder_config(path).get("quantization_config")
    except WeightError:
        return None
    return str(found.get("quant_method")) if isinstance(found, dict) else None
