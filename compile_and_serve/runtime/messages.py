"""Messages between the engine process and its clients, the API processes (sent over ZMQ, encoded by msgspec as msgpack)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from compile_and_serve.custom_ops.step_data import MediaItem, PromptContents, StepArray, StepDatum
from compile_and_serve.runtime.ledger.records import LastStep, RequestLedger, StepTotals
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.pooling_params import Pooled, PoolingInfo, PoolingParams
from compile_and_serve.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]
REPETITION = "repetition_detected"  # vLLM's `stop_reason` of the finish reason "repetition"
ErrorKind = Literal["invalid", "overloaded", "limited", "internal", "deadline"]  # HTTP 400, 503, 429, 500, 504

StepData = dict[str, StepDatum]  # what a request gives to step inputs (`TokenBatch.step_data`)

UtilityOptions = dict[str, int | str | list[str]]

StageCallback = Callable[[str, float, str], None]  # (stage, seconds, detail): a stage of the start-up has ended


def ignore_stage(stage: str, seconds: float, detail: str) -> None:
    """A `StageCallback` that does nothing."""


class Sibling(msgspec.Struct, array_like=True):
    """One more sequence of an `EngineRequest`: its id, and the seed that it draws from."""

    request_id: str
    seed: int | None = None


class Tenant(msgspec.Struct, array_like=True, frozen=True):
    """Whose a request is: an API key, and what it may use. `runtime/scheduler/fairness.py` says how keys share an engine.

    name: of the key. user: of the key; its users share what the key gets. max_running, max_waiting: sequences; None is no limit of its own.
    """

    name: str
    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    user: str | None = None


NOBODY = Tenant("")  # whose requests are those without a tenant


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A prompt, and a sequence to generate from it. A request with `n > 1` is one message with n - 1 siblings, which differ from
    the first sequence only in what `Sibling` says; the engine ignores `sampling_params.n`.

    stop_token_ids: the request's own stop ids and, unless `ignore_eos` is set, the model's end-of-sequence ids.
    pooling: of a request that ends after its prompt, with a pooled result; None generates tokens.
    step_data: what step inputs are filled from (`TokenBatch.step_data`); requests share cached prefixes only where it is equal.
    step_arrays: values for the prompt's tokens, and for the first one behind it, by name (`TokenBatch.rows_of`).
    media: what stands in the prompt beside text, with arrays of its own. Requests share cached prefixes up to where arrays or media differ.
    kv_transfer: of a request that another engine began or is to continue: vLLM's kv_transfer_params.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    arrival_time: float = 0.0  # time.time() of the API process
    held_seconds: float = 0.0  # since then, in which no replica had room for it
    priority: int = 0  # lower runs first (policy "priority")
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt
    prefix_key: str | None = None  # names whatever else the keys and values depend on, e.g. an adapter
    siblings: list[Sibling] = []
    step_data: StepData = {}
    step_arrays: dict[str, StepArray] = {}
    media: list[MediaItem] = []
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    tenant: Tenant | None = None  # None: all such requests are of one
    kv_transfer: dict[str, Any] | None = None

    @property
    def request_ids(self) -> list[str]:
        """Ids of all sequences."""
        return [self.request_id, *(sibling.request_id for sibling in self.siblings)]

    def contents(self) -> PromptContents | None:
        """What stands beside the prompt's tokens; None where there is nothing."""
        return PromptContents.of(self.media, self.step_arrays)

    def sequences(self) -> list[EngineRequest]:
        """A request for each sequence. They share the list `prompt_token_ids`."""
        requests = [msgspec.structs.replace(self, siblings=[])] if self.siblings else [self]
        for sibling in self.siblings:
            params = msgspec.structs.replace(self.sampling_params, seed=sibling.seed)
            requests.append(msgspec.structs.replace(self, request_id=sibling.request_id, sampling_params=params, siblings=[]))
        return requests


class Connect(msgspec.Struct, tag="connect"):
    """A client's first message. `EngineReady` answers it once the engine is ready."""


class AddRequest(msgspec.Struct, tag="add", omit_defaults=True):
    """Queue a request. call_id: unless 0, a `UtilityResult` says whether there is room for it."""

    request: EngineRequest
    call_id: int = 0


class AbortRequests(msgspec.Struct, tag="abort"):
    """End requests without further outputs."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="utility"):
    """Call a method of `EngineCore.utility`. A `UtilityResult` with the same `call_id` answers it. adapter: of the methods that
    load and unload one. options: of the methods that take some.
    """

    call_id: int
    method: str
    adapter: LoRARequest | None = None
    options: UtilityOptions = {}


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Stop the engine. drain: refuse new requests and finish the others first; otherwise abort everything."""

    drain: bool = True


ToEngine = Connect | AddRequest | AbortRequests | UtilityCall | Shutdown


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position.

    ids: the chosen (or prompt) token, then the k likeliest, best first. logprobs: one for each id, natural log, of the
    distribution before temperature and filters (unless --logprobs-mode says otherwise). rank: 1-based rank of ids[0].
    other_ranks: ranks of the last ids, those of `logprob_token_ids`. attention: float32 [A, R], where `aligned_rows` asks for it: what the
        token before gave each row of the encoder, by the model's alignment heads.
    """

    ids: list[int]
    logprobs: list[float]
    rank: int
    other_ranks: list[int] = []
    attention: bytes = b""

    def rank_at(self, position: int) -> int:
        """1-based rank of ids[position]."""
        from_end = position - len(self.ids) + len(self.other_ranks)
        if position == 0:
            return self.rank
        return position if from_end < 0 else self.other_ranks[from_end]


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None
    # What the step computed of them: without a token or an end, the rest is to come. The first token of the prompt has None.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: Pooled | None = None  # with the finish reason of a pooling request
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the id of the stop token, if it is one of the request's own; REPETITION
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_loaded_tokens: dict[str, int] = {}  # those among them that were loaded for this request, by tier
    error: str | None = None  # one sentence; finish_reason is "error"
    error_kind: ErrorKind = "internal"  # meaningful only with `error`
    num_draft_tokens: int = 0  # that the step checked
    num_accepted_drafts: int = 0  # that are among new_token_ids
    queue_seconds: float | None = None  # with the first token: from arrival to first scheduled
    prefill_seconds: float | None = None  # with the first token: from first scheduled to first token
    ledger: RequestLedger | None = None  # with the first token, and again with the first after a preemption
    kv_transfer: dict[str, Any] | None = None  # with the finish reason of a request that another engine continues


class TenantStats(msgspec.Struct, array_like=True):
    """A key's state after a step. served: its virtual counter, the cost of what it got divided by its weight."""

    num_running: int
    num_waiting: int
    served: float


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """State after a step. Counters start at 0 when the engine starts."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0  # that wait for any replica to have room; the client of several replicas fills it in, for replica 0
    kv_cache_usage: float = 0.0  # 0–1
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_preemptions: int = 0
    step_tokens: int = 0  # of the step that sent these stats; 0 if there was none
    padded_tokens: int = 0
    steps_on_device: int = 0
    graph_replays: dict[str, int] = {}  # mode → count
    prompt_steps: dict[str, int] = {}  # whose attention ran the prompts → steps, where the backend has several kernels
    # What the engine has still to do beside serving: "captures" of CUDA graphs, "choices" of kernels, "builds" → count; none where 0.
    pending_work: dict[str, int] = {}
    host_gap_seconds: float = 0.0
    stage_wait_seconds: float = 0.0  # in which the last stage's device waited for the stage before
    canary_checked_blocks: int = 0  # that were compared with what they held before (`EngineConfig.verify_state`)
    canary_recomputed_blocks: int = 0
    canary_findings: int = 0
    kv_tiers: dict[str, float] = {}  # of the connector: see `SchedulerConnector.stats`
    # Tokens of each expert of each layer, with `EngineConfig.expert_metrics`; empty in most steps.
    expert_tokens: list[list[int]] = []
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = []
    tenants: dict[str, TenantStats] = {}  # of keys with unfinished requests; none where requests have no tenant
    # With `SchedulerConfig.request_ledger`: totals since the start, the step that sent these stats, and "kind.reason" of misses → how many.
    steps: StepTotals | None = None
    last_step: LastStep | None = None
    misses: dict[str, int] = {}
    waiting_for: dict[str, int] = {}  # `WaitReason` → waiting requests


class StepOutputs(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """Outputs of one step for one client. num_others: unfinished sequences of the engine's other clients. replica: index of the replica
    that ran it; the client of several replicas fills it in.
    """

    outputs: list[RequestOutput] = []
    stats: EngineStats | None = None
    num_others: int = 0
    replica: int = 0


class UtilityResult(msgspec.Struct, tag="result", kw_only=True, omit_defaults=True):
    """The answer to a `UtilityCall`: a value, or one sentence in `error`."""

    call_id: int
    value: dict[str, int | float | str | bool | None] = {}
    error: str | None = None


class KVTransferInfo(msgspec.Struct, kw_only=True, frozen=True):
    """How the engine hands requests to others. fingerprint: engines take blocks from each other only where it is equal. hosts: from which
    it takes blocks; "*" among them: all. offers_early: clients may name leases of what is lent while a prompt is computed: who asks for
    blocks must know which replica computes them.
    """

    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    engine_id: str
    fingerprint: str
    hosts: list[str]
    offers_early: bool = False


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the API side must know about the engine. Sent once to each client, when the engine is ready."""

    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    dtype: str
    device: str
    max_running: int = 1  # limit of sequences that run at once
    max_sequence_len: int | None = None  # limit of prompt and output together; None is num_kv_blocks * block_size
    prefix_caching: bool = True  # whether prefixes are cached
    max_in_flight: int | None = None  # limit of sequences that run or wait; more are refused. None: no limit
    compile_report: dict[str, int | float | str] = {}
    max_logprobs: int = 20  # limit of `logprobs` and `prompt_logprobs`; -1 is no limit
    pooling: PoolingInfo | None = None  # None: the engine generates tokens
    media: MediaInfo | None = None  # None: the model reads only text
    kv_transfer: KVTransferInfo | None = None  # None: it hands no requests to others, and takes none
    max_source_len: int | None = None  # of a prompt that an encoder reads; None: the prompt is the decoder's
    decoder_start: list[int] = []  # what the decoder begins with, in place of the prompt


class EngineReady(msgspec.Struct, tag="ready", kw_only=True):
    """The engine takes requests."""

    info: EngineInfo


class EngineStage(msgspec.Struct, tag="stage", kw_only=True):
    """Progress of start-up: one message at the end of each stage, and for "compile" one for each piece."""

    stage: str
    seconds: float
    detail: str = ""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The engine process lives. turn_seconds: age of the loop's turn under way, mostly a step; 0 while it waits for messages."""

    turn_seconds: float


class EngineDead(msgspec.Struct, tag="dead", kw_only=True):
    """The engine's last message. reason: one sentence without a stack trace."""

    reason: str


FromEngine = StepOutputs | UtilityResult | EngineReady | EngineStage | Heartbeat | EngineDead
