"""The table of GGUF architectures: llama.cpp's names of keys and tensors, and Hugging Face's.

A row is data. What a name stands for is in `gguf_config.py` (keys) and `gguf.py` (tensors); neither knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compile_and_serve.runtime.weights.gguf_file import GgufFile

# GGUF key, after the architecture's name → field of config.json.
KEYS: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys that say nothing about the numbers, or nothing that the tensors do not say.
NO_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "nextn_predict_layers")
# Keys that models here need not have → the values that change nothing. pooling_type: none, or the last token's state.
EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "pooling_type": (0, 3),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}
# GGUF tensor → Hugging Face's module; a name with a leaf stands for that tensor alone. `{expert}`: one of stacked matrices.
GLOBAL_NAMES: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's divisors of the RoPE frequencies
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # LongRoPE's
# Tensors that hold nothing that is computed here: old files' angles, and layers for multi-token prediction.
UNUSED = ("attn_rot_embd", "nextn.")

_INTERLEAVED = {"attn_q": "halves_of_query_heads", "attn_k": "halves_of_key_heads"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How the files of a GGUF architecture become a model of Hugging Face.

    model, model_type: architecture and model type of config.json. fits: which files the row is for; None: all others of the architecture.
    fields: of config.json, the same for all files. keys: beyond `KEYS`. flags: field → tensor of a layer whose presence it states.
    derived: fields that follow from the others, in order: (file, fields so far) → value; None: no field. expected: beyond `EXPECTED`.
    names, global_names: beyond the common ones. layers: name of the list of layers. changes: tensor → a function of `gguf.py`.
    joined: tensor of Hugging Face → (a function of `gguf.py`, the tensors of which it makes that one).
    rope: RoPE parameters, the same for all files. partial_rope: whether RoPE may cover a part of a head. mscale_of_log: mscale for a
    yarn_log_multiplier of 1; None: the architecture has none. quantization: of tensors whose blocks are kept in another format than GGUF's.
    """

    model: str
    model_type: str
    fits: Callable[[GgufFile], bool] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Callable[[GgufFile, Mapping[str, Any]], Any]] = field(default_factory=dict)
    expected: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    global_names: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    changes: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    window_rope_theta: float | None = None
    partial_rope: bool = False
    mscale_of_log: float | None = None
    quantization: Mapping[str, Any] | None = None


_SILU = {"hidden_act": "silu"}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA_NORMS = dict.fromkeys(
    ("output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"), "less_one"
)
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_FALCON = {"bias": False, "parallel_attn": True, "alibi": False}


def _head_size(config: Mapping[str, Any]) -> Any:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _gemma_scale(largest: int) -> Callable[[GgufFile, Mapping[str, Any]], Any]:
    """query_pre_attn_scalar, which files lack: the head size, but for the largest model, by its layers, hidden_size / heads."""

    def scalar(_: GgufFile, config: Mapping[str, Any]) -> Any:
        is_largest = config["num_hidden_layers"] == largest
        return config["hidden_size"] // config["num_attention_heads"] if is_largest else _head_size(config)

    return scalar


def _falcon(**fields: Any) -> Architecture:
    return Architecture(
        model="FalconForCausalLM",
        model_type="falcon",
        fields={**_FALCON, **{name: value for name, value in fields.items() if name not in ("fits", "names")}},
        fits=fields.get("fits"),
        keys={
            "attention.head_count_kv": "num_kv_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "feed_forward_length": "ffn_hidden_size",
        },
        expected={"use_parallel_residual": (True,)},
        derived={"head_dim": lambda _, config: None},  # the class computes it
        names={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
            **fields.get("names", {}),
        },
        global_names={"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"},
        layers="transformer.h",
        changes={"attn_qkv": "groups_of_heads"},
    )


_GPT_OSS: Mapping[str, Any] = {
    "model": "GptOssForCausalLM",
    "model_type": "gpt_oss",
    "fields": _SILU,
    "keys": {
        **_WINDOW,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    "flags": {"attention_bias": "attn_q.bias"},
    "rope": {"truncate": False},
    "names": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
}
_GATE_AND_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_GATE_AND_UP_BIAS = {"mlp.experts.gate_up_proj_bias": ("alternating_rows", ("ffn_gate_exps.bias", "ffn_up_exps.bias"))}

ARCHITECTURES: Mapping[str, tuple[Architecture, ...]] = {
    "llama": (
        Architecture(
            model="MixtralForCausalLM",
            model_type="mixtral",
            fits=lambda file: file.has("ffn_gate_exps"),
            fields={**_SILU, "sliding_window": None},
            keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            expected={"expert_gating_func": (0, 1)},
            names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
            },
            changes=_INTERLEAVED,
        ),
        Architecture(model="LlamaForCausalLM", model_type="llama", fields=_SILU, flags=_BIASES, changes=_INTERLEAVED),
    ),
    "mistral3": (
        Architecture(
            model="Ministral3ForCausalLM",
            model_type="ministral3",
            fields={**_SILU, "sliding_window": None},
            keys={"attention.temperature_scale": "llama_4_scaling_beta"},
            changes=_INTERLEAVED,
            mscale_of_log=1.0,
        ),
    ),
    "qwen2": (Architecture(model="Qwen2ForCausalLM", model_type="qwen2", fields=_SILU),),
    "qwen2moe": (
        Architecture(
            model="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            fields={**_SILU, "norm_topk_prob": False},
            keys={**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            names={
                "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
                "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
                "ffn_up_shexp": "mlp.shared_expert.up_proj",
                "ffn_down_shexp": "mlp.shared_expert.down_proj",
            },
            changes={"ffn_gate_inp_shexp": "one_row"},
        ),
    ),
    "qwen3": (Architecture(model="Qwen3ForCausalLM", model_type="qwen3", fields=_SILU, flags={"attention_bias": "attn_q.bias"}),),
    "qwen3moe": (
        Architecture(model="Qwen3MoeForCausalLM", model_type="qwen3_moe", fields={**_SILU, "norm_topk_prob": True}, keys=_EXPERTS),
    ),
    "gemma": (Architecture(model="GemmaForCausalLM", model_type="gemma", fields=_GELU, changes=_GEMMA_NORMS),),
    "gemma2": (
        Architecture(
            model="Gemma2ForCausalLM",
            model_type="gemma2",
            fields=_GELU,
            keys={**_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
            derived={"query_pre_attn_scalar": _gemma_scale(46)},
            names=_GEMMA_NAMES,
            changes=_GEMMA_NORMS,
        ),
    ),
    "gemma3": (
        Architecture(
            model="Gemma3ForCausalLM",
            model_type="gemma3_text",
            fields=_GELU,
            keys={**_WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
            derived={"query_pre_attn_scalar": _gemma_scale(62)},
            names=_GEMMA_NAMES,
            changes=_GEMMA_NORMS,
            rope={"rope_theta": 1e6},
            window_rope_theta=1e4,
        ),
    ),
    "phi2": (
        Architecture(
            model="PhiForCausalLM",
            model_type="phi",
            fields={"hidden_act": "gelu_new"},
            keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
            expected={"use_parallel_residual": (True,)},
            names={
                "attn_qkv": "self_attn.q_proj|self_attn.k_proj|self_attn.v_proj",
                "attn_output": "self_attn.dense",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
            global_names={"output_norm": "model.final_layernorm"},
            partial_rope=True,
        ),
    ),
    "phi3": (
        Architecture(
            model="Phi3ForCausalLM",
            model_type="phi3",
            fields=_SILU,
            keys={**_WINDOW, "rope.scaling.original_context_length": "original_max_position_embeddings"},
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            partial_rope=True,
        ),
    ),
    "starcoder2": (
        Architecture(
            model="Starcoder2ForCausalLM",
            model_type="starcoder2",
            fields={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
            keys={"attention.layer_norm_epsilon": "norm_epsilon"},
            flags={"use_bias": "attn_q.bias"},
            names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
    ),
    "granite": (
        Architecture(
            model="GraniteForCausalLM",
            model_type="granite",
            fields=_SILU,
            keys={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            flags=_BIASES,
            derived={"attention_multiplier": lambda _, config: config.get("attention_multiplier") or _head_size(config) ** -0.5},
            changes=_INTERLEAVED,
        ),
    ),
    "olmo2": (
        Architecture(
            model="Olmo2ForCausalLM",
            model_type="olmo2",
            fields=_SILU,
            names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        ),
    ),
    "glm4": (
        Architecture(
            model="Glm4ForCausalLM",
            model_type="glm4",
            fields=_SILU,
            flags={"attention_bias": "attn_q.bias"},
            names={"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj"},
            partial_rope=True,
        ),
    ),
    "smollm3": (
        Architecture(
            model="SmolLM3ForCausalLM",
            model_type="smollm3",
            fields={**_SILU, "use_sliding_window": False, "no_rope_layer_interval": 4},
            flags=_BIASES,
            changes=_INTERLEAVED,
        ),
    ),
    "command-r": (
        Architecture(
            model="CohereForCausalLM",
            model_type="cohere",
            fields=_SILU,
            keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
            flags={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
        ),
    ),
    "falcon": (
        _falcon(  # 40B and 180B
            fits=lambda file: file.has("attn_norm_2"),
            new_decoder_architecture=True,
            names={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
        ),
        _falcon(  # 11B
            fits=lambda file: file.metadata.get("falcon.attention.head_count_kv", 1) > 1,
            new_decoder_architecture=True,
            num_ln_in_parallel_attn=1,
        ),
        _falcon(multi_query=True, new_decoder_architecture=False),
    ),
    "deepseek2": tuple(
        Architecture(
            model=model,
            model_type=model_type,
            fits=fits,
            fields={**_SILU, **scoring},
            keys={
                **_EXPERTS,
                "expert_count": "n_routed_experts",
                "expert_shared_count": "n_shared_experts",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "expert_weights_scale": "routed_scaling_factor",
                "expert_weights_norm": "norm_topk_prob",
                "leading_dense_block_count": "first_k_dense_replace",
                "attention.q_lora_rank": "q_lora_rank",
                "attention.kv_lora_rank": "kv_lora_rank",
                "attention.key_length": "key_length",
                "attention.value_length": "v_head_dim",
                "attention.key_length_mla": "qk_head_dim",
                "attention.value_length_mla": "v_head_dim",
                "rope.dimension_count": "qk_rope_head_dim",
                "expert_gating_func": "gating",
            },
            derived={
                "num_key_value_heads": lambda _, config: config["num_attention_heads"],
                "qk_nope_head_dim": lambda _, config: (config.get("qk_head_dim") or config["key_length"]) - config["qk_rope_head_dim"],
                "topk_method": method,
                "norm_topk_prob": lambda _, config: bool(config.get("norm_topk_prob", False)),
                # Not fields of config.json.
                "key_length": lambda _, config: None,
                "qk_head_dim": lambda _, config: None,
                "gating": lambda _, config: None,
            },
            names={
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            },
            joined={"self_attn.kv_b_proj.weight": ("keys_and_values", ("attn_k_b.weight", "attn_v_b.weight"))},
            mscale_of_log=10.0,
        )
        for model, model_type, fits, scoring, method in (
            (
                "DeepseekV3ForCausalLM",
                "deepseek_v3",
                lambda file: file.metadata.get("deepseek2.expert_gating_func") == 2,
                {"scoring_func": "sigmoid"},
                lambda _, config: "noaux_tc",
            ),
            (
                "DeepseekV2ForCausalLM",
                "deepseek_v2",
                None,
                {"scoring_func": "softmax"},
                lambda _, config: "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy",
            ),
        )
    ),
    "gpt-oss": (
        Architecture(
            **_GPT_OSS,
            fits=lambda file: all(i.kind_name == "MXFP4" for name, i in file.tensors.items() if name.endswith("_exps.weight")),
            joined={
                **_GATE_AND_UP_BIAS,
                "mlp.experts.gate_up_proj_blocks": ("alternating_mxfp4_codes", _GATE_AND_UP),
                "mlp.experts.gate_up_proj_scales": ("alternating_mxfp4_scales", _GATE_AND_UP),
                "mlp.experts.down_proj_blocks": ("alternating_mxfp4_codes", ("ffn_down_exps.weight",)),
                "mlp.experts.down_proj_scales": ("alternating_mxfp4_scales", ("ffn_down_exps.weight",)),
            },
            quantization={"quant_method": "mxfp4"},
        ),
        Architecture(
            **_GPT_OSS,
            joined={
                **_GATE_AND_UP_BIAS,
                "mlp.experts.gate_up_proj": ("alternating_columns", _GATE_AND_UP),
                "mlp.experts.down_proj": ("alternating_columns", ("ffn_down_exps.weight",)),
            },
            quantization={},
        ),
    ),
}
