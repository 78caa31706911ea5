"""`DecoderConfig`: the checked fields of a dense decoder's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class ModelConfigError(ValueError):
    """No model can be built from a config.json. The message is one sentence."""


class UnsupportedConfigError(ModelConfigError):
    """The config.json is right, but asks for something that the native model does not do; transformers' class may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a Llama-like decoder.

    rope: config.json's rope_parameters, or rope_scaling with rope_theta. rope_size: dimensions of a head that RoPE rotates, the first ones.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_size: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], *, default_head_dim: int | None = None, allows_partial_rope: bool = False
    ) -> DecoderConfig:
        """Read a config.json. default_head_dim: the family's default, if it is not hidden_size / num_attention_heads.
        allows_partial_rope: the family reads `rope_size`; others refuse a config in which it is not the head size.

        Raises `ModelConfigError` for a missing or invalid value.
        """
        missing = [name for name in _REQUIRED if config.get(name) is None]
        if missing:
            raise ModelConfigError(f"The model's config lacks {', '.join(missing)}.")
        sizes = {name: positive_int(config, name) for name in _REQUIRED}
        num_heads = sizes["num_attention_heads"]
        num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelConfigError(f"num_attention_heads must be a multiple of num_key_value_heads, got {num_heads} and {num_kv_heads}.")
        if config.get("head_dim") is None and default_head_dim is None and sizes["hidden_size"] % num_heads:
            raise ModelConfigError(
                f"hidden_size must be a multiple of num_attention_heads if head_dim is not given, "
                f"got {sizes['hidden_size']} and {num_heads}."
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedConfigError(f"hidden_act must be 'silu', got {activation!r}.")
        if config.get("use_sliding_window"):
            raise UnsupportedConfigError("use_sliding_window is not supported: set it to false in the model's config.")
        rope = _rope(config)
        rope_share = number(rope if rope.get("partial_rotary_factor") else config, "partial_rotary_factor", 1.0)
        if rope_share != 1.0 and not allows_partial_rope:
            raise UnsupportedConfigError("partial_rotary_factor is not supported: RoPE must cover the whole head.")
        head_dim = positive_int(config, "head_dim", default_head_dim or sizes["hidden_size"] // num_heads)
        rope_size = int(head_dim * rope_share)
        if rope_size % 2 or not 0 < rope_size <= head_dim:
            raise ModelConfigError(
                f"partial_rotary_factor is {rope_share:g} and the head size {head_dim}: RoPE must rotate pairs of a head's dimensions."
            )
        return cls(
            **sizes,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rope_size=rope_size,
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=positive_int(config, "max_position_embeddings", 2048),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=rope,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedConfig(DecoderConfig):
    """A decoder some of whose layers attend to a sliding window.

    windows: of each layer, in tokens; None: full attention. window_rope: as `rope`, for the layers with a window.
    """

    windows: tuple[int | None, ...]
    window_rope: Mapping[str, Any]

    @staticmethod
    def read(config: Mapping[str, Any], *, has_window: Callable[[int], bool], default_head_dim: int | None = None) -> WindowedConfig:
        """Read a config.json. has_window: whether the layer of a number has a window, where the file does not list the layers' types.

        Raises `ModelConfigError` for a missing or invalid value.
        """
        flat = {name: value for name, value in config.items() if name != "use_sliding_window"}
        by_kind = config.get("rope_parameters") or {}
        if "full_attention" in by_kind:
            flat["rope_parameters"] = by_kind["full_attention"]
        base = DecoderConfig.from_dict(flat, default_head_dim=default_head_dim)
        window_rope = base.rope
        if "sliding_attention" in by_kind:
            window_rope = _rope({"rope_parameters": by_kind["sliding_attention"]})
        elif config.get("rope_local_base_freq"):
            window_rope = _rope({"rope_theta": config["rope_local_base_freq"]})
        return WindowedConfig(
            **{one.name: getattr(base, one.name) for one in fields(base)},
            windows=_windows(config, base, has_window),
            window_rope=window_rope,
        )

    def layer_numbers(self, *, with_window: bool) -> list[int]:
        """The layers that have a window, or those that have none."""
        return [i for i, window in enumerate(self.windows) if (window is not None) == with_window]


def _windows(config: Mapping[str, Any], decoder: DecoderConfig, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    layers = range(decoder.num_hidden_layers)
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if has_window(i) else "full_attention" for i in layers]
    if len(types) != len(layers) or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ModelConfigError(
            f"layer_types in the model's config must be {len(layers)} times 'sliding_attention' or 'full_attention', got {types}."
        )
    if config.get("sliding_window") is None:
        return (None,) * len(layers)
    window = positive_int(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The value of a field of a config.json. default: of a missing one. Raises `ModelConfigError`."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{name} in the model's config must be a positive integer, got {value!r}.")
    return value


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """The value of a field of a config.json. default: of one that is missing or null. Raises `ModelConfigError`."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelConfigError(f"{name} in the model's config must be a number, got {value!r}.")
    return float(value)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters from rope_parameters (transformers 5) or from rope_scaling with rope_theta.

    A file with both must give equal values: transformers reads rope_scaling and ignores the rope_theta in rope_parameters.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) and not isinstance(config[name], Mapping):
            raise ModelConfigError(f"{name} in the model's config must be a JSON object, got {config[name]!r:.100}.")
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
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope
