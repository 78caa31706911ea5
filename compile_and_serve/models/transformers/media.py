"""Images and speech for classes of the transformers package.

They share a seam. A module embeds the prompt, puts features of images or audio in place of the placeholders' embeddings
(`get_placeholder_mask`, `inputs_merger`, or a merge of its own), and gives the result to its decoder. The encoder beside the model is that
module with an embedding that knows no token, up to the call of its decoder. What it embeds is a row for each token of an item's text; a row
of NaN stands for "the token's own embedding", which separators between an image's parts have. It runs as it is written, one item at a time.
The decoder is the same class, whose embedding reads rows. Phi-4's decoder embeds features itself, in a module of its own
(`embed_tokens_extend`), which is then the encoder.

A class that reads speech reads no images here, so that its encoder has no tower for them.

Shape legend: T tokens of the step, or of an item's text in the encoder; D hidden size.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compile_and_serve.custom_ops.encoder_rows import ENCODER_ROW, read_rows
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.rows import ENCODER_ROWS, EncoderRow
from compile_and_serve.custom_ops.state.tokens import TokenWindow
from compile_and_serve.custom_ops.step import POSITIONS, TOKENS, StepOutput
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.transformers.attention import RunningForward, Unsupported, unsupported
from compile_and_serve.models.transformers.weights import split_weights, weight_names
from compile_and_serve.models.vision.ahead import PROMPTS_AHEAD, TOKENS_AHEAD
from compile_and_serve.models.vision.names import MEDIA_ROWS
from compile_and_serve.models.vision.rope import positions_input
from compile_and_serve.models.vision.whole_items import PROCESSED_INPUT

# Types of models in which tokens of an image attend to all of the same image, and those of a prompt to all of the prompt.
_AHEAD_IN_IMAGES, _AHEAD_IN_PROMPTS = ("gemma3",), ("paligemma",)
_DECODERS = ("language_model", "text_model")
_AUDIO_MERGE = "_merge_input_ids_with_audio_features"  # Qwen2-Audio's
_MERGES = ("get_placeholder_mask", "inputs_merger", _AUDIO_MERGE)
_FEATURES = ("get_image_features", "get_audio_features")
_FEATURE_EMBEDDING = "embed_tokens_extend"
_IMAGE_PARTS = ("visual", "vision_tower", "image_embed")
_GENERATION_PARTS = ("vqmodel", "generation_embeddings", "generation_aligner", "generation_head")  # of Janus, which also makes images
_REASON = "transformers' encoder reads sizes of images and audio on the host"
_TO_DECODER = frozenset(
    "inputs_embeds attention_mask position_ids cache_position input_ids past_key_values cache use_cache logits_to_keep labels "
    "return_dict output_attentions output_hidden_states".split()
)


@dataclass(frozen=True, slots=True)
class Merging:
    """Where features take the place of embeddings. name: of the module. decoder: its child that takes the embeddings; "": the module itself
    gives them back.
    """

    name: str
    decoder: str


def merging_module(model: nn.Module) -> Merging | None:
    """None: the class reads neither images nor speech. Raises `Unsupported`, and `ModelConfigError` for one that reads no text alone."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if others := [name for name in needed if name not in ("input_ids", "position_ids")]:
        raise unsupported(type(model).__name__, f"its forward computes no text without {' and '.join(others)}")
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    for name, module in named:
        if hasattr(module, _FEATURE_EMBEDDING):
            return Merging(f"{name}.{_FEATURE_EMBEDDING}".removeprefix("."), "")
    found = [(name, module) for name, module in named if any(hasattr(module, one) for one in _MERGES)]
    if not found or not any(hasattr(part, one) for part in (model, found[0][1]) for one in (*_FEATURES, _AUDIO_MERGE)):
        return None
    name, module = found[0]
    decoder = _decoder_of(name, module)
    if len(found) > 1 or "." in name or decoder is None:
        raise Unsupported("its features are not put in place of embeddings before its decoder")
    if attends_ahead(model) and getattr(model.config, "model_type", None) not in (*_AHEAD_IN_IMAGES, *_AHEAD_IN_PROMPTS):
        raise Unsupported("tokens attend to later ones, and not to those of the same image alone")
    if others := sorted(_given_to_decoder(module, decoder) - _TO_DECODER):
        raise Unsupported(f"its decoder takes more of an item than embeddings: {', '.join(others)}")
    return Merging(name, decoder)


def attends_ahead(model: nn.Module) -> bool:
    """Whether tokens of the class attend to later ones."""
    return "block_sequence_ids" in inspect.getsource(sys.modules[type(model).__module__])


def without_feature_embedding(model: nn.Module) -> None:
    """Let a decoder that embeds features itself embed text alone, without the towers for them."""
    for module in list(model.modules()):
        if hasattr(module, _FEATURE_EMBEDDING):
            setattr(module, _FEATURE_EMBEDDING, _TextAlone())


class _TextAlone(nn.Module):
    def forward(self, ids: torch.Tensor, embedded: torch.Tensor, **_: Any) -> torch.Tensor:
        return embedded


def _decoder_of(name: str, module: nn.Module) -> str | None:
    found = next((one for one in _DECODERS if hasattr(module, one)), None)
    is_whole = found is None and not name and isinstance(getattr(module, "model", None), PreTrainedModel)
    return "model" if is_whole else found


def _given_to_decoder(module: nn.Module, decoder: str) -> set[str]:
    """The names of what the module's forward gives its decoder."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward))))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return {word.arg for call in calls if call.func.attr == decoder for word in call.keywords if word.arg is not None}  # type: ignore[attr-defined]


def _reads_audio(module: nn.Module) -> bool:
    return hasattr(module, "get_audio_features") or hasattr(module, _AUDIO_MERGE) or hasattr(module, "audio_embed")


def has_three_rows(module: nn.Module) -> bool:
    """Whether positions have rows for time, height and width."""
    return hasattr(module, "get_rope_index")


def read_rows_in_embedding(model: Any, running: RunningForward) -> None:
    """Let the model's embedding give the encoder's row of a token that has one."""
    embedding = model.get_input_embeddings()
    embedding.forward = partial(_embed, embedding.forward, running)


def _embed(forward: Callable[..., torch.Tensor], running: RunningForward, ids: torch.Tensor) -> torch.Tensor:
    embedded_1TD = forward(ids)
    if running.encoder_rows is None:
        return embedded_1TD
    rows_RD, encoder_row_T = running.encoder_rows
    rows_TD = read_rows(rows_RD, encoder_row_T)
    has_row_T = (encoder_row_T > 0) & ~rows_TD[:, 0].isnan()
    return torch.where(has_row_T[:, None], rows_TD.to(embedded_1TD.dtype), embedded_1TD[0])[None]


class _Embedded(Exception):
    """Ends a forward at its decoder."""

    def __init__(self, rows_1TD: torch.Tensor) -> None:
        super().__init__()
        self.rows_1TD = rows_1TD


class _NoTokens(nn.Module):
    """An embedding of NaN."""

    def __init__(self, width: int, like: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._width, self._like = width, like

    @property
    def weight(self) -> torch.Tensor:
        """Of the dtype and device of the others."""
        return self._like()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        like = self._like()
        return torch.full((*ids.shape, self._width), float("nan"), dtype=like.dtype, device=like.device)


class _DecoderCall(nn.Module):
    """Stands for the decoder."""

    def __init__(self, config: Any, embedding: _NoTokens) -> None:
        super().__init__()
        self.config, self.embed_tokens = config, embedding

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **given: Any) -> None:
        others = sorted(name for name, value in given.items() if name not in _TO_DECODER and isinstance(value, (torch.Tensor, list, tuple)))
        if args or others:
            raise ModelConfigError(f"The decoder takes more of an item than embeddings: {', '.join(others)}.")
        raise _Embedded(inputs_embeds)


class ItemModule(nn.Module):
    """forward(tensors of the class's processor for one item) → rows [T, D]; NaN: the token's own embedding."""

    def __init__(self, merging: Merging, model: Any, width: int) -> None:
        super().__init__()
        module = model.get_submodule(merging.name)
        head = model.get_output_embeddings()  # some classes ask the decoder, which is replaced below
        self._forward = module.forward
        self._parameters_of_forward = inspect.signature(module.forward).parameters
        self._gives_back = not merging.decoder
        self._embedding = [_NoTokens(width, lambda: next(self.parameters()))]  # in a list: it is none of the children
        for name in (*(_IMAGE_PARTS if _reads_audio(module) else ()), *_GENERATION_PARTS):
            if hasattr(module, name):
                setattr(module, name, None)
        if merging.decoder:
            embedding = self._embedding[0]
            setattr(module, merging.decoder, _DecoderCall(getattr(module, merging.decoder).config, embedding))
            module.get_input_embeddings = lambda: embedding
        *path, last = merging.name.split(".")
        if len(path) == 1:  # inside of the base model, under its name
            self.add_module(path[0], nn.ModuleDict({last: module}))
            return
        for child_name, child in {last: module}.items() if last else module.named_children():
            if child is not head:
                self.add_module(child_name, child)

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        known = {name: one for name, one in tensors.items() if name in self._parameters_of_forward}
        inputs = {name: one.to(dtype) if one.is_floating_point() else one for name, one in known.items()}
        ids = inputs["input_ids"]
        if self._gives_back:
            rows_1TD: torch.Tensor = self._forward(inputs_embeds=self._embedding[0](ids), **inputs)
            return rows_1TD[0]
        options: dict[str, Any] = {"position_ids": torch.zeros_like(ids)} if "position_ids" in self._parameters_of_forward else {}
        try:
            self._forward(**inputs, **options, use_cache=False)
        except _Embedded as end:
            return end.rows_1TD[0]
        raise ModelConfigError("The class's forward did not come to its decoder.")


def with_encoder(
    text: ModelSpec, merging: Merging, model: Any, values: Callable[[Any], Mapping[str, torch.Tensor]], dtype: torch.dtype
) -> ModelSpec:
    """The spec with the encoder beside the decoder. text: of the decoder, which reads rows in its embedding.

    merging: in `model`, which is another instance of the class. values: of the buffers that no checkpoint has.
    """
    names = weight_names(model)
    every = {one for one, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    width = int(model.config.get_text_config().hidden_size)
    three_rows = has_three_rows(model.get_submodule(merging.name))
    whole_prompts = model.config.model_type in _AHEAD_IN_PROMPTS
    ahead = (PROMPTS_AHEAD if whole_prompts else TOKENS_AHEAD,) if attends_ahead(model) else ()
    # Within a prompt, tokens attend to all others: no window may hide one.
    windows = [one.kind.size for one in text.state if isinstance(one.kind, TokenWindow)] if whole_prompts else []
    of_text = {one for one, _ in (*text.module.named_parameters(remove_duplicate=False), *text.module.named_buffers())}
    encoder = ItemModule(merging, model, width).requires_grad_(False).eval()
    own = {one for one, _ in (*encoder.named_parameters(), *encoder.named_buffers())}
    persistent = encoder.state_dict().keys()
    for tensor_name, tensor in (*encoder.named_parameters(), *encoder.named_buffers()):
        if tensor_name in persistent and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    row = EncoderRow(width=width, dtype=dtype)
    positions = positions_input(text.max_model_len) if three_rows else POSITIONS
    return replace(
        text,
        state=(*text.state, StateGroup(name=MEDIA_ROWS, layers=(row,), kind=ENCODER_ROWS)),
        inputs=(*(positions if one is POSITIONS else one for one in text.inputs), ENCODER_ROW, *ahead),
        whole_prompts=whole_prompts,
        max_model_len=min([text.max_model_len, *windows]),
        weight_map={**dict.fromkeys(one for one, target in names.items() if target not in of_text), **text.weight_map},
        encoder=ModelSpec(
            module=encoder,
            config=text.config,
            state=(),
            vocab_size=1,
            max_model_len=text.max_model_len,
            inputs=(PROCESSED_INPUT,),
            outputs=(StepOutput(name="rows", dims=(TOKENS, width)),),
            weight_map={one: names.get(one, one) if names.get(one, one) in own else None for one in {*names, *every, *text.parts} - own},
            buffers={one: value for one, value in values(model).items() if one in own and one not in persistent},
            quantized_weights={one: stored for one, stored in split_weights(model, dtype).items() if one in own},
            eager_reason=_REASON,
        ),
    )
