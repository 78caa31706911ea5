"""Which steps of a worker are captured as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from compile_and_serve.compiler.config import CudaGraphMode
from compile_and_serve.compiler.cudagraphs.graph_capture import CudaGraphs
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.piecewise import SMALL_LAYERS_TOKENS
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.cudagraphs.work_graphs import WorkGraphs
from compile_and_serve.compiler.model import StepModel
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import LOGITS
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step

logger = logging.getLogger(__name__)


def make_graph_runners(
    config: EngineConfig,
    spec: ModelSpec,
    plans: Sequence[StepModel],
    backends: Mapping[str, AttentionBackend],
    drafter_backends: Mapping[str, AttentionBackend] | None,
    device: torch.device,
    encoder: StepModel | None,
    encoder_tokens: int,
    *,
    logs: bool,
) -> GraphRunners | None:
    """The runners of a model's plans; None where CUDA graphs are off or the device has none.

    plans: for any step first, for steps without optional inputs last. backends: by attention group. drafter_backends: of the model that
    drafts; None where there is none. encoder: of media; None where there is none. encoder_tokens: of its longest step.
    logs: whether to log why steps with draft tokens have no full graphs.
    """
    options = config.compile
    if not platform_of(device).replays_graphs or options.mode == "eager" or options.cudagraph_mode == "none":
        return None
    graphs, stats = CudaGraphs(device), GraphStats()
    mode = options.cudagraph_mode
    samples = any(one.name == LOGITS for one in spec.outputs)  # not the stages of a model before its last
    runners = [
        CudaGraphRunner(
            model,
            mode=mode if spec.pooling is None else _without_full_graphs(mode),
            max_num_seqs=_max_decodes(config),
            backends=tuple(backends.values()),
            device=graphs,
            sizes=options.capture_sizes,
            longest_step=SMALL_LAYERS_TOKENS if spec.pooling is None else config.scheduler.token_budget,
            decode_head=begin_step,
            decode_tail=end_step if samples else None,
            stats=stats,
        )
        for model in plans
    ]
    drafted = _drafted_runner(config, plans[-1], backends, graphs, stats, samples=samples, logs=logs)
    drafter = None
    if drafted is not None and drafter_backends is not None:
        others = [name for name, one in drafter_backends.items() if not one.drafts_capturable]
        if not others:
            drafter = WorkGraphs(runners[-1].sizes, graphs, stats, "draft")
        elif logs:
            logger.info("The drafter runs without CUDA graphs: its attention of %s cannot be captured.", ", ".join(others))
    of_encoder = None
    if encoder is not None and mode != "full":
        of_encoder = CudaGraphRunner(
            encoder, mode="piecewise", max_num_seqs=1, max_tokens=encoder_tokens, backends=(), device=graphs, stats=stats
        )
    return GraphRunners(runners, drafted, drafter, of_encoder, has_draft_model=drafter_backends is not None)


def _drafted_runner(
    config: EngineConfig,
    model: StepModel,
    backends: Mapping[str, AttentionBackend],
    graphs: CudaGraphs,
    stats: GraphStats,
    *,
    samples: bool,
    logs: bool,
) -> CudaGraphRunner | None:
    """Graphs of steps whose sequences all have the most draft tokens. samples: and of their tokens."""
    speculative = config.speculative
    if speculative is None or config.compile.cudagraph_mode == "piecewise":
        return None
    num_drafts, longest = speculative.num_speculative_tokens, method_of(speculative).max_graph_tokens
    query_len = 1 + num_drafts
    max_num_seqs = min(_max_decodes(config), config.max_drafted_rows // query_len)
    others = [name for name, one in backends.items() if not one.drafts_capturable]
    if num_drafts > longest or max_num_seqs == 0 or others:
        reason = f"their number, {num_drafts}, is above {longest} or no step has room for it"
        if others:
            reason = f"the attention of {', '.join(others)} cannot be captured with them"
        if logs:
            logger.info("Steps with draft tokens run without full CUDA graphs: %s.", reason)
        return None
    return CudaGraphRunner(
        model,
        mode="full",
        max_num_seqs=max_num_seqs,
        backends=tuple(backends.values()),
        device=graphs,
        query_len=query_len,
        decode_head=begin_step,
        decode_tail=end_step if samples else None,
        stats=stats,
    )


def _max_decodes(config: EngineConfig) -> int:
    """Of one step: with stages, the decodes are divided over the steps in flight."""
    return -(-config.scheduler.max_num_seqs // config.mesh.pipe)


def _without_full_graphs(mode: CudaGraphMode) -> CudaGraphMode:
    """Full graphs hold decode steps, which a pooling engine does not have."""
    return "none" if mode in ("none", "full") else "piecewise"
