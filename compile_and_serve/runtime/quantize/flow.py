"""`quantize_checkpoint`: the steps from a model and a text to a quantized checkpoint and its perplexity."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.quantize.llm_compressor import Scheme, require_llm_compressor, write_quantized
from compile_and_serve.runtime.quantize.source import copy_other_files, require_unquantized, write_gguf_tokenizer, write_weights
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.runtime.weights import read_config, resolve_model

SEQUENCE_TOKENS = 512
MAX_HELD_OUT = 8  # sequences

Quantizer = Callable[[Path, Path, Scheme, Sequence[Sequence[int]]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """group_size: inputs per scale of int4, else None. perplexity_before, perplexity_after: on the same `tokens` tokens."""

    tokens: int
    perplexity_before: float
    perplexity_after: float
    group_size: int | None


def quantize_checkpoint(
    model: str,
    output: Path,
    scheme: Scheme,
    *,
    calibration: Path | None = None,
    num_samples: int = 128,
    quantizer: Quantizer = write_quantized,
    on_stage: Callable[[str], None] = lambda _stage: None,
    **options: Any,
) -> QuantizeReport:
    """Write `model`, quantized, to the folder `output` in the compressed-tensors format.

    output: a new or empty folder; it appears whole or not at all. calibration: a text file; by default Python's own documentation. Its last
    tenth (at most 8 sequences of 512 tokens) is held out, and the engine computes the perplexity of the model and of the checkpoint
    on it. num_samples: sequences of 512 tokens to calibrate with. on_stage: called at the start of each stage. options: of the
    engines, as for `LLM`. Raises `ValueError` for a user's mistake.
    """
    check_output(output)
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}: expected at least 1.")
    if quantizer is write_quantized:
        require_llm_compressor()
    text = calibration_text(calibration)
    path = resolve_model(model)
    require_unquantized(path)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        source, unfinished = Path(scratch) / "source", Path(scratch) / "quantized"
        unfinished.mkdir()
        if path.suffix == ".gguf":
            on_stage("dequantizing the GGUF file")
            source.mkdir()
            write_weights(path, source)
            write_gguf_tokenizer(path, source)
        else:
            source = path
        positions = read_config(source).get("max_position_embeddings") or SEQUENCE_TOKENS + 1
        length = min(SEQUENCE_TOKENS, positions - 1)  # a token is generated, too
        samples, held_out = split_text(load_tokenizer(source).encode(text), length, num_samples)
        on_stage("perplexity before")
        before = perplexity(str(source), held_out, **options)
        on_stage(f"quantizing to {scheme}")
        quantizer(source, unfinished, scheme, samples)
        copy_other_files(source, unfinished)
        on_stage("perplexity after")
        after = perplexity(str(unfinished), held_out, **options)
        unfinished.rename(output)
    return QuantizeReport(
        tokens=sum(len(tokens) - 1 for tokens in held_out), perplexity_before=before, perplexity_after=after, group_size=_group_size(output)
    )


def check_output(output: Path) -> None:
    """Raise `ValueError` unless `output` is a new or empty folder."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file: give a new folder.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty: give a new or empty folder.")


def calibration_text(file: Path | None) -> str:
    """The text of `file`, or of Python's documentation if it is None. Raises `ValueError` if it cannot be read or is empty."""
    if file is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values())
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--calibration {file} cannot be read: {error}.") from None
    if not text.strip():
        raise ValueError(f"--calibration {file} is empty: give a file with text.")
    return text


def split_text(tokens: list[int], length: int, num_samples: int) -> tuple[list[list[int]], list[list[int]]]:
    """(at most `num_samples` sequences to calibrate with, the sequences held out), each of `length` tokens.

    The samples are spread evenly over the text. Raises `ValueError` if the text is shorter than two sequences.
    """
    sequences = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    if len(sequences) < 2:
        raise ValueError(
            f"The calibration text has {len(tokens)} tokens: give one with at least {2 * length}, half of them for the perplexity."
        )
    held_out = max(1, min(MAX_HELD_OUT, len(sequences) // 10))
    rest = sequences[:-held_out]
    count = min(num_samples, len(rest))
    return [rest[i * len(rest) // count] for i in range(count)], sequences[-held_out:]


def perplexity(model: str, sequences: Sequence[Sequence[int]], **options: Any) -> float:
    """exp(−mean log p(token | the tokens before it in its sequence)), computed by an engine of its own."""
    from compile_and_serve.runtime.llm.llm import LLM
    from compile_and_serve.runtime.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": list(tokens)} for tokens in sequences]
    with LLM(model, max_num_seqs=8, max_num_batched_tokens=SEQUENCE_TOKENS, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    logprobs = [
        entry[token].logprob
        for output in outputs
        for entry, token in zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=True)
        if entry is not None
    ]
    return math.exp(-sum(logprobs) / len(logprobs))


def _group_size(folder: Path) -> int | None:
    groups = (read_config(folder).get("quantization_config") or {}).get("config_groups") or {}
    sizes = {(group.get("weights") or {}).get("group_size") for group in groups.values()}
    return next((size for size in sizes if size), None)
