"""`bench latency` and `bench throughput`: random prompts on an engine in this process. Requests run to full length."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compile_and_serve.serve.cli.bench.metrics import RandomRangeRatio, RequestTrace, random_lengths, report, summarize
from compile_and_serve.serve.cli.flags import ModelArgument
from compile_and_serve.serve.cli.output import StageDisplay, error_console

if TYPE_CHECKING:
    from compile_and_serve.runtime.engine.client import SyncEngine

OutputJson = Annotated[Path | None, typer.Option(help="Also write the JSON line to this file.")]


def latency_command(
    model: ModelArgument,
    input_len: Annotated[int, typer.Option(help="Prompt tokens per request.")] = 128,
    output_len: Annotated[int, typer.Option(help="Generated tokens per request.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests per round.")] = 1,
    num_iters: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    num_iters_warmup: Annotated[int, typer.Option(help="Unmeasured rounds before the measured ones.")] = 1,
    output_json: OutputJson = None,
    *,
    engine_options: dict[str, Any],
) -> None:
    """Measure the latency of requests that run one batch at a time."""
    _at_least_one(input_len=input_len, output_len=output_len, batch_size=batch_size, num_iters=num_iters)
    engine = _start(model, engine_options)
    generator = random.Random(engine_options["seed"])
    traces: list[RequestTrace] = []
    started = time.perf_counter()
    for round_number in range(num_iters_warmup + num_iters):
        if round_number == num_iters_warmup:
            traces, started = [], time.perf_counter()
        prompts = _random_prompts(generator, engine.info.vocab_size, [input_len] * batch_size)
        traces += run_requests(engine, prompts, [output_len] * batch_size)
    seconds = time.perf_counter() - started
    engine.shutdown()
    workload = _workload(model, engine) | {
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "num_iters": num_iters,
    }
    report("latency", workload, summarize(traces, seconds), output_json)


def throughput_command(
    model: ModelArgument,
    num_prompts: Annotated[int, typer.Option(help="Requests, all sent at once.")] = 64,
    input_len: Annotated[int, typer.Option(help="Prompt tokens per request.")] = 128,
    output_len: Annotated[int, typer.Option(help="Generated tokens per request.")] = 128,
    n: Annotated[int, typer.Option(help="Sequences per prompt. Several are sampled at temperature 1.")] = 1,
    random_range_ratio: RandomRangeRatio = 0.0,
    output_json: OutputJson = None,
    *,
    engine_options: dict[str, Any],
) -> None:
    """Measure the throughput of requests that are all sent at once."""
    _at_least_one(input_len=input_len, output_len=output_len, num_prompts=num_prompts, n=n)
    generator = random.Random(engine_options["seed"])
    lengths = [random_lengths(generator, num_prompts, mean, random_range_ratio) for mean in (input_len, output_len)]
    engine = _start(model, engine_options)
    run_requests(engine, _random_prompts(generator, engine.info.vocab_size, [input_len]), [2])
    prompts = _random_prompts(generator, engine.info.vocab_size, lengths[0])
    started = time.perf_counter()
    traces = run_requests(engine, prompts, lengths[1], n=n)
    seconds = time.perf_counter() - started
    engine.shutdown()
    workload = _workload(model, engine) | {
        "num_prompts": num_prompts,
        "n": n,
        "input_len": input_len,
        "output_len": output_len,
        "random_range_ratio": random_range_ratio,
    }
    report("throughput", workload, summarize(traces, seconds), output_json)


def run_requests(engine: SyncEngine, prompts: Sequence[list[int]], output_lens: Sequence[int], *, n: int = 1) -> list[RequestTrace]:
    """Send all prompts at once, without stop ids, and record when each token arrives. n: sequences per prompt, each with its
    own trace. A single one is greedy.
    """
    from compile_and_serve.runtime.messages import EngineRequest, Sibling
    from compile_and_serve.runtime.sampling_params import SamplingParams

    traces: dict[str, RequestTrace] = {}
    for number, (prompt, output_len) in enumerate(zip(prompts, output_lens, strict=True)):
        temperature = 0.0 if n == 1 else 1.0
        params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
        ids = [f"bench-{number}-{index}" for index in range(n)]
        sent = time.perf_counter()
        # The sequences share their prompt, so its tokens count once.
        traces |= {id_: RequestTrace(sent=sent, prompt_tokens=0 if i else len(prompt)) for i, id_ in enumerate(ids)}
        siblings = [Sibling(request_id) for request_id in ids[1:]]
        engine.add_request(EngineRequest(request_id=ids[0], prompt_token_ids=prompt, sampling_params=params, siblings=siblings))
    unfinished = set(traces)
    while unfinished:
        step = engine.step()
        now = time.perf_counter()
        for output in step.outputs:
            trace = traces[output.request_id]
            if output.new_token_ids:
                trace.times.append(now)
                trace.chunk_tokens.append(len(output.new_token_ids))
                trace.output_tokens += len(output.new_token_ids)
                trace.draft_tokens += output.num_draft_tokens
                trace.accepted_tokens += output.num_accepted_drafts
            if output.finish_reason is not None:
                trace.error = output.error
                unfinished.discard(output.request_id)
    return list(traces.values())


def _start(model: str, engine_options: dict[str, Any]) -> SyncEngine:
    from compile_and_serve.runtime.engine.client import SyncEngine
    from compile_and_serve.runtime.options import make_engine_config

    config = make_engine_config(model, skip_tokenizer_init=True, **engine_options)
    with StageDisplay() as stages:
        engine = SyncEngine(config, on_stage=stages)
    error_console().print(f"{engine.info.device}, {engine.info.dtype}, {engine.info.num_kv_blocks} KV blocks")
    return engine


def _workload(model: str, engine: SyncEngine) -> dict[str, Any]:
    return {"model": model, "device": engine.info.device, "dtype": engine.info.dtype}


def _random_prompts(generator: random.Random, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
