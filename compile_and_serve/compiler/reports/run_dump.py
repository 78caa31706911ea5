"""What a dumped graph imports to be runnable: random inputs of the right shapes, a step's metadata, and a printed summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import COLUMNS, EXAMPLE_PAGE_TOKENS, ExampleTokens, GroupLayout, StateKind
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.state.recurrent import Recurrent
from compile_and_serve.custom_ops.state.tokens import ALL_TOKENS
from compile_and_serve.custom_ops.step import running
from compile_and_serve.custom_ops.step_builder import build_step

TOKENS, ROWS = 5, 3
KINDS: Mapping[str, StateKind] = {"tokens": ALL_TOKENS, "slot": Recurrent()}  # by their unit
# parameter, dtype, shape (symbols as strings), name in the model, kind ("next": counts up, as columns do; the unit of state)
Input = tuple[str, str, list[Any], str, str]


def random_inputs(inputs: Sequence[Input], *, tokens: int = TOKENS, seed: int = 0) -> list[Any]:
    """Inputs for a dumped `forward`: integers below 3, floats of deviation 0.1 (vectors around 1), fitting lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {"tokens": tokens, "rows": min(ROWS, tokens)}
    values: list[Any] = []
    for _, dtype_name, shape, _, kind in inputs:
        sizes = [lengths.setdefault(size, tokens) if isinstance(size, str) else size for size in shape]
        if dtype_name == "length":
            values.append(sizes[0])
            continue
        dtype = getattr(torch, dtype_name)
        if kind == "next":
            value = torch.arange(sizes[-1], dtype=dtype).expand(sizes).contiguous()
        elif dtype.is_floating_point:
            value = torch.randn(sizes, generator=generator) * 0.1 + (len(sizes) == 1)
        else:
            value = torch.randint(0, min(3, lengths["rows"]), sizes, generator=generator)
        values.append(value.to(dtype))
    return values


def run(forward: Callable[..., Any], inputs: Sequence[Input], values: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Call a dumped `forward`; its ops see one sequence that starts at its first token."""
    sized = list(zip(values, inputs, strict=True))
    tokens = next((len(v) for v, i in sized if isinstance(v, torch.Tensor) and i[2][:1] == ["tokens"]), TOKENS)
    lengths = StepLengths(
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        num_seqs=1,
        num_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
    )
    state = [(name.partition(".")[0], KINDS[kind], value) for value, (_, _, _, name, kind) in sized if kind in KINDS]
    groups = [StateGroup(name=name, layers=(), kind=kind) for name, kind, _ in state]
    example = ExampleTokens(
        positions_T=np.arange(tokens), sequence_T=np.zeros(tokens, dtype=np.int64), seq_lens=np.array([tokens], dtype=np.int32)
    )
    pages = {}
    for name, kind, value in state:
        columns = max((len(v) for v, (_, _, _, of, _) in sized if of.startswith(f"{name}.") and of.endswith(COLUMNS)), default=0)
        layout = GroupLayout(tensors={}, page_bytes=0, tokens_per_page=EXAMPLE_PAGE_TOKENS, pages_per_slot=columns)
        arrays = kind.example_pages(example, len(value), layout, None, writes=True)
        pages[name] = tuple([torch.from_numpy(array) for array in arrays])
    step = build_step(groups, lengths, pages=pages, backends=dict.fromkeys(pages, TorchAttention()), inputs={}, state={}, num_rows=ROWS)
    with running(step.metadata), torch.no_grad():
        return forward(*values)


def main(forward: Callable[..., Any], inputs: Sequence[Input]) -> None:
    """Run on random inputs and print dtype, shape and mean magnitude of each output."""
    outputs = run(forward, inputs, random_inputs(inputs))
    for i, output in enumerate(outputs):
        mean = output.abs().double().mean().item()
        print(f"output {i}: {str(output.dtype).removeprefix('torch.')}{list(output.shape)}, mean magnitude {mean:.4g}")
