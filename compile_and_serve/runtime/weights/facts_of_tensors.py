"""Of a folder, what its tensors say is believed before what its config.json says: whether the head is the embedding.

They also say in which order stacked experts have their dimensions, about which config.json says nothing.
"""

from __future__ import annotations

import logging
import re
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
_CHUNK_ROWS = 4096  # compared at once


def with_facts_of_tensors(config: dict[str, Any], folder: Path, *, is_whole: bool) -> dict[str, Any]:
    """The config, changed where the folder's tensors say otherwise, with a warning for each change.

    - A stored head that differs from the embedding is used, also if `tie_word_embeddings` says that they are one.
    - The embedding is the head if none is stored. is_whole: otherwise, the head may come from another checkpoint.
    - `EXPERTS_HAVE_INPUTS_FIRST` is set where the stacked experts are in this order.

    Without readable tensors the config is returned as it is: whoever loads them says what is wrong.
    """
    config = _with_order_of_experts(config, folder)
    try:
        held = open_folder(folder, lambda name: not _IN_A_LAYER.search(name) and (_is(_HEAD, name) or _is(_EMBEDDING, name)))
    except WeightError:
        return config
    heads = [name for name in held.shapes if _is(_HEAD, name)]
    embeddings = sorted((name for name in held.shapes if _is(_EMBEDDING, name) and name.endswith(".weight")), key=len)
    if not embeddings:
        return config
    embedding, says_tied = embeddings[0], _says_tied(config)
    if heads and says_tied is not False and _differs(held, heads, embedding):
        if says_tied:
            logger.warning("%s holds %s, which differs from %s: it is used, although config.json ties them.", folder, heads[0], embedding)
        return _with_tie(config, False)
    if not heads and is_whole and not says_tied and _generates(config):
        if says_tied is False:
            logger.warning("%s holds no output head: %s is used, although config.json does not tie them.", folder, embedding)
        return _with_tie(config, True)
    return config


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
