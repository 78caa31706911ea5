"""The sampler against plain-Python references of single rows, and against the distributions it must draw from."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch

from compile_and_serve.runtime.sampling.ops import top_p_indices
from compile_and_serve.runtime.sampling.processed import processed_logits
from compile_and_serve.runtime.sampling.sampler import SampledRows, Sampler, SamplingPlan
from compile_and_serve.runtime.sampling_params import SamplingParams

VOCAB = 300  # not a multiple of the sampler's block
CPU = torch.device("cpu")


def make_sampler(*requests: SamplingParams, **kwargs: object) -> Sampler:
    sampler = Sampler(vocab_size=VOCAB, num_slots=16, device=CPU)
    for slot, params in enumerate(requests):
        add(sampler, slot, params, **kwargs)
    return sampler


def add(sampler: Sampler, slot: int, params: SamplingParams, prompt=(), output=(), stop_ids=()) -> None:
    as_array = lambda ids: np.array(ids, dtype=np.int64)  # noqa: E731
    if params.seed is None:
        params = msgspec.structs.replace(params, seed=1000 + slot)
    sampler.add(slot, params, list(stop_ids), as_array(prompt), as_array(output))


def run(sampler: Sampler, logits: torch.Tensor, slots: list[int]) -> SampledRows:
    plan = sampler.plan(slots)
    return sampler.sample(logits, plan, inputs(sampler, plan))


def inputs(sampler: Sampler, plan: SamplingPlan) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in sampler.inputs(plan).items()}


def tokens(sampler: Sampler, logits: torch.Tensor, slots: list[int] | None = None) -> list[int]:
    return run(sampler, logits, list(range(len(logits))) if slots is None else slots).tokens_S.tolist()


def filtered_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """Reference: temperature, then min_p, top_k, top_p, in that order; sorted lists and sums of Python floats."""
    scaled = [x / params.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= params.top_p * total and kept:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_greedy_takes_the_largest_logit(dtype: torch.dtype, rows: int) -> None:
    logits = torch.randn(rows, VOCAB).to(dtype)
    sampler = make_sampler(*[SamplingParams(temperature=0.0)] * rows)
    assert sampler.plan(list(range(rows))).is_plain_greedy
    sampled = run(sampler, logits, list(range(rows)))
    assert sampled.tokens_S.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert sampled.best_S.tolist() == [max(row) for row in logits.tolist()]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=40, top_p=0.6, temperature=1.3),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.8, min_p=0.05, temperature=0.9),
        SamplingParams(top_k=20, min_p=0.2, top_p=0.9),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=1.0),
    ],
    ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 2
    expected = filtered_probs(logits.tolist(), params)
    processed = processed_logits(logits[None], [params])[0].double().softmax(-1)
    assert processed.tolist() == pytest.approx(expected, abs=1e-6)
    draws, rows = 200, 15
    sampler = make_sampler(*[params] * rows)
    plan = sampler.plan(list(range(rows)))
    counts: Counter[int] = Counter()
    for _ in range(draws):
        counts.update(sampler.sample(logits.expand(rows, -1), plan, inputs(sampler, plan)).tokens_S.tolist())
    total = draws * rows
    assert all(expected[token] > 0 for token in counts), "a filtered token was drawn"
    # 5 standard deviations of a binomial count, and at least a few counts for the rare tokens
    for token, probability in enumerate(expected):
        deviation = math.sqrt(total * probability * (1 - probability))
        assert abs(counts[token] - total * probability) <= 5 * deviation + 4, (token, counts[token])


EQUALS = [  # (filters, ids that they keep of the logits below)
    ({"top_k": 3}, {1, 2, 4, 6, 7}),
    ({"top_k": 1}, {1, 4}),
    ({"top_p": 0.2}, {1, 4}),  # each of the two has 0.3 of the mass
    ({"top_p": 0.7}, {1, 2, 4, 6, 7}),
    ({"top_k": 3, "top_p": 0.8}, {1, 2, 4, 6, 7}),
    ({"min_p": 0.36}, {1, 2, 4, 6, 7}),  # e⁻¹ is 0.368
]


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["filters1", "filters4"])
@pytest.mark.parametrize(("filters", "kept"), EQUALS)
def test_filters_keep_the_equals_of_their_last_token(filters: dict[str, float], kept: set[int]) -> None:
    """The same on the CPU, in Triton's interpreter, and in the processed logits."""
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.sampling.triton_sampling import sample_tokens

    logits = torch.full((VOCAB,), -20.0)
    logits[:8] = torch.tensor([1.0, 4.0, 3.0, 0.0, 4.0, 1.0, 3.0, 3.0])
    params, rows = SamplingParams(**filters), 30  # type: ignore[arg-type]
    sampler = make_sampler(*[params] * 10)
    plan = sampler.plan(list(range(10)))
    drawn = set()
    for _ in range(rows // 10):
        drawn |= set(sampler.sample(logits.expand(10, -1), plan, inputs(sampler, plan)).tokens_S.tolist())
    fields = {
        "temperature": torch.full((rows,), params.temperature),
        "top_k": torch.full((rows,), max(params.top_k, 0), dtype=torch.int32),
        "top_p": torch.full((rows,), params.top_p),
        "min_p": torch.full((rows,), params.min_p),
        "seeds": torch.arange(rows),
        "positions": torch.zeros(rows, dtype=torch.int64),
    }
    on_device, _ = sample_tokens(logits.expand(rows, -1), *fields.values())
    processed = processed_logits(logits[None], [params])[0]
    assert drawn == set(on_device.tolist()) == set(processed.isfinite().nonzero()[:, 0].tolist()) == kept


def test_same_seed_same_tokens_alone_in_a_batch_and_after_a_preemption() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(7, VOCAB) for _ in range(6)]
    mine = [
        SamplingParams(seed=11, temperature=0.8),
        SamplingParams(seed=12, top_k=9, top_p=0.7),
        SamplingParams(seed=13, top_p=0.9),
        SamplingParams(seed=2**63 + 5, min_p=0.02),
        SamplingParams(seed=-4, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4),
    ]
    others = [SamplingParams(temperature=0.0), SamplingParams(top_k=200, min_p=0.3, logprobs=3, logit_bias={5: 2.0})]
    together = make_sampler(*mine, *others, prompt=[1, 2, 3])
    batch = [tokens(together, logits) for logits in steps]
    for row, params in enumerate(mine):
        alone = make_sampler(params, prompt=[1, 2, 3])
        got = [tokens(alone, logits[row : row + 1])[0] for logits in steps]
        assert got == [step[row] for step in batch]

        resumed = make_sampler(params, prompt=[1, 2, 3], output=got[:4])
        assert [tokens(resumed, logits[row : row + 1])[0] for logits in steps[4:]] == got[4:]


def test_streams_differ_between_seeds_and_positions() -> None:
    flat = torch.zeros(2, VOCAB)
    sampler = make_sampler(SamplingParams(seed=1), SamplingParams(seed=2))
    drawn = [tokens(sampler, flat) for _ in range(50)]
    assert len({step[0] for step in drawn}) > 30
    assert sum(step[0] == step[1] for step in drawn) < 10


def reference_penalties(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    counts = Counter(output)
    result = []
    for token, logit in enumerate(logits):
        x = logit
        if token in counts or token in prompt:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        result.append(x)
    return result


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1.9},
    ],
)
def test_penalties_follow_the_generated_tokens(penalties: dict[str, float]) -> None:
    torch.manual_seed(5)
    params = SamplingParams(temperature=0.0, **penalties)
    prompt, output = [7, 8, 9, 9], [7, 20]
    sampler = make_sampler(SamplingParams(temperature=0.0), params, prompt=prompt, output=output)
    base = torch.randn(VOCAB)
    base[:25] += 4.0
    for _ in range(25):
        expected = reference_penalties(base.tolist(), params, prompt, output)
        plain, token = tokens(sampler, torch.stack([base, base]))
        assert plain == int(base.argmax()), "the row without penalties is unchanged"
        assert token == expected.index(max(expected))
        output.append(token)
    assert len(set(output)) > 3


def test_a_slot_keeps_no_penalties_of_its_previous_request() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    for _ in range(2):
        add(sampler, 0, params, prompt=[1])
        assert [tokens(sampler, logits)[0] == 3 for _ in range(5)] == [True, True, True, True, False]
        sampler.remove(0)


def test_penalty_state_grows_with_the_requests_that_need_it() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler = make_sampler(params, params, prompt=[3])
    logits = torch.zeros(16, VOCAB)
    logits[:, 3] = 1.0
    assert tokens(sampler, logits[:2]) == [3, 3]
    for slot in range(2, 16):
        add(sampler, slot, params, prompt=[3, 4])
    assert tokens(sampler, logits) == [0, 0, *[3] * 14]


def test_penalties_of_a_long_prompt_beside_a_short_one_over_many_steps() -> None:
    """The list of seen tokens outgrows its first width, and the padding of the shorter row has no effect."""
    torch.manual_seed(6)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.01)
    prompts = [list(range(290)), [4]]
    sampler = make_sampler()
    for slot, prompt in enumerate(prompts):
        add(sampler, slot, params, prompt=prompt)
    outputs: list[list[int]] = [[], []]
    base = torch.randn(2, VOCAB) + 1.0
    for _ in range(300):
        expected = [reference_penalties(base[row].tolist(), params, prompts[row], outputs[row]) for row in range(2)]
        drawn = tokens(sampler, base)
        for row in range(2):
            assert expected[row][drawn[row]] == pytest.approx(max(expected[row]), abs=1e-4)
            outputs[row].append(drawn[row])


@pytest.mark.parametrize("size", [50, 5000])
def test_top_p_indices_are_the_shortest_prefix_of_the_sorted_weights_and_the_equals_of_its_last(size: int) -> None:
    rng = np.random.default_rng(size)
    for weights in (rng.random(size), np.exp(3 * rng.normal(size=size)), np.ones(size), rng.integers(1, 4, size=size)):
        weights = weights.astype(np.float32)
        ordered = np.sort(weights)[::-1].astype(np.float64)
        before = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
        for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999):
            limit = top_p * float(weights.sum(dtype=np.float64))
            # sums in another order may round differently, which moves the last one by at most one
            last = int(np.searchsorted(before, limit)) - 1
            allowed = {float(ordered[at]) for at in range(max(0, last - 1), min(size, last + 2))}
            kept = top_p_indices(weights, limit)
            assert float(weights[kept].min()) in allowed
            np.testing.assert_array_equal(kept, np.flatnonzero(weights >= weights[kept].min()))


def test_logit_bias_allowed_ids_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.0, 1.0
    assert tokens(make_sampler(SamplingParams(temperature=0.0, logit_bias={12: 5.0, 10: -1.0})), logits) == [12]
    assert tokens(make_sampler(SamplingParams(temperature=0.0, allowed_token_ids=[12, 200])), logits) == [12]
    for params in (SamplingParams(allowed_token_ids=[4, 200, 299]), SamplingParams(allowed_token_ids=[4], top_p=0.9)):
        sampler = make_sampler(params)
        drawn = {tokens(sampler, logits)[0] for _ in range(60)}
        assert drawn == set(params.allowed_token_ids or [])

    sampler = make_sampler(SamplingParams(temperature=0.0, min_tokens=2), stop_ids=[10, 11])
    plan = sampler.plan([0])
    assert plan.valid_steps == 2
    assert [sampler.sample(logits, plan, None).tokens_S.item() for _ in range(2)] == [12, 12]
    assert plan.valid_steps == 0
    assert tokens(sampler, logits) == [10]


def test_min_tokens_counts_tokens_from_before_a_preemption() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10] = 1.0
    params = SamplingParams(temperature=0.0, min_tokens=3)
    assert tokens(make_sampler(params, output=[5, 6], stop_ids=[10]), logits) == [0]
    assert tokens(make_sampler(params, output=[5, 6, 7], stop_ids=[10]), logits) == [10]


def test_a_longer_bad_word_of_a_later_request_keeps_the_earlier_history() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 10], logits[:, 11] = 3.0, 2.0
    sampler = make_sampler(SamplingParams(temperature=0.0, bad_words_token_ids=[[10, 10]]))
    assert tokens(sampler, logits[:1]) == [10]
    add(sampler, 1, SamplingParams(temperature=0.0, bad_words_token_ids=[[1, 2, 3, 10]]), output=[1, 2, 3])
    assert tokens(sampler, logits) == [11, 11]


def test_bad_words_of_many_lengths_and_rows_match_a_plain_search() -> None:
    generator = np.random.default_rng(5)
    draw = lambda length: generator.integers(0, 3, length).tolist()  # noqa: E731
    words = [[draw(length) for length in generator.integers(1, 12, 40)] for _ in range(3)]
    outputs = [draw(length) for length in (20, 3, 9)]
    sampler = make_sampler()
    for slot, output in enumerate(outputs):
        add(sampler, slot, SamplingParams(temperature=0.0, bad_words_token_ids=words[slot]), output=output)
    logits = torch.zeros(3, VOCAB)
    logits[:, :3] = torch.tensor([3.0, 2.0, 1.0])
    for _ in range(6):
        expected = []
        for row, output in enumerate(outputs):
            bad = {word[-1] for word in words[row] if len(word) <= len(output) + 1 and output[len(output) - len(word) + 1 :] == word[:-1]}
            expected.append(next(token for token in range(4) if token not in bad))
        assert tokens(sampler, logits) == expected
        for output, token in zip(outputs, expected, strict=True):
            output.append(token)


def test_a_long_bad_word_leaves_the_other_requests_alone() -> None:
    sampler = make_sampler()
    many = [[1, token] for token in range(VOCAB)]
    add(sampler, 0, SamplingParams(temperature=0.0, bad_words_token_ids=[[7] * 200, *many]))
    add(sampler, 1, SamplingParams(temperature=0.0, bad_words_token_ids=[[5, 5, 6]]), output=[5, 5])
    logits = torch.zeros(2, VOCAB)
    logits[:, 6] = 1.0
    assert tokens(sampler, logits, [0, 1])[1] == 0
    sampler.remove(0)
    add(sampler, 2, SamplingParams(temperature=0.0, bad_words_token_ids=[[5, 6]]), output=[5])
    assert tokens(sampler, logits, [2, 1]) == [0, 6]  # request 1 has gone on to 5, 5, 0


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.5)]]
)
def test_rows_without_usable_logits_are_reported_and_get_a_valid_id(params: SamplingParams) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5] = float("nan")
    logits[1] = float("-inf")
    sampler = make_sampler(params, params, params)
    sampled = run(sampler, logits, [0, 1, 2])
    assert torch.isfinite(sampled.best_S).tolist() == [False, False, True]
    assert all(0 <= token < VOCAB for token in sampled.tokens_S.tolist())


def test_sampling_does_not_change_the_logits() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sampler = make_sampler(
        SamplingParams(logit_bias={1: 1.0}, presence_penalty=1.0, allowed_token_ids=[1, 2], min_p=0.1, logprobs=1),
        SamplingParams(top_p=0.5),
        prompt=[7],
    )
    for _ in range(3):
        tokens(sampler, logits)
    assert torch.equal(logits, before)
