"""The sampler's GPU path with its kernels in Triton's interpreter: their inputs, and tokens that a graph has already drawn."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from compile_and_serve.custom_ops.staged_arrays import StagedArrays
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS, sample_rows
from compile_and_serve.runtime.sampling.sampler import Sampler, SamplingPlan
from compile_and_serve.runtime.sampling_params import SamplingParams

CPU, VOCAB, SLOTS = torch.device("cpu"), 200, 6
GREEDY = SamplingParams(temperature=0.0)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_k=5, seed=3),
    SamplingParams(top_p=0.7, seed=4),
    SamplingParams(seed=5),
    SamplingParams(temperature=1.3, top_k=500, min_p=0.02, seed=6),
]


def device_sampler(params: list[SamplingParams]) -> Sampler:
    sampler = Sampler(vocab_size=VOCAB, num_slots=SLOTS, device=CPU)
    sampler._has_triton = True
    empty = np.empty(0, dtype=np.int64)
    for slot, given in enumerate(params):
        sampler.add(slot, given, [], empty, empty)
    return sampler


def staged(sampler: Sampler, plan: SamplingPlan, arrays: StagedArrays) -> None:
    for name, values in sampler.inputs(plan).items():
        arrays.host[name][: len(values)] = values


def make_arrays() -> StagedArrays:
    return StagedArrays({name: (dtype, SLOTS) for name, dtype in SAMPLING_FIELDS.items()}, CPU)


def test_a_request_draws_the_same_alone_and_in_a_batch() -> None:
    logits = torch.randn(3, len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(0))
    arrays, batch = make_arrays(), device_sampler(PARAMS)
    plan = batch.plan(range(len(PARAMS)))
    together = []
    for step in range(3):
        staged(batch, plan, arrays)
        together.append(batch.sample(logits[step], plan, arrays.device).tokens_S.tolist())
    for row, params in enumerate(PARAMS):
        alone, own = device_sampler([params]), make_arrays()
        plan = alone.plan([0])
        for step in range(3):
            staged(alone, plan, own)
            assert alone.sample(logits[step, row][None], plan, own.device).tokens_S.item() == together[step][row]
    assert [tokens[0] for tokens in together] == logits[:, 0].argmax(1).tolist()


def test_tokens_drawn_by_a_graph_are_used_unless_the_logits_change() -> None:
    """A graph reads the same arrays at every replay, so one graph serves greedy and random steps."""
    logits = torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(1))
    arrays = make_arrays()
    graph_inputs = [arrays.device[name] for name in SAMPLING_FIELDS]  # the tensors that a graph was captured with
    for params in ([GREEDY] * 2, PARAMS, [GREEDY, GREEDY]):
        sampler = device_sampler(list(params))
        plan = sampler.plan(range(len(params)))
        staged(sampler, plan, arrays)
        arrays.host["temperatures"][len(params) :] = 0.0
        tail = sample_rows(logits, graph_inputs)
        drawn = tail[0][: len(params)], tail[1][: len(params)]
        expected = device_sampler(list(params)).sample(logits[: len(params)], plan, arrays.device).tokens_S
        assert sampler.sample(logits[: len(params)], plan, {}, drawn).tokens_S.tolist() == expected.tolist()
        if params[-1] is GREEDY:
            assert drawn[0].tolist() == logits[:2].argmax(1).tolist()
    biased = device_sampler([msgspec.structs.replace(PARAMS[1], logit_bias={9: 80.0})])
    plan = biased.plan([0])
    staged(biased, plan, arrays)
    tail = sample_rows(logits[:1], [tensor[:1] for tensor in graph_inputs])
    assert tail[0].item() != 9
    assert biased.sample(logits[:1], plan, arrays.device, tail).tokens_S.item() == 9
