"""What becomes of each flag of vLLM that this project does not have itself, or whose values it spells in another way.

mapped: it becomes flags of ours. ignored: it has no effect here, for a reason that the log gives. refused: it would change what clients
get or what fits into memory, and cannot be honoured; vLLM's default is accepted. A flag that is not listed is one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compile_and_serve.serve.cli.vllm import mapping
from compile_and_serve.serve.cli.vllm.mapping import Mapped

Outcome = Literal["same", "mapped", "ignored", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What becomes of a flag. text: what it becomes, or why it is ignored or refused, without a full stop.

    to: of a mapped flag, its values → our arguments. A switch has the value "on" or "off". accepts: values of a refused flag that ask
    for what happens anyway, besides vLLM's default.
    """

    outcome: Outcome
    text: str
    to: Callable[[Sequence[str]], Mapped] | None = None
    accepts: frozenset[str] = frozenset()


SAME = Decision(outcome="same", text="")


def _ignored(reason: str, names: str) -> dict[str, Decision]:
    return dict.fromkeys(names.split(), Decision(outcome="ignored", text=reason))


def _refused(reason: str, names: str, accepts: Iterable[str] = ()) -> dict[str, Decision]:
    return dict.fromkeys(names.split(), Decision(outcome="refused", text=reason, accepts=frozenset(accepts)))


def _mapped(name: str, text: str, to: Callable[[Sequence[str]], Mapped]) -> dict[str, Decision]:
    return {name: Decision(outcome="mapped", text=text, to=to)}


def _renamed(name: str, ours: str) -> dict[str, Decision]:
    return _mapped(name, ours, mapping.renamed(ours))


def _words(name: str, words: Mapping[str, str], text: str) -> dict[str, Decision]:
    """A flag that we have too, with other words for some values."""
    return _mapped(name, text, mapping.words(name, words))


_ONE_HOST = "the replicas of this server run on one host (or a Ray cluster) behind one port"
_MULTIMODAL = "threads of the server prepare images, videos and audio, and each rank runs the encoder whole"
_KERNELS = "the kernels are chosen by measuring them; --force-pass and --disable-pass choose otherwise"
_RECURRENT = "the dtype of recurrent state is --state-dtype"
_OBSERVED = "/metrics and the log show what there is"
_OFFLOAD = "weights stay on the device"
_PLUGIN = "a parser of your own is an entry point's name or module:Class, given with --tool-call-parser or --reasoning-parser"
_SAFETENSORS = "weights are streamed from memory-mapped files"
_LOAD_BALANCING = "the server spreads requests over its replicas itself"

DECISIONS: Mapping[str, Decision] = {
    # The model
    **_mapped("--model", "the argument MODEL", mapping.model),
    **_words("--runner", {}, "generate, pooling, auto; draft is refused"),
    **_mapped("--convert", "embed, classify: --runner pooling", mapping.convert),
    **_mapped("--task", "generate: --runner generate; others: --runner pooling", mapping.task),
    **_words("--dtype", {"half": "float16", "float": "float32"}, "half and float are float16 and float32"),
    **_words("--load-format", {"hf": "auto", "safetensors": "auto", "gguf": "auto"}, "safetensors, hf, gguf: auto"),
    **_words("--model-impl", {"vllm": "auto"}, "vllm: auto"),
    **_mapped("--pooler-config", "--pooling-type", mapping.pooler_config),
    **_mapped("--override-pooler-config", "--pooling-type", mapping.pooler_config),
    **_mapped("--rope-scaling", "--hf-overrides", mapping.override("rope_scaling")),
    **_mapped("--rope-theta", "--hf-overrides", mapping.override("rope_theta")),
    **_refused("the files must be beside the model's: copy config.json there, or use --hf-overrides", "--hf-config-path"),
    **_refused("the format is found by itself", "--config-format", ("hf", "gguf")),
    **_refused("the tokenizer is the model's, or the files of --tokenizer", "--tokenizer-mode", ("hf", "fast", "slow")),
    **_refused("give a local folder with --tokenizer", "--tokenizer-revision"),
    **_ignored("the code of a model is that of --revision", "--code-revision"),
    **_refused("the package huggingface_hub takes it from the environment variable HF_TOKEN", "--hf-token"),
    **_refused("classes of models are registered by plug-ins", "--model-class-overrides"),
    **_refused("only LLM(…) works without a tokenizer", "--skip-tokenizer-init"),
    **_refused("attention follows the model's config", "--disable-sliding-window"),
    **_refused("prompts are text or token ids", "--enable-prompt-embeds"),
    **_refused("logits are changed by the fields of requests only", "--logits-processors --logits-processor-pattern"),
    **_refused("plug-ins are models, platforms, passes, parsers and checkpoint formats", "--io-processor-plugin"),
    **_refused("answers have no field for it", "--return-sampling-mask --enable-return-routed-experts --aux-output-config"),
    **_ignored("the sampler needs no such variant", "--use-fp64-gumbel --enable-trace-replay --disable-cascade-attn"),
    **_ignored(
        "every server can sleep; the routes need --enable-admin-routes",
        "--enable-sleep-mode --sleep-mode-backend --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names "
        "--enable-cumem-allocator --enable-nccl-comm-suspend",
    ),
    **_ignored("chat templates are rendered in processes of their own", "--renderer-num-workers --tokenizer-pool-size"),
    **_ignored("tokenizing has no pool", "--tokenizer-pool-type"),
    **_ignored(
        _SAFETENSORS,
        "--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size --model-loader-extra-config "
        "--pt-load-map-location --max-parallel-loading-workers",
    ),
    **_ignored("only files that the model needs are downloaded, and a line says what was loaded", "--ignore-patterns --use-tqdm-on-load"),
    # Quantization
    **_refused("the scheme is a name, for --quantization", "--quantization-config"),
    **_ignored("no format is deprecated here", "--allow-deprecated-quantization"),
    **_ignored("scales of the KV cache come from the checkpoint, or are of a token and head", "--calculate-kv-scales"),
    **_refused("adapters are loaded with --enable-lora", "--qlora-adapter-name-or-path"),
    # Ranks
    **_words("--distributed-executor-backend", {"uni": "mp"}, "uni: mp"),
    **_renamed("--worker-use-ray", "--distributed-executor-backend=ray"),
    **_renamed("--engine-use-ray", "--distributed-executor-backend=ray"),
    **_refused("the context of a sequence stays on one rank's device", "--decode-context-parallel-size --prefill-context-parallel-size"),
    **_ignored(
        "there is no context parallelism",
        "--dcp-comm-backend --dcp-q-replicate --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --enable-hc-sp",
    ),
    **_ignored(_ONE_HOST, "--data-parallel-address --data-parallel-rpc-port"),
    **_refused("set CUDA_VISIBLE_DEVICES", "--device-ids"),
    **_refused(_LOAD_BALANCING, "--data-parallel-rank --data-parallel-start-rank --data-parallel-size-local"),
    **_refused(_LOAD_BALANCING, "--data-parallel-hybrid-lb --data-parallel-external-lb"),
    **_refused("replicas are child processes", "--data-parallel-backend"),
    **_ignored(_LOAD_BALANCING, "--dp-sync-interval --disable-nccl-for-dp-synchronization"),
    **_ignored("a rank reads its own experts alone", "--enable-ep-weight-filter"),
    **_ignored("tokens of data-parallel groups are gathered", "--all2all-backend"),
    **_ignored("experts are placed in order, and --enable-eplb moves them", "--expert-placement-strategy"),
    **_ignored("nothing is reserved for ranks that may come", "--elastic-ep-max-dp-size"),
    **_ignored(
        "steps are not divided into micro-batches", "--enable-dbo --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold"
    ),
    **_ignored("ranks exchange what a step needs through shared memory", "--enable-shm-tensor-arena --enable-batch-sharded-sampling"),
    **_ignored("the operating system places threads; --num-threads sets their number", "--numa-bind --numa-bind-nodes --numa-bind-cpus"),
    **_ignored("a rank that is silent ends the server within seconds", "--distributed-timeout-seconds --cpu-distributed-timeout-seconds"),
    **_ignored("a server whose engine died ends with status 1", "--enable-fault-tolerance --fault-tolerance-config --watchdog-config"),
    **_ignored("profiling is --profile-pieces, and --profile-dir with /start_profile", "--ray-workers-use-nsight --profiler-config"),
    **_refused("there is one kind of worker and of scheduler", "--worker-cls --worker-extension-cls --scheduler-cls"),
    # Memory
    **_words(
        "--kv-cache-dtype",
        {"fp8_e4m3": "fp8", "bfloat16": "model", "float16": "model", "int8_per_token_head": "int8"},
        "fp8_e4m3: fp8; bfloat16, float16: model; int8_per_token_head: int8",
    ),
    **_refused("all layers keep the KV cache in one dtype", "--kv-cache-dtype-skip-layers"),
    **_renamed("--mamba-ssm-cache-dtype", "--state-dtype"),
    **_refused(_RECURRENT, "--mamba-cache-dtype"),
    **_ignored(
        "snapshots of recurrent state lie where prompts end and where prefixes part",
        "--mamba-block-size --mamba-cache-mode --prefix-match-unit --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len "
        "--use-replayssm --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds",
    ),
    **_ignored("prefixes are found by one hash and stay until their blocks are needed", "--prefix-caching-hash-algo"),
    **_ignored("blocks of a prefix stay until they are needed", "--prefix-cache-retention-interval --swa-bounded-replay"),
    **_ignored("every layer computes its keys and values", "--kv-sharing-fast-prefill"),
    **_ignored("each group of layers has its own blocks where that saves memory", "--disable-hybrid-kv-cache-manager"),
    **_refused(_OFFLOAD, "--cpu-offload-gb --offload-group-size"),
    **_ignored(
        _OFFLOAD,
        "--kv-offloading-backend --offload-backend --cpu-offload-params --offload-num-in-group --offload-prefetch-step --offload-params",
    ),
    **_ignored("preempted sequences are computed again, not swapped", "--swap-space --preemption-mode"),
    # Text, pictures, sound
    **_ignored(
        _MULTIMODAL,
        "--language-model-only --media-io-kwargs --mm-processor-cache-gb "
        "--mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend "
        "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin "
        "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate --video-pruning-method --mm-tensor-ipc --mm-processor-device "
        "--mm-ipc-gpu-memory-gb --mm-device-do-normalize --trust-request-mm-kwargs "
        "--disable-mm-preprocessor-cache --disable-chunked-mm-input --enable-tower-connector-lora",
    ),
    **_refused("files of the server are never sent to a model", "--allowed-local-media-path"),
    **_refused("requests have images and videos themselves, for all parts of the model", "--mm-encoder-only"),
    **_refused("a request names its adapter", "--default-mm-loras"),
    **_refused("the server only generates text and embeddings", "--diffusion-config --engram-config"),
    # Adapters
    **_ignored("adapters have the model's dtype, and are sharded as the weights", "--lora-dtype --fully-sharded-loras"),
    **_ignored("adapters change the linears that they have weights for", "--lora-target-modules --specialize-active-lora"),
    **_ignored("--lora-experts lets adapters change experts", "--enable-mixed-moe-lora-format --enable-moe-shared-loras"),
    **_refused("adapters do not change heads of classifiers", "--max-lora-cls-labels"),
    **_refused("adapters do not add tokens", "--lora-extra-vocab-size", ("0", "256")),
    **_refused("adapters do not change RoPE", "--long-lora-scaling-factors"),
    **_refused("adapters are LoRA's", "--enable-prompt-adapter --max-prompt-adapters"),
    # Scheduling
    **_renamed("--max-num-queued-reqs", "--max-waiting"),
    **_renamed("--max-num-active-seqs", "--max-num-seqs"),
    **_refused("prompts are always read in chunks, under --max-num-batched-tokens", "--enable-chunked-prefill"),
    **_refused("a queue is limited in requests, by --max-waiting", "--max-num-queued-tokens"),
    **_ignored("drafts count among --max-num-batched-tokens", "--max-num-scheduled-tokens --num-lookahead-slots"),
    **_ignored(
        "running sequences come first, and prompts share the rest of --max-num-batched-tokens",
        "--long-prefill-token-threshold --long-prefill-token-threshold-adaptive --max-num-partial-prefills --max-long-partial-prefills "
        "--prefill-schedule-interval --scheduler-delay-factor --scheduler-reserve-full-isl --watermark",
    ),
    **_ignored("tokens are sent as steps end", "--stream-interval --num-scheduler-steps --multi-step-stream-outputs"),
    **_ignored("this is how it works here", "--use-v2-block-manager --disable-async-output-proc --disable-frontend-multiprocessing"),
    # Compiler and kernels
    **_mapped("--compilation-config", "--enforce-eager, --cudagraph-mode, --cudagraph-capture-sizes", mapping.compilation_config),
    **_mapped("--optimization-level", "0: --enforce-eager", mapping.optimization_level),
    **_words("--attention-backend", mapping.ATTENTION_BACKENDS, "FLASHINFER, TRITON_ATTN, TORCH_SDPA: flashinfer, triton, torch"),
    **_mapped("--attention-config", "--attention-backend", mapping.attention_config),
    **_mapped("--cudagraph-capture-sizes", "several values", mapping.joined("--cudagraph-capture-sizes")),
    **_mapped("--cuda-graph-sizes", "--cudagraph-capture-sizes", mapping.joined("--cudagraph-capture-sizes")),
    **_ignored(
        "CUDA graphs are captured up to --max-num-seqs",
        "--max-cudagraph-capture-size --max-seq-len-to-capture --max-context-len-to-capture",
    ),
    **_ignored(
        _KERNELS,
        "--ir-op-priority --enable-flashinfer-autotune --monokernel --moe-backend --linear-backend --sparse-indexer-topk-backend "
        "--kernel-config --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend --mamba-backend --mamba-ssu-algorithm "
        "--performance-mode",
    ),
    **_ignored("it is read by vLLM's platforms only", "--additional-config"),
    # Drafts
    **_mapped("--spec-method", "--speculative-config", mapping.drafts("method")),
    **_mapped("--spec-model", "--speculative-config", mapping.drafts("model")),
    **_mapped("--spec-tokens", "--speculative-config", mapping.drafts("num_speculative_tokens")),
    **_mapped("--speculative-model", "--speculative-config", mapping.speculative_model),
    **_mapped("--num-speculative-tokens", "--speculative-config", mapping.drafts("num_speculative_tokens")),
    **_mapped("--ngram-prompt-lookup-max", "--speculative-config", mapping.drafts("prompt_lookup_max")),
    **_mapped("--ngram-prompt-lookup-min", "--speculative-config", mapping.drafts("prompt_lookup_min")),
    # Other engines
    **_refused("caches are not shared with other engines", "--ec-transfer-config --ec-manager-config"),
    **_refused("weights come from the model's files", "--weight-transfer-config"),
    **_refused("the server has no routes for other engines", "--tokens-only --enable-scale-out"),
    **_refused("the server speaks HTTP", "--grpc --grpc-port"),
    # Structured output, tools, reasoning
    **_words("--reasoning-parser", {"none": mapping.LEFT_OUT, "": mapping.LEFT_OUT}, "none: as if left out"),
    **_mapped("--structured-outputs-config", "--reasoning-parser", mapping.structured_outputs_config),
    **_ignored("a request's grammar is always enforced, by llguidance", "--guided-decoding-backend --guided-decoding-disable-fallback"),
    **_ignored("requests have disable_any_whitespace", "--guided-decoding-disable-any-whitespace"),
    **_ignored("schemas are closed without it, unless --open-schemas is set", "--guided-decoding-disable-additional-properties"),
    **_ignored("a reasoning parser is all that is needed", "--enable-reasoning --reasoning-config"),
    **_refused(_PLUGIN, "--tool-parser-plugin --reasoning-parser-plugin"),
    **_refused("calls are constrained by a tool's strict and by tool_choice", "--tool-strict-level"),
    **_refused("the server runs no tools", "--tool-server"),
    **_ignored("tool_choice none always leaves the tools out of the prompt", "--exclude-tools-when-tool-choice-none"),
    **_refused("requests cannot bring a chat template: it could take the server's time", "--trust-request-chat-template"),
    **_ignored("the chat template decides", "--anthropic-disabled-thinking-effort --cohere-is-reasoning-model --cohere-format"),
    **_refused("texts are not marked", "--watermark-config"),
    # HTTP
    **_renamed("--sse-keep-alive-interval", "--stream-keepalive"),
    **_mapped("--allowed-origins", "a JSON list, or several flags", mapping.json_list("--allowed-origins")),
    **_ignored("keys come in headers, never in cookies", "--allow-credentials"),
    **_refused("web pages of --allowed-origins may use every method and header", "--allowed-methods --allowed-headers", ('["*"]',)),
    **_mapped("--ssl-cert-reqs", "2: --ssl-require-client-cert", mapping.certificate_requirement),
    **_refused("certificates are read at the start", "--enable-ssl-refresh"),
    **_refused("what stands before the routes is part of the server", "--middleware"),
    **_ignored("every answer has X-Request-Id", "--enable-request-id-headers"),
    **_ignored("/docs needs nothing from the network", "--enable-offline-docs"),
    **_ignored("a request may have 128 headers of 64 KiB", "--h11-max-incomplete-event-size --h11-max-header-count"),
    **_ignored("/load always counts", "--enable-server-load-tracking"),
    **_refused("answers have no such fields; --otlp-traces-endpoint reports the times of a request", "--enable-per-request-metrics"),
    **_refused("system_fingerprint names the version and the dtype", "--fingerprint-mode --fingerprint-value", ("hash",)),
    **_ignored("scores are computed by the engine", "--enable-flash-late-interaction"),
    # Logs and metrics
    **_mapped("--disable-log-stats", "--throughput-log 0", mapping.when_on("--throughput-log=0")),
    **_mapped("--disable-uvicorn-access-log", "--no-access-log", mapping.when_on("--no-access-log")),
    **_ignored("--access-log and --no-access-log are for all routes", "--disable-access-log-for-endpoints"),
    **_ignored("neither prompts nor answers are logged", "--enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len"),
    **_mapped("--log-level", "debug: --verbose", mapping.log_level),
    **_mapped("--uvicorn-log-level", "debug, trace: --verbose", mapping.log_level),
    **_ignored("--log-format and --verbose choose the log", "--logging-config --log-config-file --aggregate-engine-logging"),
    **_ignored("--verbose shows tracebacks", "--log-error-stack"),
    **_ignored(
        _OBSERVED,
        "--show-hidden-metrics-for-version --collect-detailed-traces --per-request-spec-decode-metrics --kv-cache-metrics "
        "--kv-cache-metrics-sample --custom-histogram-buckets --cudagraph-metrics --enable-layerwise-nvtx-tracing --enable-mfu-metrics "
        "--enable-logging-iteration-details --jit-monitor-mode --jit-monitor-verbose",
    ),
    **_ignored("no environment variable of vLLM is read", "--fail-on-environ-validation"),
}
