"""Options of the engine, as frozen dataclasses. CLI flags, `LLM(...)` arguments and config files are generated from the fields."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.custom_ops.device_names import is_device_name
from compile_and_serve.custom_ops.mesh import SINGLE_RANK, Coordinates, Mesh
from compile_and_serve.option_fields import at_least, json_object, option, parse_count, parse_size
from compile_and_serve.runtime.eplb_config import ExpertBalanceConfig
from compile_and_serve.runtime.kv_config import KVEventsConfig, KVTransferConfig
from compile_and_serve.runtime.speculative_config import SpeculativeConfig

CPU_TOKEN_BUDGET, CUDA_TOKEN_BUDGET = 2048, 8192
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
RunnerKind = Literal["auto", "generate", "pooling"]
PoolingType = Literal["last", "mean", "cls", "max"]
KVCacheDtype = Literal["auto", "model", "fp8", "int8"]
StateDtype = Literal["auto", "float32", "bfloat16", "float16"]
MIN_DRAFTED_ROWS = 512  # that steps with drafts have room for, however few sequences may run
MAX_TOKEN_BUDGET = 1 << 16  # the compiler's bound on a symbolic length


def _count_or_auto(text: str) -> int | None:
    return None if text.strip().lower() in ("auto", "-1") else parse_count(text)


def read_media_limits(given: Mapping[str, Any] | str) -> dict[str, int]:
    """The value of limit_mm_per_prompt. Raises `ValueError` for anything but counts of images, videos and audio."""
    found = json_object("limit_mm_per_prompt")(given)
    found = {kind: count.get("count", count) if isinstance(count, Mapping) else count for kind, count in found.items()}  # as in vLLM
    for kind, count in found.items():
        if kind not in ("image", "video", "audio") or not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"limit_mm_per_prompt takes numbers for image, video and audio, got {kind!r:.50}: {count!r:.50}.")
    return found


def available_host_bytes() -> int:
    """Bytes of the host's memory that programs may still take."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (available := re.search(r"^MemAvailable:\s*(\d+)", meminfo.read_text(), re.MULTILINE)):
        return int(available[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def offloading_bytes(given: float | str | None) -> int | None:
    """Bytes of so many GiB, or of "auto": a quarter of the host's free memory. Raises `ValueError`."""
    if given is None:
        return None
    if given == "auto":
        return available_host_bytes() // 4
    try:
        gib = float(given)
    except ValueError:
        raise ValueError(f"kv_offloading_size must be a number of GiB or auto, got {given!r:.50}.") from None
    if not 0.0 < gib < math.inf:
        raise ValueError(f"kv_offloading_size must be above 0 GiB, got {given!r:.50}.")
    return int(gib * (1 << 30))


_model_option, _cache_option = partial(option, panel="Model"), partial(option, panel="KV cache and prefix cache")
_scheduler_option, _lora_option = partial(option, panel="Scheduler"), partial(option, panel="LoRA")
_media_option = partial(option, panel="Images, videos and audio")
_parallel_option, _device_option = partial(option, panel="Ranks and replicas"), partial(option, panel="Device")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model, and how its weights are read.

    model: what the user wrote (folder, .gguf file, known name or Hub id). path: the local folder or file it resolved to.
    model_impl: "auto" runs transformers' class if this project has no file for the architecture; "transformers" always.
    merge_lora: the folder of an adapter that is merged into the weights.
    hf_overrides: fields that replace those of the model's config.json.
    skip_tokenizer_init: load no tokenizer; prompts are token ids.
    """

    model: str
    path: Path
    revision: str | None = _model_option(None, "Branch, tag or commit of a model on the Hugging Face Hub.")
    download_dir: Path | None = _model_option(None, "Folder for models of the Hugging Face Hub. By default the Hub's own cache.")
    tokenizer: str | None = _model_option(None, "Folder or file of a tokenizer other than the model's.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _model_option(
        "auto", "auto: bfloat16 if the device has instructions for it, else float32; float32 for a GGUF file on the CPU."
    )
    hf_overrides: Mapping[str, Any] | None = _model_option(
        None,
        "Fields that replace those of the model's config.json, e.g. '{\"rope_theta\": 1000000}', or --hf-overrides.rope_theta 1000000.",
        metavar="JSON",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
        convert=json_object("hf_overrides"),
    )
    max_model_len: int | None = _model_option(
        None,
        "Longest sequence in tokens, prompt and output together, e.g. 8192 or 32K. By default, and for auto, the model's own limit.",
        metavar="TOKENS",
        flag_type=str,
        parse=_count_or_auto,
        checks=(at_least(1),),
    )
    model_impl: Literal["auto", "transformers"] = _model_option(
        "auto", "transformers: use the transformers package's class. auto: only for models without a native implementation."
    )
    runner: RunnerKind = _model_option(
        "auto", "generate: text. pooling: embeddings or class scores. auto: pooling for checkpoints that are meant for it."
    )
    pooling_type: PoolingType | None = _model_option(
        None,
        "Which hidden states make an embedding: the last token's, the mean, the first token's, or the largest of each feature. By default "
        "what the checkpoint's sentence-transformers files say, else what the model does: decoders the last, encoders the mean.",
    )
    max_logprobs: int = _model_option(
        20,
        "Most log-probabilities per token that a request may ask for; -1: the whole vocabulary, which takes much time and memory.",
        checks=((lambda count: count >= -1, "-1 (the whole vocabulary) or at least 0"),),
    )
    logprobs_mode: LogprobsMode = _model_option(
        "raw_logprobs", "raw: before penalties, temperature and filters. processed: after them. logits: not normalized."
    )
    mm_processor_kwargs: Mapping[str, Any] | None = _media_option(
        None,
        "Settings that replace those of the checkpoint's image processor, e.g. '{\"max_pixels\": 1003520}'. Requests may set lower ones.",
        metavar="JSON",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
        convert=json_object("mm_processor_kwargs"),
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = _media_option(
        None,
        'Most images, videos and audio of a prompt, e.g. \'{"image": 4, "video": 1, "audio": 2}\'. By default 64, 8 and 16.',
        metavar="JSON",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
        convert=read_media_limits,
    )
    enable_mm_embeds: bool = _media_option(
        False, "Let requests bring rows of the encoder in place of images (image_embeds), as files of torch.save or safetensors."
    )
    allowed_media_domains: tuple[str, ...] = _media_option(
        (),
        "Host from which images, videos and audio may be downloaded (repeatable), or '*' for all with public addresses. A private address "
        "must be named itself. By default none: requests must hold the data.",
    )
    max_audio_seconds: float | None = _media_option(
        None,
        "Longest audio that a request may have, in seconds. By default 600 in prompts, and 3600 in transcriptions. What the model's "
        "processor takes may be less.",
        metavar="SECONDS",
        checks=((lambda seconds: seconds is None or 0 < seconds < math.inf, "above 0"),),
    )
    load_format: Literal["auto", "dummy"] = _model_option("auto", "dummy: random weights; only the config is read.")
    merge_lora: Path | None = _lora_option(
        None,
        "A LoRA adapter's folder. It is merged into the weights while they are loaded: all requests use it, and it costs nothing. Not for "
        "quantized weights.",
    )
    skip_tokenizer_init: bool = _model_option(False, None)
    seed: int = _model_option(0, "Seed of sampling and of dummy weights.")
    trust_remote_code: bool = _model_option(
        False,
        "Run Python files of the model's folder that its config.json and tokenizer_config.json name (auto_map), where neither this project "
        "nor transformers has the class. The log names them. They can do all that you can: read them first.",
    )

    @property
    def code_folder(self) -> Path | None:
        """The folder whose own classes may run; None: no code of a folder is run."""
        return self.path if self.trust_remote_code and self.path.is_dir() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    dtype: "fp8" has the checkpoint's scales, if any; "auto" is "fp8" or "int8" for a checkpoint that is made for it, else "model".
    num_blocks, memory_bytes: a fixed size. If both are None, the size follows from the free memory. CUDA: what the model leaves of
        `gpu_memory_utilization` (0 to 1) of the device. CPU: enough for max_num_seqs sequences of max_model_len tokens, but at most
        4 GiB and a quarter of the free memory.
    connector: what loads and stores blocks; a name as of `connector_of`. None: the tiers of `offloading_bytes` and `offload_dir`, if any.
    """

    dtype: KVCacheDtype = _cache_option(
        "auto",
        "model: the model's dtype. fp8: float8_e4m3, which doubles the tokens in the same memory. int8: with a scale for each "
        "token and head. auto: the checkpoint's choice.",
        name="kv_cache_dtype",
    )
    state_dtype: StateDtype = _cache_option("auto", "Dtype of recurrent state. auto: the model's choice, which is float32 if it has none.")
    block_size: int | None = _cache_option(None, "Tokens per KV block. By default 16, or 64 for FlashMLA.", checks=(at_least(1),))
    num_blocks: int | None = _cache_option(
        None, "Number of KV blocks, also on the CPU.", name="num_kv_blocks", flags=("--num-gpu-blocks-override",), checks=(at_least(1),)
    )
    memory_bytes: int | None = _cache_option(
        None,
        "Memory for the KV cache, e.g. 2GiB.",
        name="kv_cache_memory_bytes",
        flags=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        metavar="SIZE",
        flag_type=str,
        parse=parse_size,
        checks=(at_least(1),),
    )
    gpu_memory_utilization: float = _cache_option(
        0.9, "Share of the GPU's memory that the engine may use.", checks=((lambda share: 0.0 < share <= 1.0, "in (0, 1]"),)
    )
    enable_prefix_caching: bool = _cache_option(True, "Reuse the KV blocks of equal prompt prefixes.")
    offloading_bytes: int | None = _cache_option(
        None,
        "GiB of host memory, over all ranks, that keep what the device's KV cache loses; auto: a quarter of the memory that is free. By "
        "default none.",
        name="kv_offloading_size",
        metavar="GIB",
        argument_type=float | str | None,
        flag_type=str,
        convert=offloading_bytes,
    )
    offload_dir: Path | None = _cache_option(
        None,
        "Folder that keeps what requests leave in the KV cache, also for the next start and for other engines. Only your user can read it.",
        name="kv_offload_dir",
    )
    offload_dir_bytes: int = _cache_option(
        64 << 30,
        "Limit of that folder; the least recently used files give way.",
        name="kv_offload_dir_size",
        metavar="SIZE",
        flag_type=str,
        flag_default="64GiB",
        parse=parse_size,
        checks=(at_least(1),),
    )
    connector: str | None = _cache_option(None, None, name="kv_connector")

    @property
    def tokens_per_block(self) -> int:
        """`block_size`; where it is None, the default, until the model is loaded (`with_block_size`)."""
        return self.block_size or 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue. `for_device` replaces None.

    admit_in_groups: leave batch slots that become free in a full batch empty until several requests can take them; None is
    True on CUDA with the policy "fcfs".
    """

    max_num_seqs: int = _scheduler_option(256, "Maximum number of sequences per step.", checks=(at_least(1),))
    max_num_batched_tokens: int | None = _scheduler_option(
        None,
        "Maximum number of tokens per step, decodes and prefill chunks together. By default 2048 on the CPU and 8192 on CUDA.",
        metavar="TOKENS",
        flag_type=str,
        parse=parse_count,
        checks=(at_least(1), (lambda count: count <= MAX_TOKEN_BUDGET, f"at most {MAX_TOKEN_BUDGET}")),
    )
    max_encoder_tokens: int | None = _scheduler_option(
        None,
        "Maximum number of tokens of images and other media that a step encodes, of a model with an encoder. By default as many as "
        "--max-num-batched-tokens, and at least those of the largest item.",
        metavar="TOKENS",
        flag_type=str,
        parse=parse_count,
        checks=(at_least(1), (lambda count: count <= MAX_TOKEN_BUDGET, f"at most {MAX_TOKEN_BUDGET}")),
    )
    request_ledger: bool = _scheduler_option(
        True, "Note what became of each request: what it waited for, what it computed and reused, and why not more."
    )
    policy: Literal["fcfs", "priority"] = _scheduler_option(
        "fcfs",
        "fcfs: in order of arrival; requests with a priority are refused. priority: lower numbers run first.",
        name="scheduling_policy",
    )
    async_scheduling: bool | None = _scheduler_option(
        None, "Schedule a step while the previous one runs. By default on with CUDA and off on the CPU."
    )
    admit_in_groups: bool | None = None
    max_waiting: int | None = _scheduler_option(
        None, "Maximum number of waiting requests; further ones get HTTP 503. By default there is no limit.", checks=(at_least(0),)
    )

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

    def for_device(self, *, is_asynchronous: bool, longest_whole_prompt: int | None = None) -> SchedulerConfig:
        """A copy in which the device's defaults replace None. An asynchronous device, a GPU, needs long steps and must not wait.

        longest_whole_prompt: tokens of the longest prompt of a model whose prompts are not cut; None: they may be. Raises `ValueError` if
        the steps that were asked for have no room for it.
        """
        budget = self.max_num_batched_tokens
        if budget is not None and longest_whole_prompt is not None and budget < longest_whole_prompt:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, but the model reads prompts of up to {longest_whole_prompt} tokens in one step: "
                "raise --max-num-batched-tokens or lower --max-model-len."
            )
        if budget is None:
            budget = max(longest_whole_prompt or 1, CUDA_TOKEN_BUDGET if is_asynchronous else CPU_TOKEN_BUDGET)
        return replace(
            self,
            max_num_batched_tokens=budget,
            async_scheduling=is_asynchronous if self.async_scheduling is None else self.async_scheduling,
            # A model whose prompts are not cut has no decodes that a prompt could hold up.
            admit_in_groups=(
                is_asynchronous and self.policy == "fcfs" and longest_whole_prompt is None
                if self.admit_in_groups is None
                else self.admit_in_groups
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Replicas, and where ranks run. (`CompileConfig.mesh` has the ranks that share a model.)

    data_parallel_rank: this replica's index. num_servers: servers like this one, itself included, that share the host.
    device_index: CUDA device of a replica with a single rank, as its process numbers them; None is the current device.
    executor: None is "mp" for several ranks; a single rank then runs in the engine's process.
    num_hosts, host_rank, master_addr, master_port, master_key_file: see `runtime/distributed/hosts.py`.
    """

    data_parallel_size: int = _parallel_option(
        1,
        "Number of replicas of the model, each with its own ranks, scheduler and KV cache (for serve and LLM).",
        flags=("--data-parallel-size", "-dp"),
        checks=(at_least(1),),
    )
    data_parallel_rank: int = 0
    num_servers: int = 1
    device_index: int | None = None
    executor: Literal["mp", "ray"] | None = _parallel_option(
        None, "How ranks are started. mp: as child processes; ray: on a Ray cluster. By default mp.", name="distributed_executor_backend"
    )
    num_hosts: int = _parallel_option(
        1,
        "Number of hosts that the stages of the model are divided over, the same on each.",
        name="nnodes",
        flags=("--nnodes", "-n"),
        checks=(at_least(1),),
    )
    host_rank: int = _parallel_option(
        0,
        "This host's number. The engine and the server run on host 0; the others get --headless.",
        name="node_rank",
        flags=("--node-rank", "-r"),
        checks=(at_least(0),),
    )
    master_addr: str = _parallel_option("127.0.0.1", "Address of host 0, on which it listens for the others.")
    master_port: int = _parallel_option(29501, "Port of host 0 where the hosts meet.", checks=(at_least(1),))
    master_key_file: Path | None = _parallel_option(
        None, "File with a secret that all hosts share, at least 16 bytes. Several hosts need it.", flag_type=str
    )
    enable_elastic_ep: bool = _parallel_option(
        False, "Let the number of data-parallel groups that share experts be changed while serving, by /scale_elastic_ep."
    )
    disable_custom_all_reduce: bool = _parallel_option(False, "Use NCCL for all-reduces even if the ranks can access each other's memory.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All options of one engine.

    attention_backend: None is the first one that supports the model, the device and the dtype.
    enable_lora: without it, `make_engine_config` sets `compile.max_loras` to 0.
    speculative: None: one token of a sequence per step. drafter_path: local files of `speculative.model`.
    kv_events: None: none are published. kv_transfer: None: no request goes to another engine.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    verify_state: bool = _device_option(
        False,
        "Check random blocks of the KV cache, snapshots of recurrent state and block tables while the engine runs. What was "
        "overwritten ends the requests that hold it, with a sentence.",
    )
    enable_lora: bool = _lora_option(False, "Let requests use LoRA adapters.")
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: str = _device_option(
        "auto",
        "auto: CUDA if there is a CUDA device, else CPU. NAME: of a plug-in's platform.",
        metavar="auto|cpu|cuda|NAME",
        checks=((is_device_name, "one of auto, cpu, cuda, or a plug-in's platform"),),
    )
    attention_backend: str | None = _device_option(None, "By default the first one that supports the model and the device.")
    num_threads: int | None = _device_option(
        None,
        "CPU threads per rank, of which fewer run while other processes compute. By default OMP_NUM_THREADS, or the rank's share of the "
        "cores.",
        checks=(at_least(1),),
    )
    max_cpu_loras: int | None = _lora_option(None, "Adapters kept in host memory. By default --max-loras.")
    speculative: SpeculativeConfig | None = _scheduler_option(
        None,
        'Speculative decoding, as JSON with vLLM\'s keys, such as {"method": "ngram", "num_speculative_tokens": 5}.',
        name="speculative_config",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
    )
    drafter_path: Path | None = None
    kv_events: KVEventsConfig | None = _cache_option(
        None,
        "Publish over ZMQ which blocks are cached, for routers, as JSON with vLLM's keys, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}. Events contain the tokens of prompts.',
        name="kv_events_config",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
    )
    kv_transfer: KVTransferConfig | None = _cache_option(
        None,
        "Hand prompts that this engine has computed to other engines, or continue those of others, as JSON with vLLM's keys, such as "
        '{"kv_connector": "auto", "kv_role": "kv_both"}: see docs/disaggregation.md.',
        name="kv_transfer_config",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
    )
    expert_metrics: bool = _model_option(False, "Show the tokens of each expert of each layer under /metrics.")
    enable_eplb: bool = _parallel_option(
        False, "With --enable-expert-parallel: move and copy experts between ranks, so that all have about as many tokens."
    )
    expert_balance: ExpertBalanceConfig | None = _parallel_option(
        None,
        'When experts move, as JSON with vLLM\'s keys, such as {"step_interval": 3000, "num_redundant_experts": 16}.',
        name="eplb_config",
        argument_type=Mapping[str, Any] | str | None,
        flag_type=str,
    )

    @property
    def max_drafted_rows(self) -> int:
        """The most rows of logits, one per sequence and draft token, of a step with drafts: they take memory."""
        return min(self.scheduler.token_budget, max(self.scheduler.max_num_seqs, MIN_DRAFTED_ROWS))

    @property
    def mesh(self) -> Mesh:
        """The ranks of this engine."""
        return self.compile.mesh

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be launched before the result of the oldest is known: one for each stage, and one ahead of them."""
        return self.mesh.pipe + (self.scheduler.async_scheduling is not False)

    @property
    def num_processes(self) -> int:
        """Number of ranks of all replicas and servers. On a single host they share its cores and memory."""
        return self.mesh.size * self.parallel.data_parallel_size * self.parallel.num_servers


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank of the mesh.

    device_index: CUDA device, as the rank's process numbers them; None is the current device.
    rendezvous: where the ranks find each other, as torch.distributed's init_method; None for a single rank.
    num_sharing: ranks, of all replicas, that share the cores and memory of this rank's host; None is all of them.
    """

    index: int = 0
    mesh: Mesh = SINGLE_RANK
    device_index: int | None = None
    rendezvous: str | None = None
    num_sharing: int | None = None

    @property
    def coordinates(self) -> Coordinates:
        """Where the rank lies in the mesh."""
        return self.mesh.coordinates(self.index)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.mesh.size == 1

    @property
    def answers(self) -> bool:
        """Whether the engine takes the steps' results of the rank's data group from this rank."""
        return self.index in self.mesh.answering_ranks
