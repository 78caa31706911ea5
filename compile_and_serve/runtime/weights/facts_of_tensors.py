"""Of a folder, what its tensors say is believed before what its config.json says: whether the head is the embedding, how many rows it has.

They also say in which order stacked experts have their dimensions, about which config.json says nothing, and which modules bitsandbytes has
not quantized: transformers 5 keeps experts and routers, which transformers 4 quantized.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.pickled import PickledCheckpoint
from compile_and_serve.runtime.weights.safetensors import SafetensorsCheckpoint, open_folder

logger = logging.getLogger(__name__)

# What output heads and embeddings are called in checkpoints, before the last dot.
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output_projection|lm_head\.decoder|cls\.predictions\.decoder|proj_out|pred_layer\.proj)")
_EMBEDDING = re.compile(
    r"(.*\.)?(embed_tokens|wte|word_embeddings|word_embedding|embed_in|tok_embeddings|tokens_embed)|(.*\.)?(backbone|transformer)\.embeddings"
)
_IN_A_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")  # layers for multi-token prediction have an embedding and a head of their own
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_STACKED_EXPERTS = re.compile(r"(.*\.)?mlp\.experts\.down_proj")
EXPERTS_HAVE_INPUTS_FIRST = "experts_have_inputs_first"  # in the config: the tensors are [experts, inputs, outputs]
_BITSANDBYTES_SCALES = re.compile(r"(.*)\.(?:weight\.absmax|SCB)")
_CHUNK_ROWS = 4096  # compared at once


def with_facts_of_tensors(config: dict[str, Any], folder: Path, *, is_whole: bool) -> dict[str, Any]:
    """The config, changed where the folder's tensors say otherwise, with a warning for each change.

    - A stored head that differs from the embedding is used, also if `tie_word_embeddings` says that they are one.
    - `vocab_size` is the number of the embedding's rows.
    - The embedding is the head if none is stored. is_whole: otherwise, the head may come from another checkpoint.
    - `EXPERTS_HAVE_INPUTS_FIRST` is set where the stacked experts are in this order.
    - Modules that bitsandbytes has not quantized are added to `llm_int8_skip_modules`.

    Without readable tensors the config is returned as it is: whoever loads them says what is wrong.
    """
    config = _with_plain_modules(_with_order_of_experts(config, folder), folder)
    try:
        held = open_folder(folder, lambda name: not _IN_A_LAYER.search(name) and (_is(_HEAD, name) or _is(_EMBEDDING, name)))
    except WeightError:
        return config
    heads = [name for name in held.shapes if _is(_HEAD, name)]
    embeddings = sorted((name for name in held.shapes if _is(_EMBEDDING, name) and name.endswith(".weight")), key=len)
    if not embeddings:
        return config
    embedding, says_tied = embeddings[0], _says_tied(config)
    config = _with_vocab_size(config, folder, embedding, held.shapes, heads)
    if heads and says_tied is not False and _differs(held, heads, embedding):
        if says_tied:
            logger.warning("%s holds %s, which differs from %s: it is used, although config.json ties them.", folder, heads[0], embedding)
        return _with_tie(config, False)
    if not heads and is_whole and not says_tied and _generates(config):
        if says_tied is False:
            logger.warning("%s holds no output head: %s is used, although config.json does not tie them.", folder, embedding)
        return _with_tie(config, True)
    return config


def _with_vocab_size(
    config: dict[str, Any], folder: Path, embedding: str, shapes: Mapping[str, tuple[int, ...]], heads: Sequence[str]
) -> dict[str, Any]:
    """Tokens were added, or rows filled up, after config.json was written. The head must have as many rows."""
    text = config.get("text_config")
    place = text if isinstance(text, dict) and "vocab_size" in text else config
    says, (rows, *width) = place.get("vocab_size"), shapes[embedding]
    others = {shapes[name][0] for name in heads if name.endswith(".weight")} - {rows}
    if not isinstance(says, int) or says == rows or width != [place.get("hidden_size")] or others:
        return config
    logger.warning("%s holds %d rows of %s: they are used, although config.json has vocab_size %d.", folder, rows, embedding, says)
    changed = {**place, "vocab_size": rows}
    return changed if place is config else {**config, "text_config": changed}


def _with_order_of_experts(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    text = config.get("text_config") or config
    sizes = text.get("moe_intermediate_size"), text.get("hidden_size")
    if None in sizes or sizes[0] == sizes[1]:
        return config
    try:
        held = open_folder(folder, lambda name: _STACKED_EXPERTS.fullmatch(name) is not None)
    except WeightError:
        return config
    first = next((shape for name, shape in held.shapes.items() if _STACKED_EXPERTS.fullmatch(name)), ())
    return {**config, EXPERTS_HAVE_INPUTS_FIRST: True} if tuple(first[1:]) == sizes else config


def _with_plain_modules(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "bitsandbytes":
        return config
    skipped = quantization.get("llm_int8_skip_modules")
    try:
        shapes = open_folder(folder).shapes
    except WeightError:
        return config
    scales = [match[1] for name in shapes if (match := _BITSANDBYTES_SCALES.fullmatch(name))]
    if not scales or not isinstance(skipped, list | None):
        return config
    quantized = {*scales, *map(_all_experts, scales)}
    weights = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) > 1]
    plain = {_all_experts(name) for name in weights if name not in quantized} - quantized
    skipped = ["lm_head"] if skipped is None else skipped
    return {**config, "quantization_config": {**quantization, "llm_int8_skip_modules": [*skipped, *sorted(plain.difference(skipped))]}}


def _all_experts(name: str) -> str:
    """The experts of a layer for a tensor or a module of one or all of them, other modules as they are."""
    stem, found, _ = name.partition(".experts.")
    return stem + found.removesuffix(".")


def _generates(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith(_GENERATORS)


def _is(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(name.rpartition(".")[0]) is not None


def _says_tied(config: dict[str, Any]) -> bool | None:
    """What the config says; None: nothing, and the class's default counts."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    return next((bool(place["tie_word_embeddings"]) for place in places if place.get("tie_word_embeddings") is not None), None)


def _with_tie(config: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    text = config.get("text_config")
    nested = {"text_config": {**text, "tie_word_embeddings": is_tied}} if isinstance(text, dict) else {}
    return {**config, **nested, "tie_word_embeddings": is_tied}


def _differs(held: SafetensorsCheckpoint | PickledCheckpoint, heads: list[str], embedding: str) -> bool:
    """Whether the head is another tensor than the embedding: quantized, of another shape, or with other values."""
    if any(not name.endswith((".weight", ".bias")) for name in heads):
        return True
    head = next((name for name in heads if name.endswith(".weight")), None)
    if head is None:
        return False
    if held.shapes[head] != held.shapes[embedding]:
        return True
    tensors = dict(held.stream({head, embedding}))
    first, second = tensors[head], tensors[embedding]
    if first.dtype != second.dtype or first.data_ptr() == second.data_ptr():
        return first.dtype != second.dtype
    rows = range(0, len(first), _CHUNK_ROWS)
    return not all(torch.equal(first[i : i + _CHUNK_ROWS], second[i : i + _CHUNK_ROWS]) for i in rows)
