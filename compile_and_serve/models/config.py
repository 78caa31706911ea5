"""`DecoderConfig`: the checked fields of a dense decoder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class ModelConfigError(ValueError):
    """No model can be built from a config.json. The message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a Llama-like decoder. rope: config.json's rope_parameters, or rope_scaling with rope_theta."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, default_head_dim: int | None = None) -> DecoderConfig:
        """Read a config.json. default_head_dim: the family's default, if it is not hidden_size / num_attention_heads.

        Raises `ModelConfigError` for a missing or invalid value.
        """
        missing = [name for name in _REQUIRED if config.get(name) is None]
        if missing:
            raise ModelConfigError(f"The model's config lacks {', '.join(missing)}.")
        sizes = {name: _positive_int(config, name) for name in _REQUIRED}
        num_heads = sizes["num_attention_heads"]
        num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {num_heads} and {num_kv_heads}."
            )
        if config.get("head_dim") is None and default_head_dim is None and sizes["hidden_size"] % num_heads:
            raise ModelConfigError(
                f"hidden_size must be a multiple of num_attention_heads if head_dim is not given, "
                f"got {sizes['hidden_size']} and {num_heads}."
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelConfigError(f"hidden_act must be 'silu', got {activation!r}.")
        if config.get("use_sliding_window"):
            raise ModelConfigError("use_sliding_window is not supported: set it to false in the model's config.")
        rope = _rope(config)
        if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelConfigError("partial_rotary_factor is not supported: RoPE must cover the whole head.")
        return cls(
            **sizes,
            num_key_value_heads=num_kv_heads,
            head_dim=_positive_int(config, "head_dim", default_head_dim or sizes["hidden_size"] // num_heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=_positive_int(config, "max_position_embeddings", 2048),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=rope,
        )


def _positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{name} in the model's config must be a positive integer, got {value!r}.")
    return value


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters from rope_parameters (transformers 5) or from rope_scaling with rope_theta.

    A file with both must give equal values: transformers reads rope_scaling and ignores the rope_theta in rope_parameters.
    """
    spellings = {name: dict(config[name]) for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    rope: dict[str, Any] = {}
    for spelling in spellings.values():
        older_name = spelling.pop("type", "default")
        spelling.setdefault("rope_type", older_name)
        for name in rope.keys() & spelling.keys():
            if rope[name] != spelling[name]:
                raise ModelConfigError(
                    f"rope_parameters and rope_scaling in the model's config disagree about {name} ({rope[name]!r} and "
                    f"{spelling[name]!r}): move everything, including rope_theta, to rope_parameters and remove rope_scaling."
                )
        rope |= spelling
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope
