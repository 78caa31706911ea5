"""What clients and dashboards see of speculative decoding."""

from __future__ import annotations

from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.text.output_processor import CompletionDelta
from compile_and_serve.serve.cli.bench.metrics import RequestTrace, summarize
from compile_and_serve.serve.observe.metrics import Metrics
from compile_and_serve.serve.protocol.completions import CompletionRequest
from compile_and_serve.serve.protocol.fields import sampling_params
from compile_and_serve.serve.protocol.usage import Usage


def delta(num_tokens: int, drafted: int, accepted: int) -> CompletionDelta:
    return CompletionDelta(index=0, text="", token_ids=[1] * num_tokens, num_draft_tokens=drafted, num_accepted_drafts=accepted)


def test_usage_says_which_draft_tokens_were_accepted() -> None:
    usage = Usage(prompt_tokens=3, with_details=False)
    usage.add(delta(1, 0, 0))
    assert "completion_tokens_details" not in usage.as_dict()
    merged = delta(3, 4, 2)
    merged.extend(delta(1, 4, 0))
    usage.add(merged)
    assert usage.as_dict()["completion_tokens"] == 5
    details = usage.as_dict()["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 6}


def test_metrics_count_drafts_by_position() -> None:
    metrics = Metrics("m")
    for total in ([3, 1], [5, 1], [5, 2]):
        metrics.observe_step(
            EngineStats(
                spec_decode_num_drafts=7,
                spec_decode_num_draft_tokens=14,
                spec_decode_num_accepted_tokens=sum(total),
                spec_decode_num_accepted_tokens_per_pos=total,
            )
        )
    text = metrics.render().decode()
    for line in (
        'cas:spec_decode_num_drafts_total{model_name="m"} 7.0',
        'cas:spec_decode_num_draft_tokens_total{model_name="m"} 14.0',
        'cas:spec_decode_num_accepted_tokens_total{model_name="m"} 7.0',
        'cas:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 5.0',
        'cas:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 2.0',
    ):
        assert line in text, text


def test_a_request_may_opt_out() -> None:
    for given, expected in (({"speculate": False}, False), ({"speculate": True}, True), ({}, True)):
        body = CompletionRequest.model_validate({"prompt": "x", **given})
        assert sampling_params(body, {}, max_tokens=3, logprobs=None).speculate is expected


def test_bench_reports_acceptance() -> None:
    trace = RequestTrace(sent=0.0, prompt_tokens=1, times=[1.0, 2.0], output_tokens=5, draft_tokens=8, accepted_tokens=2)
    assert summarize([trace], 2.0)["acceptance_rate"] == 0.25
    plain = RequestTrace(sent=0.0, prompt_tokens=1, times=[1.0, 2.0], output_tokens=5)
    assert "draft_tokens" not in summarize([plain], 2.0)
