"""A model that reads its paged cache and can tell whether every sequence is what it should be, and a runner for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.runtime.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput

VOCAB, BLOCK, MAX_LEN = 97, 4, 64

POISON = 96  # a sequence that has this token gets NaN logits


def next_token(tokens: list[int]) -> int:
    """What the model makes of a sequence: any change of any token changes it."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % (VOCAB - 1)


@dataclass
class PagedModel:
    """Keeps token ids instead of keys and values, through slot_mapping and block_table alone.

    in_graph: the metadata is that which a graph was captured with: its integers say nothing of the step, and its rows may be padding.
    """

    pad_to: int | None = None
    in_graph: bool = False
    cache: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, step: Step) -> dict[str, torch.Tensor]:
        input_ids, positions, logits_indices = (step.inputs[name] for name in ("input_ids", "positions", "logits_indices"))
        metadata = step.metadata[KV_CACHES]
        lengths = metadata.seq_lens.tolist()
        if self.in_graph and metadata.max_query_len == 1:
            num_seqs = sum(length > 0 for length in lengths)
            metadata = replace(metadata, num_seqs=num_seqs, num_tokens=num_seqs, max_seq_len=max(lengths))
        tokens, slots, starts = input_ids.tolist(), metadata.slot_mapping.tolist(), metadata.query_start_loc.tolist()
        self.calls.append((len(tokens), metadata.num_tokens))
        assert len(tokens) == len(positions) == len(slots)
        assert slots[metadata.num_tokens :] == [-1] * (len(slots) - metadata.num_tokens)
        assert len(metadata.seq_lens) == len(metadata.block_table) == len(starts) - 1
        assert starts == sorted(starts)
        for token, slot in zip(tokens[: metadata.num_tokens], slots, strict=False):
            assert slot >= 0
            self.cache[slot] = token
        logits_T = torch.zeros(len(tokens), VOCAB)
        assert lengths[metadata.num_seqs :] == [0] * (len(lengths) - metadata.num_seqs)
        assert metadata.max_seq_len == max(lengths)
        query_lens = np.diff(starts[: metadata.num_seqs + 1])
        assert metadata.max_query_len == query_lens.max(initial=1 if self.in_graph else 0)
        for s in range(metadata.num_seqs):
            sequence = [self.cache[int(metadata.block_table[s, i // BLOCK]) * BLOCK + i % BLOCK] for i in range(lengths[s])]
            first = lengths[s] - int(query_lens[s])
            assert positions[starts[s] : starts[s + 1]].tolist() == list(range(first, lengths[s]))
            for i in range(int(query_lens[s])):
                seen = sequence[: first + i + 1]
                logits_T[starts[s] + i, next_token(seen)] = 5.0
                if POISON in seen:
                    logits_T[starts[s] + i] = float("nan")
        return {"logits": logits_T[logits_indices]}


class PaddingRunner(PlainRunner):
    """Pads every step to a multiple of the model's pad_to."""

    model: PagedModel
    max_padded_size = 40

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None:
        pad_to = self.model.pad_to
        return None if pad_to is None else -(-num_tokens // pad_to) * pad_to


class Capturable(TorchAttention):
    decode_capturable = True


def make_runner(model: PagedModel | CudaGraphRunner, *, num_blocks: int = 256, budget: int = 32, seqs: int = 8) -> ModelRunner:
    spec = ModelSpec(
        module=torch.nn.Module(),
        config={},
        state=(full_attention([KVCacheSpec(num_kv_heads=1, head_dim=2)]),),
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
    )
    config = EngineConfig(
        model=ModelConfig(model="m", path=Path("m")),
        cache=CacheConfig(block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
    )
    steps = model if isinstance(model, CudaGraphRunner) else PaddingRunner(model)
    backends = {KV_CACHES: TorchAttention()}
    return ModelRunner(config, spec, steps, backends, torch.device("cpu"), torch.float32, num_blocks)


def run_schedule(
    runner: ModelRunner,
    requests: list[EngineRequest],
    *,
    num_blocks: int,
    budget: int,
    seqs: int,
    depth: int,
    late: int,
    reads_at_once: bool = False,
) -> tuple[dict[str, list[int]], Scheduler]:
    """All requests through a real scheduler, `late` of them only after a few steps, `depth` steps in flight.

    reads_at_once: a step's result is read before the next is launched, though the scheduler hears of it later. A GPU copies it away.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
        CacheConfig(block_size=BLOCK),
        num_blocks=num_blocks,
        max_model_len=MAX_LEN,
    )
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests[: len(requests) - late]:
        scheduler.add_request(request)
    in_flight: list[tuple[SchedulerOutput, PendingStep | ModelRunnerOutput]] = []
    steps = 0
    while scheduler.has_work() or in_flight or steps < 4:
        steps += 1
        if steps == 4:
            for request in requests[len(requests) - late :]:
                scheduler.add_request(request)
        while len(in_flight) < depth and (scheduled := scheduler.schedule()) is not None:
            pending = runner.launch(scheduled)
            in_flight.append((scheduled, pending.result() if reads_at_once else pending))
        if in_flight:
            scheduled, result = in_flight.pop(0)
            result = result.result() if isinstance(result, PendingStep) else result
            for output in scheduler.update(scheduled, result):
                tokens[output.request_id] += output.new_token_ids
    return tokens, scheduler


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def new_request(request_id: str, tokens: list[int], blocks: list[int], **params: object) -> NewRequestData:
    given = {"temperature": 0.0} | params
    return NewRequestData(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        stop_token_ids=[],
        block_ids=[blocks],
        sampling_params=SamplingParams(**given),
        num_computed_tokens=0,
    )


def step(number: int, counts: dict[str, int], **fields: object) -> SchedulerOutput:
    parts = {"new_requests": [], "cached_requests": [], "finished_request_ids": []} | fields
    return SchedulerOutput(step=number, num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), **parts)
