"""`LoRARequest`: the adapter that a request uses."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by name, number and folder.

    lora_int_id: from 1, one for each load: requests share cached prefixes only with requests of the same number, so a number is never
    used for another adapter. lora_path: a folder that PEFT has saved, with adapter_config.json and adapter_model.safetensors.
    pinned: once used, it keeps its slot on the device and its host memory until it is unloaded.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    pinned: bool = False


class AdapterTarget(msgspec.Struct, frozen=True, array_like=True):
    """A linear, an embedding or stacked experts that adapters may change.

    module: its name in our model, which may differ from the checkpoint's; of experts, the parameter's. in_features: of an embedding, the
    tokens of its vocabulary. num_experts: of stacked experts, else 0. first_row: where the outputs begin in those of the module: up
    projections of experts come after gate projections.
    """

    module: str
    in_features: int
    out_features: int
    is_embedding: bool = False
    num_experts: int = 0
    first_row: int = 0
