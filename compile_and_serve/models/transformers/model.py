"""Any decoder of the transformers package, unmodified: its class from config.json, its weights by their own names.

`AttentionInterface` lets us replace the attention function, so that the class runs on the paged KV cache like our own families. What a
class's attention needs (masks, windows, caps, sinks) is recorded in a dry run; `attention` has both.

Shape legend: T tokens of the step, S rows whose logits are needed, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import DECODER_INPUTS
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.folder_code import FolderCodeError, class_reference, code_digest, load_class
from compile_and_serve.models.layers import scaled_positions
from compile_and_serve.models.meta_device import meta_device
from compile_and_serve.models.spec import ModelSpec, ShardStyle
from compile_and_serve.models.transformers.attention import (
    DRY_RUN,
    DRY_TOKENS,
    RunningForward,
    Unsupported,
    attach,
    dry_run,
    state_groups,
    unsupported,
)
from compile_and_serve.models.transformers.changing_rope import ROPE_LENGTH, follow_lengths
from compile_and_serve.models.transformers.experts import (
    biases_as_parameters,
    expert_parts,
    has_experts,
    unsupported_reason,
    use_our_experts,
)
from compile_and_serve.models.transformers.llama4 import arranged_experts
from compile_and_serve.models.transformers.media import (
    Merging,
    attends_ahead,
    merging_module,
    read_rows_in_embedding,
    with_encoder,
    without_feature_embedding,
)
from compile_and_serve.models.transformers.older import replace_attention
from compile_and_serve.models.transformers.recurrent import Mixers, no_mixer_runs
from compile_and_serve.models.transformers.weights import split_weights, weight_names
from compile_and_serve.models.vision.names import MEDIA_ROWS

log = logging.getLogger(__name__)

ROPE_TYPES = ("default", "proportional", "linear", "dynamic", "llama3", "yarn", "longrope")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "seq_length")
_NUMBERS_TOKENS = "create_position_ids_from_input_ids"  # a method, or a function beside the class, that begins behind the padding index
_ENCODER = "EncoderModel"  # how classes end that are the encoder of an encoder-decoder model
_NO_LIMIT = 2048  # longest sequence of a model whose config has none, as its training sequences were (Bloom)


class TransformersModel(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T] or [3, T], logits_indices int64 [S], caches of each state group) → logits [S, V].

    RoPE that follows the length also takes rope_length int64 [T], and a class that reads images encoder_row int64 [T], and tokens_ahead
    int32 [T] if their tokens attend to later ones.
    Its children are those of the transformers model, so that parameters have the checkpoint's names. position_offset: what the class
    adds to the positions of tokens (RoBERTa's begin after the padding index).
    """

    def __init__(self, model: PreTrainedModel, running: RunningForward, position_offset: int) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._forward = model.forward
        self._running = running
        self._position_offset = position_offset
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._selects_rows = "logits_to_keep" in parameters
        self._options = {"use_cache": False} if "use_cache" in parameters else {}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        rope_length: torch.Tensor | None = None,
        encoder_row: torch.Tensor | None = None,
        tokens_ahead: torch.Tensor | None = None,
        **caches: Any,
    ) -> torch.Tensor:
        if self._position_offset:
            positions = positions + self._position_offset
        running = self._running
        running.caches, running.positions, running.rope_lengths, running.num_calls = caches, positions, rope_length, 0
        running.encoder_rows = None if encoder_row is None else (caches[MEDIA_ROWS][0], encoder_row)
        running.tokens_ahead = tokens_ahead
        logits = self._logits(input_ids, positions, logits_indices)
        running.caches, running.positions, running.rope_lengths, running.num_calls = {}, None, None, 0
        running.encoder_rows = running.tokens_ahead = None
        return logits

    def _logits(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = positions[None] if positions.dim() == 1 else positions[:, None]
        if self._selects_rows:
            return self._forward(input_ids=input_ids[None], logits_to_keep=logits_indices, **options).logits[0]
        return self._forward(input_ids=input_ids[None], **options).logits[0][logits_indices]


MakeModule = Callable[[PreTrainedModel, RunningForward, int], nn.Module]  # of the model, its running forward and its position offset


def build(config: Mapping[str, Any], dtype: torch.dtype, code_folder: Path | None = None, *, pooled: MakeModule | None = None) -> ModelSpec:
    """Build the class that a config.json names on the meta device, with its parameters in `dtype`.

    code_folder: of classes that the config's `auto_map` names, which are then used; None: no code of a folder is run.
    pooled: makes the module of a class that need not generate text, and may attend to later tokens.
    Raises `ModelConfigError` if transformers lacks the class, or if the class needs more than softmax attention over earlier tokens.
    """
    name = config["architectures"][0]
    model = _instantiate(name, config, code_folder, pools=pooled is not None)
    try:
        merging = None if pooled is not None else _merging_module(name, model)
        if merging is not None and not merging.decoder:
            without_feature_embedding(model)
        spec = _spec(config, model, dtype, pooled, sees_ahead=merging is not None and attends_ahead(model))
        if merging is not None:
            read_rows_in_embedding(model, model.cas_running)
            other = _instantiate(name, config, code_folder, pools=False, attention="sdpa")
            spec = with_encoder(spec, merging, other, partial(_buffer_values, rope_types={}, skip=frozenset()), dtype)
    except Unsupported as reason:
        raise unsupported(name, reason) from reason
    except ModelConfigError:
        raise
    except Exception as error:  # raised by the class's own code
        if "meta" in str(error):
            raise unsupported(name, f"it reads values of a step on the host ({_module_of(error)})") from error
        raise unsupported(name, f"a dry run failed with {_first_line(error)} ({_module_of(error)})") from error
    if code_folder is None or (reference := class_reference(config, "AutoModelForCausalLM")) is None:
        return spec
    return replace(spec, config={**spec.config, "code": code_digest(code_folder, reference)})


def _spec(config: Mapping[str, Any], model: Any, dtype: torch.dtype, pooled: MakeModule | None, *, sees_ahead: bool) -> ModelSpec:
    in_float32: set[str] = set()
    if has_experts(model.config.get_text_config()):
        if (reason := unsupported_reason(model)) is not None:
            raise Unsupported(reason)
        in_float32 = biases_as_parameters(model)
    arranged = arranged_experts(model, dtype)
    persistent = model.state_dict().keys()
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor_name in persistent and tensor.is_floating_point() and tensor_name not in in_float32:
            tensor.data = tensor.data.to(dtype)
    model.requires_grad_(False).eval()
    running = RunningForward()
    running.sees_ahead = sees_ahead
    attach(model, running)
    added = replace_attention(model)
    mixers = Mixers(model)
    if model._is_stateful and not mixers.states:
        raise Unsupported("it has recurrent state")
    regimes, frequencies = follow_lengths(model)
    added |= frequencies
    rope_types = _keep_frequencies(model)
    wrapped = _give_positions(model if pooled is None else model.base_model, running)
    offset = _position_offset(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = _ignore  # it reads token ids on the host
    module = (pooled or TransformersModel)(model, running, offset).eval()
    ids = torch.zeros(DRY_TOKENS, dtype=torch.int64, device="meta")
    run = partial(
        dry_run,
        model,
        running,
        lambda: module(ids, ids, ids[:2], None if regimes is None else ids),
        own_positions=not wrapped,
        pools=pooled is not None,
    )
    called: set[nn.Module] = set()
    try:
        with _recorded(model, called):
            calls = run()
        if unused := _remove_unused(model, called):
            for child_name, child in model.named_children() if pooled is None else ():
                module.add_module(child_name, child)
            calls = run(again=True)  # shows that the model works without them
    finally:
        no_mixer_runs()
    buffers = added | _buffer_values(model, rope_types, skip=frozenset(added))
    recurrent = mixers.group()
    if not calls and recurrent is None:
        raise Unsupported("its attention does not go through the attention interface")
    if (known := len(calls) + len(mixers.states)) < (layers := mixers.num_layers(model.config.get_text_config())):
        raise Unsupported(f"only {known} of its {layers} layers have attention or recurrent state that is known here")
    state: tuple[StateGroup, ...] = state_groups(calls, running)
    if recurrent is not None:
        state += (recurrent,)
    head = model.get_output_embeddings()
    names = weight_names(model)
    names |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(len(calls))}
    kept = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))}
    names = {name: parameter if parameter in kept else None for name, parameter in names.items()}
    names |= {name: None for name in model.state_dict() if name not in kept}
    return ModelSpec(
        module=module,
        # The computation also depends on the package's version, so the version is part of the artifacts' key.
        config={**config, "model_impl": f"transformers {transformers.__version__}"},
        state=state,
        vocab_size=int(model.config.get_text_config().vocab_size if head is None else head.weight.shape[0]),
        max_model_len=_max_positions(model.config.get_text_config(), follows_lengths=regimes is not None) - offset,
        inputs=DECODER_INPUTS if regimes is None else (*DECODER_INPUTS, ROPE_LENGTH),
        length_regimes=regimes,
        weight_map=names | dict.fromkeys(unused),
        parts=expert_parts(model),
        quantized_weights={**arranged, **split_weights(model, dtype)},
        tp_plan=_tp_plan(model),
        buffers={name: value for name, value in buffers.items() if name not in persistent and name in kept},
    )


def _merging_module(name: str, model: PreTrainedModel) -> Merging | None:
    """See `merging_module`; None for a class that reads only text here."""
    try:
        return merging_module(model)
    except Unsupported as reason:
        log.warning("%s runs on text alone: %s.", name, reason)
        return None


def _ignore(*_: Any) -> None: ...


def _instantiate(
    name: str, config: Mapping[str, Any], code_folder: Path | None, *, pools: bool, attention: str = DRY_RUN
) -> PreTrainedModel:
    """attention: transformers' name of its implementation."""
    cls, config_class = _classes(name, config, code_folder)
    if not pools and not cls.can_generate():
        raise unsupported(name, "it does not generate text")
    try:
        hf_config = config_class.from_dict(_with_floats(dict(config)))
        _check_config(hf_config, is_encoder=pools and name.endswith(_ENCODER))
        model = _on_meta(cls, hf_config, attention)
        model.tie_weights()
    except Unsupported as reason:
        raise unsupported(name, reason) from reason
    except Exception as error:  # transformers raises many kinds of errors for an invalid config
        raise ModelConfigError(f"transformers cannot build {name} from this config: {_first_line(error)}") from error
    return model


def _classes(name: str, config: Mapping[str, Any], code_folder: Path | None) -> tuple[Any, Any]:
    """The model's class and its config's: those of the folder where its code is trusted, else transformers' own."""
    reference, config_class = class_reference(config, "AutoModelForCausalLM"), None
    found: Any = getattr(transformers, name, None)
    if code_folder is not None and reference is not None:
        try:
            found = load_class(code_folder, reference)
            if (of_config := class_reference(config, "AutoConfig")) is not None:
                config_class = load_class(code_folder, of_config)
        except FolderCodeError as error:
            raise unsupported(name, str(error).removesuffix(".")) from error
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        own = ": it comes with code of its own (auto_map in config.json), which only --trust-remote-code runs" if reference else ""
        raise unsupported(name, f"transformers {transformers.__version__} has no such model{own}")
    cls: Any = found
    return cls, config_class or cls.config_class


def _with_floats(value: Any) -> Any:
    """A value of config.json with transformers' spelling of infinity and NaN, {"__float__": "Infinity"}, as floats."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(item) for name, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _on_meta(cls: Any, config: PreTrainedConfig, attention: str) -> Any:
    with meta_device():
        use_our_experts(config.get_text_config())
        config.get_text_config().use_cache = False  # for classes whose `forward` takes no use_cache
        try:
            config._attn_implementation = attention
            return cls(config)
        except (KeyError, ValueError) as error:  # an older class, which looks for it in a table of its own, or has no such one
            if isinstance(error, ValueError) and attention == DRY_RUN:
                raise
            config._attn_implementation = "eager"
            return cls(config)


def _check_config(config: PreTrainedConfig, *, is_encoder: bool) -> None:
    if config.is_encoder_decoder and not is_encoder:
        raise Unsupported("it has an encoder")
    text = config.get_text_config()
    if (getattr(text, "kv_lora_rank", None) or 0) > 0:
        raise Unsupported("it keeps latent keys and values")
    for rope in _rope_parameters(text):
        if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
            raise Unsupported(f"its RoPE type is {kind!r}, but only {', '.join(ROPE_TYPES)} are supported")


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The config's RoPE parameters: one dictionary, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, dict)]
    return by_kind or [rope]


def _max_positions(config: PreTrainedConfig, *, follows_lengths: bool) -> int:
    """Longest sequence that the model's positions encode.

    follows_lengths: of LongRoPE and dynamic RoPE. Without it, only the frequencies up to the original length are used, which is the limit.
    """
    trained = next((int(n) for field in _LENGTHS if isinstance(n := getattr(config, field, None), int)), _NO_LIMIT)
    lengths = []
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        if kind == "longrope" and not follows_lengths:
            original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", trained)
            lengths.append(min(trained, int(original or trained)))
        elif kind in ("linear", "yarn") or (kind == "dynamic" and follows_lengths):
            lengths.append(scaled_positions(rope, trained))
    return min(lengths, default=trained)


def _buffer_values(model: Any, rope_types: Mapping[nn.Module, Any], skip: frozenset[str]) -> dict[str, torch.Tensor]:
    """The values that transformers gives to buffers outside the checkpoint. Each buffer is on the CPU only while it is set.

    rope_types: of RoPE modules, from which their frequencies follow. skip: buffers that transformers does not know.
    """
    values: dict[str, torch.Tensor] = {}
    persistent = model.state_dict().keys()
    for prefix, module in model.named_modules():
        names = {leaf: f"{prefix}.{leaf}" if prefix else leaf for leaf in dict(module.named_buffers(recurse=False))}
        wanted = {leaf: module._buffers[leaf] for leaf, full in names.items() if full not in persistent and full not in skip}
        if not wanted:
            continue
        if module in rope_types:
            kept, module.rope_type = module.rope_type, rope_types[module]
        # A value that does not depend on what the buffer held before is one that was set.
        owner = _initializer(model, prefix)
        first, second = (_initialized(owner, module, wanted, fill) for fill in (0, 1))
        if module in rope_types:
            module.rope_type = kept
        for leaf, value in first.items():
            if not value.equal(second[leaf]):
                raise Unsupported(f"transformers does not initialize its buffer {names[leaf]}")
            values[names[leaf]] = value
    return values


def _initializer(model: Any, name: str) -> Any:
    """What transformers initializes a module with: the smallest model of its own that has it."""
    prefixes = (name.rsplit(".", cut)[0] if cut else name for cut in range(name.count(".") + 1))
    return next((one for prefix in prefixes if isinstance(one := model.get_submodule(prefix), PreTrainedModel)), model)


def _initialized(model: Any, module: nn.Module, buffers: dict[str, Any], fill: int) -> dict[str, torch.Tensor]:
    """What transformers' initialization makes of buffers that hold `fill`."""
    for leaf, buffer in buffers.items():
        module._buffers[leaf] = torch.full_like(buffer, fill, device="cpu")
    model._init_weights(module)
    made = {leaf: module.get_buffer(leaf) for leaf in buffers}
    for leaf, buffer in buffers.items():
        module._buffers[leaf] = buffer
    return made


def _keep_frequencies(model: nn.Module) -> dict[nn.Module, Any]:
    """Keep the frequencies that RoPE modules have at first. → their RoPE types

    Classes with several kinds of RoPE would change those of types "dynamic" and "longrope" in sequences that are longer than
    `_max_positions` allows.
    """
    found: dict[nn.Module, Any] = {}
    rope: Any
    for rope in model.modules():
        kind: Any = getattr(rope, "rope_type", None)
        if isinstance(kind, str | dict):
            found[rope] = kind
            rope.rope_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
    return found


def _give_positions(model: Any, running: RunningForward) -> bool:
    """Let position embeddings that number a sequence's tokens themselves take the step's positions. → whether there are any.

    They are those of decoders of encoder-decoder models, whose `forward` takes no positions.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        return False
    found = False
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters
        # The name changed with transformers 5.24.
        if "position_ids" in parameters and not parameters.keys().isdisjoint(("past_key_values_length", "cache_length")):
            module.forward = partial(_at_positions, module.forward, running)
            found = True
    return found


def _at_positions(forward: Callable[..., Any], running: RunningForward, ids: torch.Tensor, *_: Any, **__: Any) -> Any:
    return forward(ids, 0, position_ids=running.positions)


def _position_offset(model: nn.Module) -> int:
    """The position of a sequence's first token, where the class would number tokens from the padding index on."""
    for module in model.modules():
        by_function = hasattr(module, "position_embeddings") and hasattr(sys.modules[type(module).__module__], _NUMBERS_TOKENS)
        if (by_function or hasattr(module, _NUMBERS_TOKENS)) and isinstance(getattr(module, "padding_idx", None), int):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def _remove_unused(model: Any, called: set[nn.Module]) -> dict[str, None]:
    """Remove the modules that text does not pass through, such as a vision tower. → names of their parameters and buffers"""
    names: dict[str, None] = {}
    modules = dict(model.named_modules())
    uses_something = {prefix for name, module in modules.items() if module in called for prefix in _prefixes(name)}
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        if not name or name in uses_something or parent not in uses_something or isinstance(modules[parent], nn.ModuleList):
            continue
        if not isinstance(module, PreTrainedModel):
            continue  # a small part whose weight may be used without a call
        names |= dict.fromkeys(f"{name}.{inner}" for inner in module.state_dict(keep_vars=True))
        names |= dict.fromkeys(f"{name}.{inner}" for inner, _ in module.named_buffers())
        setattr(modules[parent], leaf, _Removed())
    return names


class _Removed(nn.Module):
    """Stands for a part that text does not pass through; some classes ask even then where it lies (Qwen2-Audio)."""

    device = torch.device("cpu")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


@contextmanager
def _recorded(model: nn.Module, called: set[nn.Module]) -> Iterator[None]:
    """Adds the modules that run in the block to `called`."""
    hooks = [module.register_forward_pre_hook(lambda one, _: called.add(one)) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tp_plan(model: PreTrainedModel) -> dict[str, ShardStyle]:
    """The config's own plan with full names, plus the vocabulary's. Empty if it needs more than colwise and rowwise linears and experts."""
    plan: dict[str, Any] = {
        pattern: "experts" if pattern.endswith(".experts") else style
        for pattern, style in (model.config.base_model_tp_plan or {}).items()
        # Modules outside the plan are replicated; the plan of experts names their weights, too.
        if not style.startswith(("replicated", "embedding")) and ".experts." not in pattern
    }
    if not plan or any(style not in ("colwise", "rowwise", "experts") for style in plan.values()):
        return {}
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    # Llama 4's base_model_prefix is not the name of its base model.
    base = next((name for name, child in model.named_children() if isinstance(child, PreTrainedModel)), None)
    return {
        **{f"{base or model.base_model_prefix}.{pattern}": style for pattern, style in plan.items()},
        **{name: "vocab" for name, module in model.named_modules() if module in vocabulary},
    }


def _module_of(error: Exception) -> str:
    """File and line of transformers' code that raised."""
    package = Path(transformers.__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if package in Path(frame.filename).parents]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else type(error).__name__


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Errors of a config's types name the field in the first line, and what is wrong in the second.
    return f"{type(error).__name__}: {' '.join(lines[: 2 if lines and lines[0].endswith(':') else 1])}"
