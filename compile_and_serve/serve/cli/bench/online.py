"""`bench serve`: a load generator for any server with OpenAI's API. It sends streamed requests, or conversations of several."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compile_and_serve.serve.cli.api_keys import API_KEY_VARIABLE, hide_arguments
from compile_and_serve.serve.cli.bench.metrics import RandomRangeRatio, RequestTrace, random_lengths, report, summarize
from compile_and_serve.serve.cli.output import error_console

if TYPE_CHECKING:
    import httpx

MOSTLY_BUSY = 0.8
Conversation = tuple[Sequence[str], int]  # what a user says, turn by turn, and the tokens of each answer
_WORDS = (
    "time way year work government day man world life part house course case system place end group company party "
    "information school fact money point example state business night area water thing family head hand order side "
    "home power war service council line name body book car city community country door eye face field food"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where requests go. path: the endpoint's path below base_url. extra: fields of every request."""

    base_url: str
    path: str
    model: str
    headers: dict[bytes, bytes]
    chat: bool
    extra: dict[str, Any]


def serve_bench_command(
    base_url: Annotated[str, typer.Option(help="The server's URL without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="By default the first model that the server lists.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    num_prompts: Annotated[int, typer.Option(help="Total number of requests, or of conversations.")] = 100,
    turns: Annotated[int, typer.Option(help="Requests of a conversation. Each begins with all that was said before.")] = 1,
    request_rate: Annotated[
        float, typer.Option(help="Requests or conversations per second, a Poisson process; inf sends all at once.")
    ] = math.inf,
    max_concurrency: Annotated[int | None, typer.Option(help="Maximum number of concurrent requests, or conversations.")] = None,
    input_len: Annotated[int, typer.Option(help="Words per prompt, or turn; a word is about one token.")] = 128,
    output_len: Annotated[int, typer.Option(help="Generated tokens per request.")] = 128,
    random_range_ratio: RandomRangeRatio = 0.0,
    num_clients: Annotated[
        int | None, typer.Option(help="Processes that send the requests. By default one, and 4 with 16 CPU cores.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Send ignore_eos to get the full length. Some servers reject the field.")] = True,
    api_key: Annotated[
        str | None, typer.Option(help=f"Sent as a bearer token. By default {API_KEY_VARIABLE} from the environment.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds without data after which a request has failed.")] = 600.0,
    output_json: Annotated[Path | None, typer.Option(help="Also write the JSON line to this file.")] = None,
) -> None:
    """Send load to a running server and measure latency and throughput as its clients see them."""
    if endpoint not in ("completions", "chat"):
        raise ValueError(f"--endpoint must be completions or chat, got {endpoint!r}.")
    if not request_rate > 0:
        raise ValueError(f"--request-rate must be positive, got {request_rate}.")
    for name, value in (("num-prompts", num_prompts), ("turns", turns), ("input-len", input_len), ("output-len", output_len)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {max_concurrency}.")
    if num_clients is None:
        num_clients = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
    if num_clients < 1:
        raise ValueError(f"--num-clients must be at least 1, got {num_clients}.")
    num_clients = min(num_clients, num_prompts, max_concurrency or num_prompts)
    hide_arguments([api_key] if api_key else [])
    api_key = api_key or os.environ.get(API_KEY_VARIABLE)
    headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    target = Target(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        path="/v1/chat/completions" if endpoint == "chat" else "/v1/completions",
        model=model or _first_model(base_url.rstrip("/").removesuffix("/v1"), headers),
        headers=headers,
        chat=endpoint == "chat",
        extra={"temperature": 0.0} | ({"ignore_eos": True} if ignore_eos else {}),
    )
    generator = random.Random(seed)
    input_lens = random_lengths(generator, num_prompts * turns, input_len, random_range_ratio)
    output_lens = random_lengths(generator, num_prompts, output_len, random_range_ratio)
    prompts = [" ".join(generator.choices(_WORDS, k=length)) for length in input_lens]
    conversations = [(prompts[at * turns : (at + 1) * turns], length) for at, length in enumerate(output_lens)]
    delays = arrival_delays(random.Random(seed), num_prompts, request_rate)
    traces, seconds, busy = send_from_processes(target, conversations, delays, num_clients, max_concurrency, timeout)
    if busy > MOSTLY_BUSY:
        error_console().print(
            f"The clients were busy {busy:.0%} of the time, so that the server may be faster than the figures: use more --num-clients."
        )
    failed = [trace.error for trace in traces if trace.error is not None]
    if len(failed) == len(traces):
        raise RuntimeError(f"every request failed, the first with: {failed[0]}")
    workload = {
        "base_url": target.base_url,
        "model": target.model,
        "endpoint": endpoint,
        "num_prompts": num_prompts,
        "turns": turns,
        "request_rate": None if math.isinf(request_rate) else request_rate,
        "max_concurrency": max_concurrency,
        "input_len": input_len,
        "output_len": output_len,
        "random_range_ratio": random_range_ratio,
        "num_clients": num_clients,
        "clients_busy": round(busy, 3),
        "not_sent": num_prompts * turns - len(traces),  # after a turn that failed
        "first_error": failed[0] if failed else None,
    }
    report("serve", workload, summarize(traces, seconds), output_json)


def arrival_delays(generator: random.Random, count: int, rate: float) -> list[float]:
    """Seconds between a request and the previous one: a Poisson process of `rate` requests per second; inf: zeros."""
    return [0.0 if math.isinf(rate) else generator.expovariate(rate) for _ in range(count)]


def send_from_processes(
    target: Target,
    conversations: Sequence[Conversation],
    delays: Sequence[float],
    num_clients: int,
    max_concurrency: int | None,
    timeout: float,
) -> tuple[list[RequestTrace], float, float]:
    """Send all requests, every num_clients-th conversation from the same process.

    Returns the traces in any order, the seconds from the first request to the last token, and the share of them in which the busiest
    process computed.
    """
    due = list(itertools.accumulate(delays))
    shares = []
    for client in range(num_clients):
        concurrency = None if max_concurrency is None else len(range(client, max_concurrency, num_clients))
        shares.append((target, conversations[client::num_clients], due[client::num_clients], concurrency, timeout))
    if num_clients == 1:
        begin = time.perf_counter()
        results = [_send_share(begin, *shares[0])]
    else:
        with ProcessPoolExecutor(num_clients, mp_context=get_context("spawn"), initializer=_import_httpx) as pool:
            list(pool.map(time.sleep, [0.2] * num_clients))  # all processes are up
            begin = time.perf_counter()
            results = list(pool.map(_send_share, itertools.repeat(begin), *zip(*shares, strict=True)))
    seconds = time.perf_counter() - begin
    return [trace for own, _ in results for trace in own], seconds, max(busy for _, busy in results) / seconds


def _import_httpx() -> None:
    import httpx  # noqa: F401


def _send_share(
    begin: float, target: Target, conversations: Sequence[Conversation], due: Sequence[float], max_concurrency: int | None, timeout: float
) -> tuple[list[RequestTrace], float]:
    """A process's share: its traces and CPU seconds. due: seconds after `begin` (time.perf_counter, the same clock in all processes)."""
    before = time.process_time()
    traces = asyncio.run(send_all(target, conversations, [begin + at for at in due], max_concurrency=max_concurrency, timeout=timeout))
    return traces, time.process_time() - before


async def send_all(
    target: Target, conversations: Sequence[Conversation], due: Sequence[float], *, max_concurrency: int | None, timeout: float
) -> list[RequestTrace]:
    """Begin conversation i at due[i] (time.perf_counter), at most `max_concurrency` at a time. Returns the traces of all requests."""
    import httpx

    slots = asyncio.Semaphore(max_concurrency or len(conversations))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=target.base_url, headers=target.headers, timeout=timeout, limits=limits) as client:

        async def one(prompts: Sequence[str], max_tokens: int) -> list[RequestTrace]:
            traces: list[RequestTrace] = []
            said: list[str] = []  # by the user and the model in turns; a text's first blank separates it from the one before
            async with slots:
                for prompt in prompts:
                    said.append(f" {prompt}" if said and not target.chat else prompt)
                    trace, answer = await _send(client, target, said, max_tokens)
                    traces.append(trace)
                    if trace.error is not None:
                        break
                    said.append(answer)
            return traces

        tasks: list[asyncio.Task[list[RequestTrace]]] = []
        for conversation, at in zip(conversations, due, strict=True):
            if (left := at - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(one(*conversation)))
        return list(itertools.chain.from_iterable(await asyncio.gather(*tasks)))


async def _send(client: httpx.AsyncClient, target: Target, said: Sequence[str], max_tokens: int) -> tuple[RequestTrace, str]:
    """Send one request. → its trace and the answer's text"""
    import httpx

    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    body = {
        "model": target.model,
        **({"messages": messages} if target.chat else {"prompt": "".join(said)}),
        "max_tokens": max_tokens,
        **target.extra,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    trace = RequestTrace(sent=time.perf_counter(), prompt_tokens=sum(len(text.split()) for text in said))
    counted = False
    answer: list[str] = []
    try:
        async with client.stream("POST", target.path, json=body) as response:
            if response.status_code != 200:
                trace.error = f"HTTP {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                return trace, ""
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    trace.error = str(event["error"])[:200]
                    return trace, ""
                texts = [_texts_of(choice, chat=target.chat) for choice in event.get("choices", [])]
                answer += [content for content, _ in texts]
                if any(map(any, texts)):
                    trace.times.append(time.perf_counter())
                    trace.output_tokens += 0 if counted else 1
                if usage := event.get("usage"):
                    trace.prompt_tokens, trace.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    details = usage.get("completion_tokens_details") or {}
                    trace.accepted_tokens = details.get("accepted_prediction_tokens") or 0
                    trace.draft_tokens = trace.accepted_tokens + (details.get("rejected_prediction_tokens") or 0)
                    counted = True
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        trace.error = f"{type(error).__name__}: {error}"
    if trace.error is None and not trace.times:
        trace.error = "the stream ended without a token"
    return trace, "".join(answer)


def _texts_of(choice: dict[str, Any], *, chat: bool) -> tuple[str, str]:
    """Of a chunk: of the answer, and of the reasoning before it, which a client does not send back."""
    if chat:
        delta = choice.get("delta") or {}
        return delta.get("content") or "", delta.get("reasoning") or ""
    return choice.get("text") or "", ""


def _first_model(base_url: str, headers: dict[bytes, bytes]) -> str:
    import httpx

    try:
        response = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=30.0)
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except httpx.HTTPStatusError as error:
        raise ValueError(f"{base_url}/v1/models answered {error.response.status_code}: give --model or --api-key.") from None
    except httpx.HTTPError as error:
        raise ValueError(f"No server answers at {base_url} ({error}): start it first or give --base-url.") from None
    except (json.JSONDecodeError, LookupError, TypeError):
        raise ValueError(f"{base_url}/v1/models did not return a list of models: give --model.") from None
