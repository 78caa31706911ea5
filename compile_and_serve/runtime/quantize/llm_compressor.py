"""Quantizes a model with the package llm-compressor. Nothing else imports it, because it is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Scheme = Literal["int4", "fp8", "int8"]

GROUP_SIZES = (128, 64, 32)  # of int4, the first that divides the inputs of every linear
# An output head is as large as many layers and its rounding errors are not corrected by a later layer. Routers choose experts.
_IGNORE = ["lm_head", r"re:.*\.(gate|router|shared_expert_gate)$"]


def require_llm_compressor() -> None:
    """Raise `ValueError` if llm-compressor is not installed."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise ValueError("Quantizing a checkpoint needs the package llmcompressor: install compile-and-serve[quantize].")


def int4_group_size(in_features: Iterable[int]) -> int:
    """The largest group size that divides all of `in_features`. Raises `ValueError` if there is none."""
    sizes = sorted(set(in_features))
    for size in GROUP_SIZES:
        if all(inputs % size == 0 for inputs in sizes):
            return size
    odd = next(inputs for inputs in sizes if inputs % GROUP_SIZES[-1])
    raise ValueError(f"--scheme int4 needs linears whose inputs are a multiple of {GROUP_SIZES[-1]}, and one has {odd}: use fp8 or int8.")


def write_quantized(source: Path, folder: Path, scheme: Scheme, calibration: Sequence[Sequence[int]]) -> None:
    """Quantize the model in `source` and write its weights and config to `folder` in the compressed-tensors format.

    source: an unquantized model in Hugging Face's layout. calibration: token ids of texts that GPTQ calibrates with.
    int4: weights in groups with zero points, by GPTQ. int8: one scale per output, by GPTQ; activations are quantized per token. fp8: the
    same in float8_e4m3fn, rounded to nearest, which GPTQ does not improve. Raises `ValueError` for a model that llm-compressor cannot
    quantize.
    """
    require_llm_compressor()
    from loguru import logger as loguru_logger

    loguru_logger.disable("llmcompressor")
    loguru_logger.disable("compressed_tensors")
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    with _errors_in_one_sentence():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    modifier = _modifier(scheme, model)
    with _errors_in_one_sentence():
        if scheme == "fp8":
            oneshot(model=model, recipe=modifier)
        else:
            # llm-compressor wants a tokenizer beside a dataset, even one of token ids, but does not call it.
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
            oneshot(model=model, recipe=modifier, dataset=_batches(calibration), processor=tokenizer)
        model.save_pretrained(folder, save_compressed=True)


@contextmanager
def _errors_in_one_sentence() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type: llm-compressor traces the model's code
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"llm-compressor cannot quantize this model ({type(error).__name__}: {first}).") from error


def _modifier(scheme: Scheme, model: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.utils import match_named_modules
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if scheme == "fp8":
        return QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=_IGNORE)
    if scheme == "int8":
        return GPTQModifier(targets=["Linear"], scheme="W8A8", ignore=_IGNORE)
    linears = match_named_modules(model, ["Linear"], _IGNORE)
    size = int4_group_size(linear.in_features for _, linear in linears)
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=size, symmetric=False)
    group = QuantizationScheme(targets=["Linear"], weights=weights)
    return GPTQModifier(config_groups={"group_0": group}, ignore=_IGNORE)


def _batches(calibration: Sequence[Sequence[int]]) -> Any:
    import torch
    from torch.utils.data import DataLoader

    def batch(rows: list[Sequence[int]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return DataLoader(list(calibration), batch_size=1, collate_fn=batch)  # type: ignore[arg-type]
