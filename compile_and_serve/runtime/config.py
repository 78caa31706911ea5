"""Options of the engine: frozen dataclasses, made in one place from CLI flags or from `LLM(...)` arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from compile_and_serve.compiler.config import CompileConfig

CPU_TOKEN_BUDGET, CUDA_TOKEN_BUDGET = 2048, 8192
KVCacheDtype = Literal["auto", "fp8"]  # names as in vLLM
MAX_TOKEN_BUDGET = 1 << 16  # the compiler's bound of a symbolic length


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are read.

    model: what the user wrote (folder, .gguf file, known name, Hub id); path: the local folder or file that it resolved to.
    tokenizer: folder or file of another tokenizer; None: the model's own.
    dtype: "auto" is bfloat16 where the device computes in it, else float32.
    max_model_len: None: the model's own limit.
    model_impl: "auto" runs transformers' class where there is no file of ours for the architecture; "transformers" always does.
    """

    model: str
    path: Path
    tokenizer: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_model_len: int | None = None
    model_impl: Literal["auto", "transformers"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    dtype: "auto" is the model's; "fp8" is float8_e4m3fn, without scales.
    num_blocks: forced block count (tests); memory_bytes: forced size; neither: from what is free (CUDA: gpu_memory_utilization of
    the device; CPU: enough for max_num_seqs sequences of max_model_len, at most 4 GiB or a quarter of what is free).
    """

    dtype: KVCacheDtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step.

    max_num_batched_tokens: the token budget that decodes and prefill chunks share; None: by device, 2048 on the CPU.
    async_scheduling: launch a step before the result of the one before it is read; None: by device, off on the CPU.
    admit_in_groups: leave seats that become free in a full batch until several requests can take them; None: on a GPU, where requests
    come in their order of arrival.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool | None = None
    admit_in_groups: bool | None = None
    # Sequences that may wait; beyond it new ones are refused (HTTP 503). None: any number.
    max_waiting: int | None = None

    @property
    def token_budget(self) -> int:
        """Tokens of one step at most."""
        return CPU_TOKEN_BUDGET if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def max_running(self) -> int:
        """Sequences that run at once at most: each of them takes a token of every step."""
        return min(self.max_num_seqs, self.token_budget)

    @property
    def max_in_flight(self) -> int | None:
        """Sequences that may run or wait; more are refused. None: any number."""
        return None if self.max_waiting is None else self.max_running + self.max_waiting

    def for_device(self, device_type: str) -> SchedulerConfig:
        """The same with the device's values where none was given: a GPU is busy only with long steps and no waiting host."""
        budget = CUDA_TOKEN_BUDGET if device_type == "cuda" else CPU_TOKEN_BUDGET
        return replace(
            self,
            max_num_batched_tokens=budget if self.max_num_batched_tokens is None else self.max_num_batched_tokens,
            async_scheduling=device_type == "cuda" if self.async_scheduling is None else self.async_scheduling,
            admit_in_groups=(
                device_type == "cuda" and self.policy == "fcfs"
                if self.admit_in_groups is None
                else self.admit_in_groups
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Replicas, and where ranks run. (How many ranks share the model's tensors is `CompileConfig.tensor_parallel_size`.)

    data_parallel_size: replicas, each with a scheduler and a KV cache of its own; data_parallel_rank: which of them this is.
    device_index: CUDA device of a replica that is one rank, as its process numbers them; None: the current one.
    executor: who starts the ranks: "mp" child processes, "ray" a Ray cluster; None: "mp" where there is more than one rank,
    else the engine's own process is the rank.
    disable_custom_all_reduce: leave all-reduces to NCCL, also where the ranks could read each other's memory.
    """

    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    device_index: int | None = None
    executor: Literal["mp", "ray"] | None = None
    disable_custom_all_reduce: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All options of one engine. device: "auto" is CUDA where there is one."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str | None = None  # None: the first that supports the combination
    num_threads: int | None = None  # CPU threads of a rank; None: the cores, divided by ranks and replicas

    @property
    def num_ranks(self) -> int:
        """Ranks of this engine."""
        return self.compile.tensor_parallel_size

    @property
    def num_processes(self) -> int:
        """Ranks of all replicas: so many share a host's cores and memory."""
        return self.num_ranks * self.parallel.data_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank of how many. device_index: of the CUDA devices that its process sees, None: the current one. rendezvous: where
    the ranks meet, as torch.distributed's init_method; None for one alone. num_sharing: how many ranks, of all replicas, share its
    host's cores and memory; None: all of them.
    """

    index: int = 0
    size: int = 1
    device_index: int | None = None
    rendezvous: str | None = None
    num_sharing: int | None = None
