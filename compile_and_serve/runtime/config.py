"""Options of the engine, as frozen dataclasses. `options.py` makes them from CLI flags or `LLM(...)` arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.runtime.pooling_params import PoolingType

CPU_TOKEN_BUDGET, CUDA_TOKEN_BUDGET = 2048, 8192
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
RunnerKind = Literal["auto", "generate", "pooling"]
KVCacheDtype = Literal["auto", "model", "fp8", "int8"]
MIN_DRAFTED_ROWS = 512  # that steps with drafts have room for, however few sequences may run
MAX_TOKEN_BUDGET = 1 << 16  # the compiler's bound on a symbolic length


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model, and how its weights are read.

    model: what the user wrote (folder, .gguf file, known name or Hub id). path: the local folder or file it resolved to.
    tokenizer: folder or .gguf file of another tokenizer; None is the model's own.
    dtype: "auto" is bfloat16 if the device computes in it, else float32.
    max_model_len: limit of prompt and completion together, in tokens; None is the model's own limit.
    model_impl: "auto" runs transformers' class if this project has no file for the architecture; "transformers" always.
    load_format: "dummy" makes random weights, for which the config is enough.
    skip_tokenizer_init: load no tokenizer; prompts are token ids.
    seed: of the engine's random generator and of dummy weights.
    runner: "generate" computes tokens, "pooling" embeddings or class scores; "auto" is what the checkpoint is meant for.
    max_logprobs: limit of the log-probabilities that a request may ask for per token; -1 is the whole vocabulary.
    logprobs_mode: "raw" is before penalties, temperature and filters, "processed" after them; "logits" are not normalized.
    pooling_type: which hidden states make an embedding; None is what the checkpoint says, else the last token's.
    """

    model: str
    path: Path
    tokenizer: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = None
    model_impl: Literal["auto", "transformers"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    seed: int = 0
    runner: RunnerKind = "auto"
    pooling_type: PoolingType | None = None
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    dtype: "model" is the model's dtype; "fp8" is float8_e4m3fn, with the checkpoint's scales if it has any; "int8" has a scale for
        each token and head; "auto" is "fp8" or "int8" for a checkpoint that is made for it, else "model".
    block_size: tokens per block.
    num_blocks: fixed number of blocks (for tests). memory_bytes: fixed size. If both are None, the size follows from the
    free memory. CUDA: what the model leaves of `gpu_memory_utilization` (0 to 1) of the device. CPU: enough for
    max_num_seqs sequences of max_model_len tokens, but at most 4 GiB and a quarter of the free memory.
    enable_prefix_caching: reuse the blocks of equal prompt prefixes.
    """

    dtype: KVCacheDtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue. `for_device` replaces None.

    max_num_seqs: sequences that run at once.
    max_num_batched_tokens: token budget of a step, shared by decodes and prefill chunks; None is 8192 on CUDA, 2048 on the
    CPU.
    policy: order of waiting requests: "fcfs" by arrival, "priority" by priority.
    async_scheduling: launch a step before the result of the previous one is read; None is True on CUDA, False on the CPU.
    admit_in_groups: leave batch slots that become free in a full batch empty until several requests can take them; None is
    True on CUDA with the policy "fcfs".
    max_waiting: sequences that may wait; more are refused (HTTP 503). None is no limit.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool | None = None
    admit_in_groups: bool | None = None
    max_waiting: int | None = None

    @property
    def token_budget(self) -> int:
        """Upper limit of the tokens of one step."""
        return CPU_TOKEN_BUDGET if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def max_running(self) -> int:
        """Limit of the sequences that run at once: each needs at least one token of the budget in every step."""
        return min(self.max_num_seqs, self.token_budget)

    @property
    def max_in_flight(self) -> int | None:
        """Limit of the sequences that run or wait; more are refused. None is no limit."""
        return None if self.max_waiting is None else self.max_running + self.max_waiting

    def for_device(self, *, is_asynchronous: bool) -> SchedulerConfig:
        """A copy in which the device's defaults replace None. An asynchronous device, a GPU, needs long steps and must not wait."""
        budget = CUDA_TOKEN_BUDGET if is_asynchronous else CPU_TOKEN_BUDGET
        return replace(
            self,
            max_num_batched_tokens=budget if self.max_num_batched_tokens is None else self.max_num_batched_tokens,
            async_scheduling=is_asynchronous if self.async_scheduling is None else self.async_scheduling,
            admit_in_groups=(is_asynchronous and self.policy == "fcfs" if self.admit_in_groups is None else self.admit_in_groups),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Replicas, and where ranks run. (`CompileConfig.tensor_parallel_size` is the number of ranks that share a model.)

    data_parallel_size: number of replicas, each with its own scheduler and KV cache. data_parallel_rank: this replica's
    index.
    device_index: CUDA device of a replica with a single rank, as its process numbers them; None is the current device.
    executor: "mp" runs the ranks in child processes, "ray" on a Ray cluster. None is "mp" for several ranks; a single rank
    then runs in the engine's process.
    disable_custom_all_reduce: use NCCL for all-reduces even if the ranks can read each other's memory.
    """

    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    device_index: int | None = None
    executor: Literal["mp", "ray"] | None = None
    disable_custom_all_reduce: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted. The names are vLLM's.

    method: the name of a registered `DraftMethod`. model: the drafter: a folder, a .gguf file, a known name or a Hub id.
    num_speculative_tokens: the most draft tokens of a sequence in one step.
    prompt_lookup_min, prompt_lookup_max: lengths of the suffixes that ngram looks up, the longest first; None: 3 and 5. If only one is
    given, it is both.
    suffix_decoding_max_tree_depth: the longest suffix that is compared, in tokens. suffix_decoding_max_cached_requests: how many past
    outputs are kept; 0: none. suffix_decoding_max_spec_factor: draft tokens per matched token.
    suffix_decoding_min_token_prob: drafts end where their estimated probability falls below it.
    disable_by_batch_size: no drafts while at least this many sequences decode; None: measured step times decide alone.
    synthetic_acceptance_rate: for benchmarks with random weights. There is a draft for every token, and each is accepted with this
    probability, given the one before it, whatever the model says. How many are checked is decided as usual. The output is meaningless.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    disable_by_batch_size: int | None = None
    synthetic_acceptance_rate: float | None = None

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """Shortest and longest suffix that ngram looks up."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None and longest is None:
            return 3, 5
        return shortest or longest or 0, longest or shortest or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All options of one engine.

    device: "auto" is CUDA if there is a CUDA device, else the CPU.
    attention_backend: None is the first one that supports the model, the device and the dtype.
    num_threads: CPU threads of a rank; None divides the cores among all ranks and replicas.
    max_cpu_loras: LoRA adapters in host memory; None is as many as on the device (`CompileConfig.max_loras`).
    speculative: how tokens are drafted; None: one token of a sequence per step. drafter_path: local files of `speculative.model`.
    expert_metrics: count the tokens of each expert of each layer.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str | None = None
    num_threads: int | None = None
    max_cpu_loras: int | None = None
    speculative: SpeculativeConfig | None = None
    drafter_path: Path | None = None
    expert_metrics: bool = False

    @property
    def max_drafted_rows(self) -> int:
        """The most rows of logits, one per sequence and draft token, of a step with drafts: they take memory."""
        return min(self.scheduler.token_budget, max(self.scheduler.max_num_seqs, MIN_DRAFTED_ROWS))

    @property
    def rank_groups(self) -> dict[str, list[list[int]]]:
        """By name, how the groups of this name divide the engine's ranks."""
        return {"tensor": [list(range(self.num_ranks))]}

    @property
    def num_ranks(self) -> int:
        """Number of ranks of this engine."""
        return self.compile.tensor_parallel_size

    @property
    def num_processes(self) -> int:
        """Number of ranks of all replicas. On a single host they share its cores and memory."""
        return self.num_ranks * self.parallel.data_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank of `size`.

    device_index: CUDA device, as the rank's process numbers them; None is the current device.
    rendezvous: where the ranks find each other, as torch.distributed's init_method; None for a single rank.
    num_sharing: ranks, of all replicas, that share the cores and memory of this rank's host; None is all of them.
    """

    index: int = 0
    size: int = 1
    device_index: int | None = None
    rendezvous: str | None = None
    num_sharing: int | None = None
