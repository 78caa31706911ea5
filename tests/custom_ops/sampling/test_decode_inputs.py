"""The inputs of a step of decodes, made and advanced by kernels, against the same in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from compile_and_serve.custom_ops.sampling.decode_inputs import begin_decodes, end_decodes

NUM_SLOTS, COLUMNS = 300, 7


def state(num_rows: int, num_padding: int, block_size: int, seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, COLUMNS * block_size - 1, num_rows)
    lengths = (positions + 1).astype(np.int32)
    lengths[rng.permutation(num_rows)[:num_padding]] = 0
    table = rng.integers(0, 1 << 30, (NUM_SLOTS, COLUMNS + 2)).astype(np.int32)
    arrays = {
        "last_tokens": rng.integers(0, 1 << 40, NUM_SLOTS),
        "slots": rng.permutation(NUM_SLOTS)[:num_rows],
        "positions": positions,
        "seq_lens": lengths,
        "sample_positions": rng.integers(0, 1 << 40, num_rows),
        "has_run": rng.integers(0, 2, num_rows).astype(np.int32),
        "tokens": rng.integers(0, 1 << 40, num_rows),
        "input_ids": rng.integers(0, 1 << 40, num_rows),
        "slot_mapping": rng.integers(0, 1 << 40, num_rows),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors | {"block_table": torch.from_numpy(table)[:num_rows, :COLUMNS]}  # its rows are strided


@pytest.mark.parametrize(("num_rows", "num_padding"), [(1, 0), (5, 2), (128, 0), (257, 31), (3, 3)])
@pytest.mark.parametrize("block_size", [4, 16])
def test_begin(num_rows: int, num_padding: int, block_size: int) -> None:
    s = state(num_rows, num_padding, block_size, seed=num_rows)
    before = {name: tensor.clone() for name, tensor in s.items()}
    begin_decodes(
        s["last_tokens"],
        s["slots"],
        s["has_run"],
        s["positions"],
        s["seq_lens"],
        s["sample_positions"],
        s["block_table"],
        s["input_ids"],
        s["slot_mapping"],
        block_size,
    )
    real = (before["seq_lens"] > 0).numpy()
    one_more = np.where(real, before["has_run"].numpy(), 0)
    for name in ("positions", "seq_lens", "sample_positions"):
        np.testing.assert_array_equal(s[name].numpy(), before[name].numpy() + one_more, name)
    position = s["positions"].numpy()
    block = before["block_table"].numpy()[np.arange(num_rows), position // block_size].astype(np.int64)
    tokens = before["last_tokens"].numpy()[before["slots"].numpy()]
    np.testing.assert_array_equal(s["input_ids"].numpy(), np.where(real, tokens, 0))
    np.testing.assert_array_equal(s["slot_mapping"].numpy(), np.where(real, block * block_size + position % block_size, -1))
    for name in ("last_tokens", "slots", "has_run", "block_table", "tokens"):
        assert torch.equal(s[name], before[name]), name


@pytest.mark.parametrize(("num_rows", "num_padding"), [(1, 0), (5, 2), (128, 0), (257, 31), (3, 3)])
def test_end(num_rows: int, num_padding: int) -> None:
    s = state(num_rows, num_padding, 16, seed=num_rows)
    before = {name: tensor.clone() for name, tensor in s.items()}
    end_decodes(s["tokens"], s["last_tokens"], s["slots"], s["has_run"], s["seq_lens"])
    real = before["seq_lens"] > 0
    assert torch.equal(s["has_run"], torch.where(real, 1, before["has_run"]).to(torch.int32))
    last_tokens = before["last_tokens"].clone()
    last_tokens[before["slots"][real]] = before["tokens"][real]
    assert torch.equal(s["last_tokens"], last_tokens)
    for name in s.keys() - {"last_tokens", "has_run"}:
        assert torch.equal(s[name], before[name]), name
