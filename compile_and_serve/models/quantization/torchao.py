"""torchao's configs in a `quantization_config`: 8-bit weights, as `save_pretrained` writes them into safetensors files.

A quantized weight is stored as `_weight_qdata` [O, I] and `_weight_scale`, [O, 1] ("PerRow") or one value ("PerTensor"). Int8 weights also
have a `_weight_zero_point`, which is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compile_and_serve.custom_ops.stored_weight import QuantizedWeight, scaled_weight
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, linears_of, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import is_ignored, require
from compile_and_serve.models.spec import ModelSpec

_INT8, _FLOAT8 = (
    ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"),
    ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"),
)
# Field → the values that say the same as our kernels do.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "group_size": (None,),
    "act_mapping_type": ("SYMMETRIC",),
    "reduce_range": (False, None),
    "weight_dtype": ("float8_e4m3fn",),
    "activation_dtype": ("float8_e4m3fn",),
    "packing_format": ("PLAIN",),
    "activation_value_lb": (None,),
    "activation_value_ub": (None,),
}


@register_checkpoint_format(
    "torchao",
    fields=FormatFields(
        read="quant_type include_input_output_embeddings modules_to_not_convert",
        no_effect="untie_embedding_weights",  # the tensors show it
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError` for other configs, naming the field."""
    require("include_input_output_embeddings", config.get("include_input_output_embeddings") or False, (False,))
    quant_type = config.get("quant_type")
    scheme = quant_type.get("default") or {} if isinstance(quant_type, dict) else {"_type": quant_type}
    kind, settings = scheme.get("_type"), scheme.get("_data") or {}
    require("quant_type", kind, (*_INT8, *_FLOAT8))
    require("quant_type version", scheme.get("_version"), (2,))
    for field, known in _SUPPORTED.items():
        if field in settings:
            require(f"quant_type {field}", _plain(settings[field]), known)
    granularity = _plain(settings.get("granularity"))
    if isinstance(granularity, list):  # of the activations, and of the weights
        require("quant_type granularity of activations", granularity[0], ("PerRow", "PerTensor"))
        granularity = granularity[-1]
    require("quant_type granularity", granularity, ("PerRow", "PerTensor"))
    skipped = config.get("modules_to_not_convert")
    skipped = ["lm_head"] if skipped is None else skipped
    return {
        f"{name}.weight": scaled_weight(
            f"{name}._weight_qdata",
            linear.weight.shape,
            torch.int8 if kind in _INT8 else torch.float8_e4m3fn,
            scale=f"{name}._weight_scale",
            scale_of="row" if granularity == "PerRow" else "tensor",
            activations="dynamic" if "DynamicActivation" in str(kind) else "none",
            unused=(f"{name}._weight_zero_point",),
        )
        for name, linear in linears_of(spec).items()
        if not is_ignored(name, skipped)
    }


def _plain(value: Any) -> Any:
    """A dtype's, enumeration value's or granularity's name, of torchao's {"_type", "_data"}."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        data = value.get("_data")
        return data if isinstance(data, str) else value.get("_type")
    return value
