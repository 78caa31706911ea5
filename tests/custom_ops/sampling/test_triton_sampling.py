"""The GPU's sampler in Triton's interpreter: the filters keep exactly what they should, and the draw is the argmax among it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.sampling import triton_sampling as gpu_sampling
from compile_and_serve.custom_ops.sampling.triton_sampling import greedy_tokens, gumbel_noisy, sample_tokens
from compile_and_serve.custom_ops.triton_common import split_counters

CPU = torch.device("cpu")
OFF = (0, 1.0, 0.0)  # top_k, top_p, min_p


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, position_ptr, SIZE: tl.constexpr):
    ids = tl.arange(0, SIZE)
    tl.store(out_ptr + ids, gumbel_noisy(tl.zeros((SIZE,), tl.float32), ids, 1.0, tl.load(seed_ptr), tl.load(position_ptr)))


def noise(vocab: int, seed: int, position: int) -> torch.Tensor:
    size = triton.next_power_of_2(vocab)
    out = torch.empty(size)
    _noise_kernel[(1,)](out, torch.tensor([seed]), torch.tensor([position]), SIZE=size)
    return out[:vocab]


def allowed(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Mask of what the filters keep, by sorting, in float64: min-p and top-k, then top-p of what is left; equals stay together."""
    scaled = (logits_V.double() - logits_V.double().max()) / temperature
    weights = scaled.exp()
    kept = weights >= min_p
    if 0 < top_k < len(logits_V):
        kept &= logits_V >= logits_V.sort(descending=True).values[top_k - 1]
    total = weights[kept].sum()
    order = logits_V.argsort(descending=True)
    mass = (weights * kept)[order].cumsum(0)
    first_equal = torch.searchsorted(-logits_V[order].double(), -logits_V.double())  # how many are above each
    above = torch.cat([mass.new_zeros(1), mass])[first_equal]
    return kept & (above < top_p * total)


def sample(logits_SV: torch.Tensor, rows: list[tuple[float, int, float, float]], seeds: list[int], positions: list[int]) -> list[int]:
    """rows: (temperature, top_k, top_p, min_p)."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    tokens, _ = sample_tokens(
        logits_SV,
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(seeds),
        torch.tensor(positions),
    )
    assert not split_counters(CPU)[: 4 * len(rows)].any()
    return tokens.tolist()


FILTERS = [OFF, (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.05), (40, 0.7, 0.0), (20, 0.9, 0.02), (300, 0.8, 0.0),
           (900, 1.0, 0.0), (0, 1e-4, 0.0), (100000, 0.5, 0.0)]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize("vocab", [5, 1000, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_draw_is_the_argmax_over_what_the_filters_keep(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    temperatures = [0.3, 1.0, 1.7]
    rows = [(temperatures[i % 3], *filters) for i, filters in enumerate(FILTERS)]
    logits_SV = (2 * torch.randn(len(rows), vocab, generator=generator)).to(dtype)
    seeds = torch.randint(1 << 62, (len(rows),), generator=generator).tolist()
    positions = torch.randint(1000, (len(rows),), generator=generator).tolist()
    tokens = sample(logits_SV, rows, seeds, positions)
    for row, token in enumerate(tokens):
        logits_V = logits_SV[row].float()
        mask = allowed(logits_V, *rows[row])
        noisy = logits_V / rows[row][0] + noise(vocab, seeds[row], positions[row])
        assert token == torch.where(mask, noisy, float("-inf")).argmax(), (rows[row], int(mask.sum()))


@pytest.mark.parametrize("sms", [1, 100])
def test_few_or_many_programs_a_row_gather_the_same(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampling, "num_sms", lambda device: sms)
    vocab = 40_000
    logits_SV = torch.randn(3, vocab, generator=torch.Generator().manual_seed(9))
    rows = [(0.8, 40, 0.9, 0.0), (0.0, *OFF), (1.1, 200, 0.99, 0.01)]
    for row, token in enumerate(sample(logits_SV, rows, [1, 2, 3], [4, 5, 6])):
        temperature = rows[row][0] or 1.0
        mask = allowed(logits_SV[row], *rows[row]) if rows[row][0] else torch.ones(vocab, dtype=torch.bool)
        noisy = logits_SV[row] / temperature + (noise(vocab, row + 1, row + 4) if rows[row][0] else 0.0)
        assert token == torch.where(mask, noisy, float("-inf")).argmax()


@pytest.mark.exhaustive
def test_many_equal_logits_are_kept_together() -> None:
    """More logits reach the k-th than are gathered: the row takes the other way, and says the same."""
    logits_SV = torch.zeros(3, 20_000)
    logits_SV[:, 15_000:] = -1.0
    rows = [(1.0, 5, 1.0, 0.0), (1.0, 5, 0.5, 0.0), (1.0, 1, 1.0, 0.0)]
    for position in range(3):
        tokens = sample(logits_SV, rows, [1, 2, 3], [position] * 3)
        for row, token in enumerate(tokens):
            assert token == noise(20_000, row + 1, position)[:15_000].argmax()


def test_rows_do_not_know_each_other() -> None:
    """Alone or in a batch, in any place, a request draws the same; greedy rows in between take the largest logit."""
    generator = torch.Generator().manual_seed(0)
    logits_SV = torch.randn(6, 300, generator=generator)
    rows = [(0.0, 5, 0.5, 0.1), (0.8, 0, 0.9, 0.0), (0.0, *OFF), (1.2, 10, 1.0, 0.0), (1.0, *OFF), (0.7, 0, 1.0, 0.1)]
    seeds, positions = [11, 12, 13, 14, 15, 16], [3, 4, 5, 6, 7, 8]
    together = sample(logits_SV, rows, seeds, positions)
    order = [4, 0, 5, 3, 1, 2]
    mixed = sample(logits_SV[order], [rows[i] for i in order], [seeds[i] for i in order], [positions[i] for i in order])
    assert mixed == [together[i] for i in order]
    for i in range(6):
        assert sample(logits_SV[i : i + 1], rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) == [together[i]]
    assert [together[0], together[2]] == logits_SV[[0, 2]].argmax(1).tolist()
    assert greedy_tokens(logits_SV)[0].tolist() == logits_SV.argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 129, 8193, 20_000])
def test_greedy_rows_take_the_lowest_id_among_equals(vocab: int, dtype: torch.dtype) -> None:
    """Equal logits in one lane, in several steps and in several programs; zeros of both signs; rows without a number."""
    generator = torch.Generator().manual_seed(vocab)
    levels = torch.tensor([-1.0, -0.0, 0.0, 1.0, 2.5, torch.inf, -torch.inf])
    logits_SV = torch.stack(
        [
            torch.randn(vocab, generator=generator),
            *(levels[torch.randint(high, (vocab,), generator=generator)] for high in (2, 3, 4, 5, 6)),
            -levels[torch.randint(1, 3, (vocab,), generator=generator)],
            torch.full((vocab,), -torch.inf),
            torch.full((vocab,), -3e38),
        ]
    ).to(dtype)
    wide_SV = torch.zeros(len(logits_SV), vocab + 3, dtype=dtype)
    wide_SV[:, vocab:] = 1e4  # not part of the rows
    wide_SV[:, :vocab] = logits_SV
    expected = (logits_SV == logits_SV.max(1, keepdim=True).values).int().argmax(1)
    rows = [(0.0, 5, 0.5, 0.1)] * len(logits_SV)
    assert sample(wide_SV[:, :vocab], rows, [0] * len(rows), [0] * len(rows)) == expected.tolist()
    tokens, best = greedy_tokens(wide_SV[:, :vocab])
    assert torch.equal(tokens, expected)
    assert torch.equal(best, logits_SV.float().max(1).values)


@pytest.mark.slow_cases
@pytest.mark.parametrize("at", [0, 200, 6344, 19_999])
def test_nan_anywhere_is_seen(at: int) -> None:
    """Before and after larger values of its lane, of either sign, in rows of every kind."""
    logits_SV = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(at))
    for row, sign in enumerate((1.0, -1.0, 1.0)):
        logits_SV[row, at] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
    logits_SV[:, 4296] = torch.inf
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 5)):
        columns = [torch.full((4,), value) for value in (temperature, top_k, 1.0, 0.0, 7, 3)]
        columns[1] = columns[1].int()
        tokens, best = sample_tokens(logits_SV, *columns)
        assert best.isnan().tolist() == [True, True, True, False]
        assert tokens[3] == 4296
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 20_000


def test_noise_is_gumbels_and_differs_by_seed_and_position() -> None:
    """Then the argmax of logit / temperature + noise is a draw from the softmax."""
    streams = [noise(4096, seed, position).double() for seed, position in ((1, 0), (1, 1), (2**61 + 1, 0))]
    ideal = (torch.arange(4096).double() + 0.5) / 4096
    for values in streams:
        uniform = torch.exp(-torch.exp(-values)).sort().values
        assert (uniform - ideal).abs().max() < 2.2 / 64  # Kolmogorov-Smirnov, p < 1e-4
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(torch.corrcoef(torch.stack([streams[first], streams[second]]))[0, 1]) < 0.07


def test_a_row_without_a_usable_logit_disturbs_no_other() -> None:
    logits_SV = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    logits_SV[1, 50] = float("nan")
    logits_SV[2] = float("-inf")
    rows = [(1.0, 5, 0.9, 0.0)] * 2 + [(1.0, 0, 0.9, 0.1)] * 2
    arguments = [torch.tensor(column) for column in zip(*rows, strict=True)]
    arguments[1] = arguments[1].int()
    tokens, best = sample_tokens(logits_SV, *arguments, torch.arange(4), torch.arange(4))
    assert best.isfinite().tolist() == [True, False, False, True]
    alone = sample_tokens(logits_SV[3:], *[a[3:] for a in arguments], torch.tensor([3]), torch.tensor([3]))
    assert alone[0].item() == tokens[3]
    assert not split_counters(CPU)[:16].any()
