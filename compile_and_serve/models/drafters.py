"""Models that draft tokens for another model, the target: what their steps take, and how the drafts come out.

Shape legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from compile_and_serve.custom_ops.step import (
    DECODER_INPUTS,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    LOGITS_INDICES,
    POSITIONS,
    ROWS,
    TOKENS,
    StepInput,
    StepOutput,
)
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.dflash import DFlashContext
from compile_and_serve.models.eagle import Eagle3ForCausalLM, EagleForCausalLM
from compile_and_serve.models.hidden_states import num_layers_of, with_hidden_states
from compile_and_serve.models.medusa import MedusaHeads
from compile_and_serve.models.mtp import MtpForCausalLM
from compile_and_serve.models.quantization_config import with_stored_weights
from compile_and_serve.models.qwen3 import Qwen3ForCausalLM
from compile_and_serve.models.registry import (
    ARCHITECTURES,
    DECODER_TP_PLAN,
    ModelImpl,
    build_model,
    decoder_spec,
    deepseek_moe_spec,
    kv_cache_of,
    on_meta,
)
from compile_and_serve.models.spec import ModelSpec, full_attention

DrafterKind = Literal["tokens", "hidden", "heads", "block"]
DRAFT_TOKENS = "draft_tokens"  # the output of Medusa heads
CONTEXT = "context"  # the output of `DFlashContext`
DFLASH_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """A model that drafts.

    kind: "tokens" is a decoder of its own. "hidden" takes a hidden state and the token after it, and gives logits and a hidden state to
    go on with. "heads" takes a hidden state and gives all draft tokens at once. "block" is a decoder that fills in the mask tokens of a
    block.
    target: the target's spec, which gives the hidden states that the drafter reads.
    hidden_size: of the hidden states that `spec` takes. combine: the target gives hidden states of several layers, and a linear
    fc [hidden_size, D · layers] makes one of them.
    maps_tokens: the drafter has a vocabulary of its own; draft token v is the target's token v + d2t[v].
    max_tokens: draft tokens that it can make; None: any number.
    borrowed_weights: parameter → names of the target's tensor that it takes if the drafter's checkpoint has none.
    prefix: of the names of the drafter's tensors in the checkpoint.
    layers_behind: further layers for multi-token prediction. Each reads the hidden states of the one before.
    context: of a block drafter: writes the keys and values of the tokens before the block, from the target's hidden states.
    mask_token: of a block drafter.
    """

    kind: DrafterKind
    spec: ModelSpec
    target: ModelSpec
    hidden_size: int = 0
    combine: bool = False
    maps_tokens: bool = False
    max_tokens: int | None = None
    borrowed_weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prefix: str = ""
    layers_behind: tuple[DrafterSpec, ...] = ()
    context: ModelSpec | None = None
    mask_token: int = 0


def draft_model(config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype, model_impl: ModelImpl = "auto") -> DrafterSpec:
    """A decoder of the target's vocabulary. Raises `ModelConfigError` with one sentence where it does not fit."""
    spec = build_model(config, dtype=dtype, model_impl=model_impl)
    if spec.pooling is not None or spec.drafter is not None:
        raise ModelConfigError("The draft model must be a plain decoder: choose another one in speculative_config.")
    _check_vocabulary(spec.vocab_size, target)
    recurrent = ", ".join(group.name for group in spec.state if not group.is_attention)
    if recurrent:
        raise ModelConfigError(
            f"The draft model keeps recurrent state ({recurrent}), from which rejected tokens cannot be removed: choose another one."
        )
    others = [one.name for one in spec.inputs if one not in DECODER_INPUTS]
    if others:
        raise ModelConfigError(f"The draft model takes {', '.join(others)} too, which no draft has: choose another one.")
    return DrafterSpec(kind="tokens", spec=spec, target=_checked(target))


def eagle(config: Mapping[str, Any], target: ModelSpec, tensors: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype) -> DrafterSpec:
    """An EAGLE-1 head. tensors: names and shapes of its checkpoint; empty for random weights. Raises `ModelConfigError`."""
    if any(name.removeprefix("model.").startswith(("midlayer.", "d2t")) for name in tensors):
        raise ModelConfigError("The drafter is an EAGLE-3 head: use the method eagle3 in speculative_config.")
    decoder, size = DecoderConfig.from_dict({**config, "tie_word_embeddings": False}), _hidden_size(target)
    if decoder.hidden_size != size:
        raise ModelConfigError(
            f"The EAGLE head's hidden size is {decoder.hidden_size} and the model's {size}: use a head that was trained for this model."
        )
    _check_vocabulary(decoder.vocab_size, target)
    has_bias = any(name.endswith("fc.bias") for name in tensors)
    state = full_attention([kv_cache_of(decoder)] * decoder.num_hidden_layers)
    spec = decoder_spec(
        on_meta(lambda: EagleForCausalLM(decoder, has_bias), dtype), decoder, config, [state], {**DECODER_TP_PLAN, "model.fc": "replicated"}
    )
    return DrafterSpec(
        kind="hidden",
        spec=_reads_hidden(spec, decoder.hidden_size, dtype),
        target=with_hidden_states(_checked(target), (num_layers_of(target),)),
        hidden_size=decoder.hidden_size,
        borrowed_weights={_EMBEDDING: (_EMBEDDING,), _HEAD: (_HEAD, _EMBEDDING)},
    )


def eagle3(config: Mapping[str, Any], target: ModelSpec, tensors: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype) -> DrafterSpec:
    """An EAGLE-3 head. tensors: names and shapes of its checkpoint; empty for random weights. Raises `ModelConfigError`."""
    if tensors and not any("midlayer." in name for name in tensors):
        raise ModelConfigError(
            "The drafter has no tensors of an EAGLE-3 head (midlayer.…): use the method eagle for an EAGLE-1 head, or another drafter."
        )
    config = {**config, "num_hidden_layers": 1, "tie_word_embeddings": False}
    decoder, num_layers = DecoderConfig.from_dict(config), num_layers_of(target)
    _check_vocabulary(decoder.vocab_size, target)
    draft_vocab_size = positive_int(config, "draft_vocab_size", decoder.vocab_size)
    norm_before_residual = config.get("norm_before_residual", False)
    if not isinstance(norm_before_residual, bool):
        raise ModelConfigError(f"norm_before_residual in the EAGLE head's config must be true or false, got {norm_before_residual!r:.200}.")
    given = positive_int(config, "target_hidden_size", _hidden_size(target))
    if given != _hidden_size(target):
        raise ModelConfigError(
            f"The EAGLE head reads hidden states of {given} features and the model has {_hidden_size(target)}: use a head that was "
            "trained for this model."
        )
    plan = {name.replace("model.layers.*", "model.midlayer"): style for name, style in DECODER_TP_PLAN.items()}
    spec = decoder_spec(
        on_meta(lambda: Eagle3ForCausalLM(decoder, draft_vocab_size, norm_before_residual), dtype),
        decoder,
        config,
        [full_attention([kv_cache_of(decoder)])],
        plan,
    )
    return DrafterSpec(
        kind="hidden",
        spec=_reads_hidden(spec, decoder.hidden_size, dtype),
        target=with_hidden_states(_checked(target), _eagle3_taps(config, num_layers)),
        hidden_size=decoder.hidden_size,
        combine=True,
        maps_tokens=draft_vocab_size != decoder.vocab_size or "d2t" in tensors,
        borrowed_weights={_EMBEDDING: (_EMBEDDING,)},
    )


def _eagle3_taps(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads. vLLM's configs number these; those with an `eagle_config`, which are SGLang's, number
    the layers whose outputs they are.
    """
    name, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config")
    inner = nested.get(name) if isinstance(nested, Mapping) else None
    given = inner or config.get(name) or (2, num_layers // 2, num_layers - 3)
    if not isinstance(given, list | tuple) or not all(type(layer) is int for layer in given):
        raise ModelConfigError(f"{name} in the EAGLE head's config must be a list of layer numbers, got {given!r:.200}.")
    return tuple(layer + 1 if inner else layer for layer in given)


def mtp(target: ModelSpec, *, dtype: torch.dtype, num_tokens: int) -> DrafterSpec:
    """The target's own layers for multi-token prediction, as many as `num_tokens` drafts need. Raises `ModelConfigError` if it has none."""
    config = target.config
    architecture = (config.get("architectures") or ["?"])[0]
    family = ARCHITECTURES.get(architecture)
    if family is None or family.deepseek_moe is None or not config.get("num_nextn_predict_layers"):
        families = [name for name, one in ARCHITECTURES.items() if one.deepseek_moe is not None]
        raise ModelConfigError(
            f"{architecture} brings no layer for multi-token prediction that is known here: it must be one of {', '.join(families)} with "
            "num_nextn_predict_layers in its config."
        )
    assert family.experts is not None
    parsed = family.deepseek_moe(config)
    target = with_hidden_states(_checked(target), (num_layers_of(target),))
    first, size = parsed.decoder.num_hidden_layers, parsed.decoder.hidden_size
    numbers = range(first, first + min(num_tokens, positive_int(config, "num_nextn_predict_layers")))
    layers = []
    for number in numbers:
        is_only, prefix = len(numbers) == 1, f"model.layers.{number}."
        make = partial(MtpForCausalLM, number=number, is_only=is_only)
        # The number is part of the config, because it is part of the weights' names, which an artifact holds.
        own = {**config, "mtp_layer_number": number}
        spec = with_stored_weights(deepseek_moe_spec(make, parsed, family.experts, own, dtype, number))
        layers.append(
            DrafterSpec(
                kind="hidden",
                spec=_reads_hidden(spec, size, dtype, gives=ROWS if is_only else TOKENS),
                target=target,
                hidden_size=size,
                borrowed_weights={f"{prefix}embed_tokens.weight": (_EMBEDDING,), f"{prefix}shared_head.head.weight": (_HEAD, _EMBEDDING)},
                prefix=prefix,
            )
        )
    return replace(layers[0], layers_behind=tuple(layers[1:]))


def medusa(config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype) -> DrafterSpec:
    """Medusa heads. Raises `ModelConfigError` with one sentence for a wrong config."""
    size, num_heads = _hidden_size(target), positive_int(config, "medusa_num_heads")
    blocks = positive_int(config, "medusa_num_layers", 1)
    given = positive_int(config, "hidden_size", size), positive_int(config, "vocab_size", target.vocab_size)
    if given != (size, target.vocab_size):
        raise ModelConfigError(
            f"The Medusa heads are for a hidden size of {given[0]} and {given[1]} tokens, and the model has {size} and "
            f"{target.vocab_size}: use heads that were trained for this model."
        )
    module = on_meta(lambda: MedusaHeads(size, target.vocab_size, num_heads, blocks), dtype)
    names = [name for name, _ in module.named_parameters()]
    spec = ModelSpec(
        module=module,
        config={**config, "hidden_size": size, "vocab_size": target.vocab_size},
        state=(),
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        weight_map={name.removeprefix("medusa_head."): name for name in names},
        tp_plan={"medusa_head.*.linear": "replicated", "medusa_head.*": "vocab"},  # so all ranks draft the same tokens
        inputs=(_hidden_input(size, dtype),),
        outputs=(StepOutput(name=DRAFT_TOKENS, dims=(TOKENS, num_heads)),),
    )
    return DrafterSpec(
        kind="heads",
        spec=spec,
        target=with_hidden_states(_checked(target), (num_layers_of(target),)),
        hidden_size=size,
        max_tokens=num_heads,
    )


def dflash(config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype) -> DrafterSpec:
    """A DFlash block drafter. Raises `ModelConfigError` with one sentence for a wrong config, and for one of a later kind."""
    own = config.get("dflash_config")
    own = own if isinstance(own, Mapping) else {}
    _check_dflash(config, own)
    decoder, size = DecoderConfig.from_dict({**config, "tie_word_embeddings": False}), _hidden_size(target)
    if decoder.hidden_size != size:
        raise ModelConfigError(
            f"The drafter's hidden size is {decoder.hidden_size} and the model's {size}: use a drafter that was trained for this model."
        )
    _check_vocabulary(decoder.vocab_size, target)
    layers, mask_token = own.get("target_layer_ids"), own.get("mask_token_id", config.get("mask_token_id"))
    num_layers = num_layers_of(target)
    if not isinstance(layers, list) or not layers or layers != [one for one in range(num_layers) if one in layers]:
        raise ModelConfigError(
            f"target_layer_ids in the drafter's dflash_config must be layers of the model, which has {num_layers}, in order, got "
            f"{layers!r:.200}."
        )
    if type(mask_token) is not int or not 0 <= mask_token < decoder.vocab_size:
        raise ModelConfigError(f"mask_token_id in the drafter's dflash_config must be a token of its vocabulary, got {mask_token!r:.200}.")
    state = full_attention([kv_cache_of(decoder)] * decoder.num_hidden_layers)
    target = with_hidden_states(_checked(target), tuple(layer + 1 for layer in layers))
    num_features = size * len(layers)
    spec = decoder_spec(on_meta(lambda: Qwen3ForCausalLM(decoder), dtype), decoder, config, [state], DECODER_TP_PLAN)
    context = decoder_spec(
        on_meta(lambda: DFlashContext(decoder, num_features), dtype),
        decoder,
        config,
        [state],
        {**DECODER_TP_PLAN, "model.fc": "replicated"},
    )
    return DrafterSpec(
        kind="block",
        spec=_shares_checkpoint(spec, context),
        context=replace(
            _shares_checkpoint(context, spec),
            inputs=(_hidden_input(num_features, dtype), POSITIONS),
            outputs=(StepOutput(name=CONTEXT, dims=(TOKENS, size)),),
        ),
        target=target,
        max_tokens=positive_int(config, "block_size") - 1,
        borrowed_weights={_EMBEDDING: (_EMBEDDING,), _HEAD: (_HEAD, _EMBEDDING)},
        mask_token=mask_token,
    )


def _check_dflash(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `ModelConfigError` for what other kinds of block drafters have."""
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in DFLASH_ARCHITECTURES:
        raise ModelConfigError(f"The drafter is a {architecture}, but the method dflash takes one of {', '.join(DFLASH_ARCHITECTURES)}.")
    unsupported = {
        "layers without full attention": set(config.get("layer_types") or ()) - {"full_attention"} or own.get("use_swa"),
        "biases in attention": config.get("attention_bias"),  # of which o_proj has one too
        "a causal mask": config.get("is_causal") or own.get("causal"),
        "attention sinks": own.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias"),
        "scaled embeddings": own.get("input_embedding_scale", config.get("input_embedding_scale", 1.0)) != 1.0,
    }
    if found := [what for what, is_there in unsupported.items() if is_there]:
        raise ModelConfigError(
            f"The block drafter has {' and '.join(found)}, which is not supported: choose another one in speculative_config."
        )


def _shares_checkpoint(spec: ModelSpec, other: ModelSpec) -> ModelSpec:
    """The spec, which reads its tensors from the checkpoint that `other` reads too. Names there lack "model."."""
    names, others = ({name.removeprefix("model."): name for name, _ in one.module.named_parameters()} for one in (spec, other))
    return replace(spec, weight_map={**dict.fromkeys(others), **names, **spec.weight_map})


def _hidden_input(size: int, dtype: torch.dtype) -> StepInput:
    """Hidden states [T, D]. The host has none: it fills zeros."""
    return StepInput(
        name=HIDDEN_STATES, dtype=dtype, dims=(TOKENS, size), fill=lambda batch: np.zeros((len(batch.token_ids), size), dtype=np.float32)
    )


def _reads_hidden(spec: ModelSpec, size: int, dtype: torch.dtype, gives: str = ROWS) -> ModelSpec:
    """The spec of a head, which takes and gives hidden states. Names in its checkpoint may lack "model.". gives: of which rows."""
    parameters = [name for name, _ in spec.module.named_parameters()]
    short = {name.removeprefix("model."): name for name in parameters if name.startswith("model.")}
    unused: dict[str, str | None] = dict.fromkeys(("d2t", "t2d", "fc.weight", "fc.bias"))
    return replace(
        spec,
        weight_map={**unused, **short, **spec.weight_map},
        inputs=(INPUT_IDS, POSITIONS, _hidden_input(size, dtype), LOGITS_INDICES),
        outputs=(StepOutput(name=LOGITS), StepOutput(name=HIDDEN_STATES, dims=(gives, size))),
    )


def _hidden_size(target: ModelSpec) -> int:
    num_layers_of(target)  # which names a target without hidden states
    return positive_int(target.config, "hidden_size")


def _check_vocabulary(vocab_size: int, target: ModelSpec) -> None:
    if vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"The drafter has a vocabulary of {vocab_size} tokens and the model one of {target.vocab_size}: choose a drafter with the "
            "same tokenizer."
        )


def _checked(target: ModelSpec) -> ModelSpec:
    """The target, whose steps have what every drafter reads. Raises `ModelConfigError`."""
    given = {one.name: (one.dtype, one.dims) for one in target.inputs}
    for one in (INPUT_IDS, POSITIONS):
        if given.get(one.name) != (one.dtype, one.dims):
            raise ModelConfigError(f"The model's steps have no {one.name} of one row, which a drafter reads: remove speculative_config.")
    return target
