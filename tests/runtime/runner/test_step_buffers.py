"""The persistent arrays of a step: what the host fills, and what the device fills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.step import INPUT_IDS, TOKENS, Step, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.runtime.runner.step_buffers import StepBuffers

HIDDEN = StepInput(name="hidden", dtype=torch.bfloat16, dims=(TOKENS, 3), source="device")
CPU = torch.device("cpu")


def batch_of(token_ids: list[int], **facts: Any) -> TokenBatch:
    count = len(token_ids)
    return TokenBatch(
        token_ids=np.array(token_ids),
        positions=np.arange(count),
        query_start_loc=np.array([0, count], dtype=np.int32),
        row_indices=np.array([count - 1]),
        **facts,
    )


def step_of(buffers: StepBuffers, token_ids: list[int], padded: int) -> Step:
    buffers.rotate()
    buffers.fill(batch_of(token_ids), padded, 1)
    buffers.upload()
    return buffers.step(
        padded,
        1,
        1,
        state={},
        tables={},
        backends={},
        num_tokens=len(token_ids),
        num_seqs=1,
        max_query_len=len(token_ids),
        max_seq_len=len(token_ids),
        uses_optional=True,
    )


def test_an_input_of_the_device_lies_in_the_same_memory_and_the_host_never_writes_it() -> None:
    buffers = StepBuffers([INPUT_IDS, HIDDEN], [], [], max_tokens=8, max_seqs=2, max_sampled=2, max_rows=8, device=CPU)
    first = step_of(buffers, [7, 8, 9], 4)
    assert (first.inputs["hidden"].dtype, first.inputs["hidden"].shape) == (torch.bfloat16, (4, 3))
    first.inputs["hidden"].copy_(torch.arange(12).view(4, 3))
    second = step_of(buffers, [5, 6], 4)
    assert second.inputs["input_ids"].tolist() == [5, 6, 0, 0]
    assert second.inputs["hidden"].data_ptr() == first.inputs["hidden"].data_ptr()
    assert second.inputs["hidden"].flatten().tolist() == list(range(12))
    assert first.addresses == second.addresses


def test_synthetic_steps_have_numbers_for_an_input_of_the_device() -> None:
    hidden = make_step([INPUT_IDS, HIDDEN], [], [(0, 5)], state={}, tokens_per_page={}).inputs["hidden"]
    again = make_step([INPUT_IDS, HIDDEN], [], [(0, 5)], state={}, tokens_per_page={}).inputs["hidden"]
    assert hidden.dtype == torch.bfloat16
    assert len(hidden.unique()) > 10
    assert torch.equal(hidden, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Input x is filled by the host: give it either fill= or write=, or source='device'"),
        ({"fill": lambda batch: batch.positions, "write": lambda batch, array: None}, "give it either fill= or write="),
        ({"write": lambda batch, array: None, "optional": True}, "Input x has write=: it must"),
        ({"source": "device", "fill": lambda batch: batch.positions}, "Input x is filled by the device: leave out fill="),
        ({"source": "device", "optional": True}, "Input x is filled by the device: leave out fill="),
    ],
)
def test_an_input_has_one_source(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepInput(name="x", dtype=torch.int64, dims=(TOKENS,), **options)


def test_rows_of_arrays_come_to_their_tokens() -> None:
    """Two sequences, at tokens 3 … 6 and 0 … 1; the first has rows for tokens 1 … 4 and 6, the second none."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) + 0.5
    late = torch.tensor([[7.5, 8.5, 9.5]], dtype=torch.bfloat16)
    batch = TokenBatch(
        token_ids=np.arange(6),
        positions=np.array([3, 4, 5, 6, 0, 1]),
        query_start_loc=np.array([0, 4, 6], dtype=np.int32),
        row_indices=np.array([3, 5]),
        arrays=[{"rows": [StepArray.of(rows, start=1), StepArray.of(late, start=6)]}, {}],
    )
    pieces = [(tokens.start, tokens.stop, values.tolist()) for tokens, values in batch.rows_of("rows")]
    assert pieces == [(0, 2, rows[2:].tolist()), (3, 4, late.tolist())]
    assert list(batch.rows_of("others")) == []
    default = np.tile(batch.positions, (3, 1)).astype(np.float32)
    values = batch.with_rows_of("rows", default, axis=1)
    assert values.tolist() == np.stack([rows[2], rows[3], [5] * 3, late[0].tolist(), [0] * 3, [1] * 3], axis=1).tolist()
    assert default[0, 0] == 3
    goes_on = batch.with_rows_of("rows", default, axis=1, goes_on=True)
    values[:, 2] = rows[3] + 1
    assert goes_on.tolist() == values.tolist()
    decode = replace(batch, positions=np.array([7, 8, 9, 10, 0, 1]))
    going = decode.with_rows_of("rows", default, axis=1, goes_on=True)
    assert going[:, :4].tolist() == (late[0].float().numpy()[:, None] + np.arange(1, 5)).tolist()
    assert batch.with_rows_of("others", default) is default


def fill_rows(batch: TokenBatch) -> np.ndarray | None:
    pieces = list(batch.rows_of("rows"))
    if not pieces:
        return None
    values = np.zeros((len(batch.token_ids), 3), dtype=np.float32)
    for tokens, rows in pieces:
        values[tokens] = rows
    return values


def test_optional_inputs_are_written_only_where_a_step_uses_them() -> None:
    rows = StepInput(name="rows", dtype=torch.bfloat16, dims=(TOKENS, 3), fill=fill_rows, advance="same", optional=True)
    buffers = StepBuffers([INPUT_IDS, rows], [], [], max_tokens=8, max_seqs=2, max_sampled=2, max_rows=8, device=CPU)
    given = np.array([[1.5, 2.5, 1 / 3], [4, 5, 6]], dtype=np.float32)
    with_rows = batch_of([7, 8, 9], arrays=[{"rows": [StepArray.of(given, start=1)]}])
    assert not buffers.uses_optional(batch_of([7]))
    assert buffers.uses_optional(with_rows)
    buffers.rotate()
    buffers.fill(with_rows, 4, 1, uses_optional=True)
    held = buffers.device["input.rows"][:12].view(4, 3)
    expected = torch.zeros(4, 3)
    expected[1:3] = torch.from_numpy(given)
    assert held.dtype == torch.bfloat16
    assert torch.equal(held, expected.bfloat16())
    buffers.fill(batch_of([7, 8, 9]), 4, 1, uses_optional=False)
    assert torch.equal(held, expected.bfloat16())
    buffers.fill(batch_of([7, 8, 9]), 4, 1, uses_optional=True)
    assert not held.any()
