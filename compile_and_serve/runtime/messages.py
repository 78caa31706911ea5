"""What travels between the API process and the engine process (ZMQ, msgspec's msgpack)."""

from __future__ import annotations

from typing import Literal

import msgspec

from compile_and_serve.runtime.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorKind = Literal["invalid", "overloaded", "internal"]  # HTTP 400, 503, 500


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate. `n > 1` is fanned out into n of these by the API side; `sampling_params.n` is ignored here.

    stop_token_ids holds the request's own stop ids and, unless ignore_eos, the model's end ids.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    arrival_time: float = 0.0  # time.time() of the API process
    priority: int = 0  # lower runs first (policy "priority")
    cache_salt: str | None = None


class AddRequest(msgspec.Struct, tag="add"):
    request: EngineRequest


class AbortRequests(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="utility"):
    """A call that is answered by a `UtilityResult` with the same id: "ping", "reset_prefix_cache", "stats"."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, tag="shutdown"):
    """drain: finish what runs first (new requests are refused); otherwise everything is aborted."""

    drain: bool = True


ToEngine = AddRequest | AbortRequests | UtilityCall | Shutdown


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position. ids[0] is the chosen (or prompt) token, then the k likeliest, best first.

    logprobs: natural log, of the distribution before temperature and filters. ranks[0]: 1-based rank of the chosen token.
    """

    ids: list[int]
    logprobs: list[float]
    rank: int


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, when the prompt is done; [0] is None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token's id, where it was one of the request's own
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None  # one sentence; finish_reason is "error"
    error_kind: ErrorKind = "internal"  # with `error`: whose fault it is
    queue_seconds: float | None = None  # with the first token: arrival → first scheduled
    prefill_seconds: float | None = None  # with the first token: first scheduled → first token


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """State after a step; counters are since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0–1
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_preemptions: int = 0
    step_tokens: int = 0  # tokens of the step that this came with; 0 without one
    padded_tokens: int = 0
    steps_on_device: int = 0
    graph_replays: dict[str, int] = {}  # by mode
    host_gap_seconds: float = 0.0


class StepOutputs(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """replica: which one's step it was, where there are several (filled in by their client)."""

    outputs: list[RequestOutput] = []
    stats: EngineStats | None = None
    replica: int = 0


class UtilityResult(msgspec.Struct, tag="result", kw_only=True, omit_defaults=True):
    call_id: int
    value: dict[str, int | float | str | bool | None] = {}
    error: str | None = None


class EngineInfo(msgspec.Struct, kw_only=True):
    """Sent once, when the engine is ready; what the API side must know."""

    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    dtype: str
    device: str
    num_seats: int = 1  # sequences that run at once at most
    max_in_flight: int | None = None  # sequences that may run or wait; more are refused. None: any number
    compile_report: dict[str, int | float | str] = {}


class EngineReady(msgspec.Struct, tag="ready", kw_only=True):
    info: EngineInfo


class EngineStage(msgspec.Struct, tag="stage", kw_only=True):
    """Progress of start-up: one message when a stage ends (and "compile" one a piece)."""

    stage: str
    seconds: float
    detail: str = ""


class EngineDead(msgspec.Struct, tag="dead", kw_only=True):
    """Last words: one sentence, no stack."""

    reason: str


FromEngine = StepOutputs | UtilityResult | EngineReady | EngineStage | EngineDead
