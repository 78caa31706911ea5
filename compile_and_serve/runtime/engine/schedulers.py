"""Makes the schedulers of an engine: one, or one for each data group."""

from __future__ import annotations

import logging

from compile_and_serve.runtime.config import CacheConfig, EngineConfig
from compile_and_serve.runtime.connector.configured import configured_connector
from compile_and_serve.runtime.connector.handover.engine_side import transfer_info
from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.engine.data_groups import DataGroups
from compile_and_serve.runtime.engine.router import Router
from compile_and_serve.runtime.kv_events.publisher import EventPublisher
from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.runtime.scheduler.encoder_cache import EncoderCache
from compile_and_serve.runtime.scheduler.event_recorder import EventRecorder
from compile_and_serve.runtime.scheduler.item_queue import ItemQueue
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import WorkerInfo

logger = logging.getLogger(__name__)


def make_schedulers(config: EngineConfig, cache: CacheConfig, found: WorkerInfo) -> list[Scheduler]:
    """A scheduler for each data group. cache: with what the model supports. found: of the ranks."""
    return [_make_scheduler(config, cache, found) for _ in range(config.mesh.data)]


def _make_scheduler(config: EngineConfig, cache: CacheConfig, found: WorkerInfo) -> Scheduler:
    speculative, speculator = config.speculative, None
    if speculative is not None:
        speculator = Speculator(speculative, config.max_drafted_rows, is_asynchronous=found.is_asynchronous)
        if speculative.synthetic_acceptance_rate is not None:
            logger.warning("synthetic_acceptance_rate is set: drafts are accepted by chance, and the output is meaningless.")
    connector = configured_connector(config)
    encoder = None if found.encoder is None else (ItemQueue if found.encoder.fills_items else EncoderCache)(found.encoder)
    if isinstance(encoder, ItemQueue) and (connector is not None or config.kv_events is not None):
        raise ValueError("What a model's encoder computed cannot be stored elsewhere: remove the connector and the KV events.")
    transfers = None if connector is None else connector.scheduler_side(config, found.page_bytes)
    scheduler = Scheduler(
        config.scheduler,
        cache,
        num_blocks=found.num_blocks,
        max_model_len=found.max_model_len,
        groups=found.groups,
        num_adapter_slots=config.compile.max_loras,
        speculator=speculator,
        drafts_run_ahead=found.drafts_run_ahead and config.mesh.pipe == 1,
        num_stages=config.mesh.pipe,
        whole_prompts=found.whole_prompts,
        length_regimes=found.length_regimes,
        connector=transfers,
        encoder=encoder,
    )
    if config.kv_events is not None:
        scheduler.manager.pool.events = recorder = EventRecorder(found.groups)
        if transfers is not None:
            transfers.events = recorder
    return scheduler


def data_groups(schedulers: list[Scheduler], config: EngineConfig, cache: CacheConfig, found: WorkerInfo) -> DataGroups:
    """The schedulers as one. Raises `ValueError` with one sentence for a model whose requests one group alone can run."""
    unsupported = {"A pooling model": found.pooling is not None, "A model with an encoder": found.encoder is not None}
    for what, is_given in unsupported.items():
        if is_given:
            raise ValueError(f"{what} has no data-parallel attention: use replicas, --data-parallel-size without --enable-expert-parallel.")
    router = Router(
        len(schedulers),
        max_num_seqs=schedulers[0].max_num_seqs,
        max_waiting=config.scheduler.max_waiting,
        num_blocks=found.num_blocks,
        block_size=cache.tokens_per_block,
        enable_prefix_caching=cache.enable_prefix_caching,
    )
    return DataGroups(schedulers, router)


def publish_events(config: EngineConfig, schedulers: list[Scheduler]) -> list[tuple[EventPublisher, EventRecorder]]:
    """What tells those who listen of each scheduler's prefix cache, if the options ask for it; groups are numbered as replicas are."""
    publishers = []
    for group, scheduler in enumerate(schedulers):
        recorder = scheduler.manager.pool.events
        if config.kv_events is not None and recorder is not None:
            number = config.parallel.data_parallel_rank * len(schedulers) + group
            publishers.append((EventPublisher(config.kv_events, number), recorder))
    return publishers


def engine_info(config: EngineConfig, cache: CacheConfig, found: WorkerInfo, scheduler: Scheduler | DataGroups) -> EngineInfo:
    """What clients are told of all groups together."""
    num_groups, limit = config.mesh.data, config.scheduler.max_in_flight
    return EngineInfo(
        max_model_len=found.max_model_len,
        vocab_size=found.vocab_size,
        num_kv_blocks=found.num_blocks * num_groups,
        block_size=cache.tokens_per_block,
        dtype=found.dtype,
        device=found.device,
        max_running=scheduler.max_num_seqs,
        max_sequence_len=scheduler.max_len,
        prefix_caching=cache.enable_prefix_caching,
        max_in_flight=None if limit is None else limit * num_groups,
        compile_report=found.compile_report,
        pooling=found.pooling,
        media=found.media,
        kv_transfer=transfer_info(config, found.dtype),
        max_logprobs=config.model.max_logprobs,
        max_source_len=found.encoder.max_item_tokens if found.encoder is not None and found.encoder.decoder_start else None,
        decoder_start=[] if found.encoder is None else found.encoder.decoder_start,
    )
