"""Names of a checkpoint's tensors where they differ from those of the transformers package's class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, PrefixChange, WeightConverter, WeightRenaming, WeightTransform, rename_source_key

from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.transformers.attention import Unsupported
from compile_and_serve.models.transformers.experts import stacks_experts

_NORMS = {".gamma": ".weight", ".beta": ".bias"}  # old names of norms' parameters and those of today


@weight_function("chunk_of_rows")
def chunk_of_rows(weight: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """One of `count` equal parts. [count · O, …] → [O, …]"""
    return weight.chunk(count)[number].contiguous()


def _reversed(rules: Sequence[WeightTransform]) -> list[WeightTransform]:
    """What turns names of the class into those of a checkpoint. rules: what turns those of a checkpoint into those of the class."""
    return [one.reverse_transform() for one in reversed(rules) if isinstance(one, WeightRenaming)]


def _splits_rows(converter: WeightConverter) -> bool:
    """Whether a rule of the conversion mapping splits one tensor into equal parts of its rows, as queries, keys and values."""
    operations = converter.operations
    return len(operations) == 1 and isinstance(operations[0], Chunk) and operations[0].dim == 0 and len(converter.source_patterns) == 1


def split_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, ArrangedWeight]:
    """By parameter, how a checkpoint holds those that are parts of one of its tensors."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = _reversed(conversions)
    found: dict[str, ArrangedWeight] = {}
    for converter in conversions:
        if not (isinstance(converter, WeightConverter) and _splits_rows(converter)):
            continue
        reverse = converter.reverse_transform()
        for name, parameter in model.named_parameters():
            joined, pattern = reverse.rename_source_key(name)
            if pattern is None:
                continue
            count = len(converter.target_patterns)
            number = list(converter.target_patterns).index(pattern)
            stored = rename_source_key(joined, renamings, [], reverse=True)[0]
            tensor = StoredTensor(name=stored, shape=(count * parameter.shape[0], *parameter.shape[1:]), dtype=dtype)
            found[name] = ArrangedWeight(value=("chunk_of_rows", stored, number, count), tensors=(tensor,))
    return found


def weight_names(model: PreTrainedModel) -> dict[str, str | None]:
    """Checkpoint tensor name → parameter or buffer name; None: the tensor is not used.

    Besides the class's own names, a checkpoint may use those that transformers' conversion table renames, and it may lack the base
    model's prefix (`h.0.attn…` for `transformer.h.0.attn…`). Raises `Unsupported` for tensors that would have to be computed.
    """
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    first_names = {id(tensor): name for name, tensor in reversed(own.items())}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tied = set(model.all_tied_weights_keys)
    conversions = get_model_conversion_mapping(model)
    # Files of today and of old: what renames names of old alone would rename those of today, too.
    today = get_model_conversion_mapping(model, add_legacy=False)
    new = [one for one in today if not isinstance(one, PrefixChange)]  # `save_pretrained` of a model that was not loaded adds no prefix
    renamings = [_reversed(rules) for rules in (conversions, today, new)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    names: dict[str, str | None] = dict.fromkeys(tied)
    prefix = f"{model.base_model_prefix}."
    for name, tensor in every:
        if name in tied:  # a checkpoint may hold it besides the tensor that it is
            continue
        parameter = first_names[id(tensor)]
        spellings = [name, *(rename_source_key(name, one, [], reverse=True)[0] for one in renamings)]
        spellings += [spelling.removesuffix(old) + new for spelling in spellings for old, new in _NORMS.items() if spelling.endswith(old)]
        spellings += [spelling.removeprefix(prefix) for spelling in spellings if spelling.startswith(prefix)]
        names |= {s: parameter for s in spellings if s == name or s not in own}
    for converter in converters:
        reverse = converter.reverse_transform()
        if _splits_rows(converter):
            continue
        computed = (name for name in own if reverse.rename_source_key(name)[1] is not None)
        if matched := next((name for name in computed if not stacks_experts(converter, name)), None):
            raise Unsupported(f"its parameter {matched} is computed from several tensors of a checkpoint")
    return {name: parameter for name, parameter in names.items() if name != parameter}
