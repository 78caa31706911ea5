"""Drafters for tests, and engines that check every draft."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.cudagraphs.work_graphs import WorkGraphs
from compile_and_serve.custom_ops.step import LOGITS, Step
from compile_and_serve.runtime.drafting import speculator
from compile_and_serve.runtime.drafting.payoff import Payoff
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling.decode_step import DecodeStep, begin_step, record_new_tokens
from tests.support.fake_graphs import FakeDevice


class OracleDrafter:
    """Knows how the requests go on, and says it with errors: each token is wrong with probability `error`, lengths vary."""

    def __init__(self, answers: Mapping[str, Sequence[int]], vocab_size: int, *, error: float = 0.25) -> None:
        """answers: request → the tokens that follow its prompt."""
        self.answers, self.vocab_size, self.error = answers, vocab_size, error
        self.rng = random.Random(0)
        self.prompt_lengths: dict[str, int] = {}
        self.forgotten: list[str] = []

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        answer = self.answers[request_id]
        known = len(token_ids) - self.prompt_lengths[request_id]
        right = answer[known : known + self.rng.randint(0, max_tokens)]
        return [self.rng.randrange(self.vocab_size) if self.rng.random() < self.error else token for token in right]

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        self.forgotten.append(request_id)


def check_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on check all drafts, whether that pays or not."""
    monkeypatch.setattr(Payoff, "is_on", lambda self, num_seqs: True)
    monkeypatch.setattr(Payoff, "draft_lengths", all_that_fit)


def draft_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on have drafts, all of which they check, in six of nine steps."""
    check_every_draft(monkeypatch)
    steps = iter(range(10_000))
    monkeypatch.setattr(Payoff, "is_on", lambda self, num_seqs: next(steps) % 9 < 6)


def all_that_fit(self: Payoff, num_seqs: int, drafted: Mapping[str, tuple[int, float]], max_tokens: int) -> dict[str, int]:
    """`Payoff.draft_lengths` that gives every sequence all its drafts, while there is room."""
    lengths: dict[str, int] = {}
    for name, (count, _) in drafted.items():
        if max_tokens > 0:
            lengths[name] = min(count, max_tokens)
            max_tokens -= count
    return lengths


def use_oracle(
    monkeypatch: pytest.MonkeyPatch, requests: Sequence[EngineRequest], answers: Mapping[str, Sequence[int]], vocab_size: int
) -> OracleDrafter:
    """Engines that are made from now on draft the answers, with errors, and check all of it."""
    check_every_draft(monkeypatch)
    drafter = OracleDrafter(answers, vocab_size)
    drafter.prompt_lengths = {name: len(one.prompt_token_ids) for one in requests for name in one.request_ids}
    monkeypatch.setattr(speculator, "make_drafter", lambda config, **_: drafter)
    return drafter


def use_fake_graphs(
    monkeypatch: pytest.MonkeyPatch, num_drafts: int, max_drafted_seqs: int = 8, *, samples_greedily: bool = False
) -> list[GraphRunners]:
    """Engines of up to 8 sequences that are made from now on have stand-ins for CUDA graphs, which are returned. `capture_all` them.
    max_drafted_seqs: of steps with drafts. samples_greedily: these sample in the graph, whatever the requests ask for.
    """
    made: list[GraphRunners] = []

    def graph_runners(
        config: Any, spec: Any, plans: list[Any], backends: Any, drafter_backends: Any, *others: Any, logs: bool
    ) -> GraphRunners:
        stats, fake, sizes = GraphStats(), FakeDevice(), (1, 2, 4, 8)
        given: dict[str, Any] = {"mode": "full", "backends": [], "device": fake, "decode_head": begin_step, "stats": stats}
        # Sampling stays outside: Triton's kernels would run in the interpreter.
        runner = CudaGraphRunner(plans[0], sizes=(8,), max_num_seqs=8, **given)
        drafted = CudaGraphRunner(
            plans[0],
            sizes=sizes,
            max_num_seqs=max_drafted_seqs,
            query_len=1 + num_drafts,
            decode_tail=_take_likeliest if samples_greedily else None,
            **given,
        )
        drafter = None if drafter_backends is None else WorkGraphs(sizes, fake, stats, "draft")
        made.append(GraphRunners([runner], drafted, drafter, has_draft_model=drafter is not None))
        return made[-1]

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", graph_runners)
    return made


def _take_likeliest(outputs: dict[str, torch.Tensor], step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """`end_step` without Triton's kernels, which would run in the interpreter."""
    assert isinstance(step, DecodeStep)
    best_T, tokens_T = outputs[LOGITS].float().max(dim=1)
    if step.drafts is not None:
        record_new_tokens(tokens_T, step)
    return tokens_T, best_T


def capture_all(graphs: GraphRunners) -> None:
    """Capture what steps with drafts replay."""
    for one in (graphs.drafted, graphs.drafter):
        while one is not None and one.capture_next():
            pass
