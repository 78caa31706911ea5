"""What the scheduler and the model runner tell each other: a step, its result, and facts about a worker. Plain data that can
cross processes.

The runner keeps each request's token ids, block ids and number of computed tokens, and advances them by itself, so that
a step in which the same sequences decode says almost nothing:
- A request starts with its prefill: each step computes the next `num_scheduled_tokens[id]` tokens of
  `NewRequestData.token_ids`. The step that computes the last of them samples one token; the steps before it sample none.
- Every later step of the request is a decode. It computes 1 + d tokens: the last sampled token and d draft tokens. It
  accepts 0 to d of the drafts and samples one more token, so it returns 1 to 1 + d tokens, and the number of computed
  tokens grows by as many. The drafts are `SchedulerOutput.drafts`, and d is 0 for other requests. `last_tokens` says where the
  sequences of such a step are. Before and after it nothing is in flight, except that it may run ahead of the step before (`is_ahead`).
- The scheduler may schedule a step before it knows how many tokens the steps before it returned. It then counts all
  1 + d of each, and gives blocks for that upper bound. Only the runner knows the true positions.
- Steps run on the device in the order of `step`. With async scheduling, step k+1 arrives before the tokens of step k
  were read back: its decodes take their input from the device, where step k left it. A freed block may be written by
  the next step that is scheduled, never by an earlier one.

Layers whose state is alike form a group. Each group has block lists of its own; all groups take their blocks from one
pool. In a group with a window, the blocks of tokens that no later token reads are freed, and their entries are never
used again: the scheduler writes 0 there, without telling the runner.

In a group of slots, the lists name the pages that hold a sequence's whole state. A step reads the state before its
tokens and writes the state after them. Mostly it reads and writes the same pages. It writes to others where the state
before it must stay as it is, for other requests: that state is a snapshot.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from compile_and_serve.custom_ops.step_data import ArrayInfo, LengthRegimes, StepArray
from compile_and_serve.runtime.connector.messages import FinishedTransfers, StepTransfers
from compile_and_serve.runtime.ledger.records import StepRan
from compile_and_serve.runtime.lora.request import AdapterTarget
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.messages import StepData, TokenLogprobs
from compile_and_serve.runtime.pooling_params import Pooled, PoolingInfo, PoolingParams
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.structured.grammar_error import GRAMMAR_FAILED

NOTHING_LEFT = (
    "No token can follow: allowed_token_ids, bad_words, logit_bias, min_tokens and structured_outputs together exclude every one."
)


def is_users_mistake(error: str) -> bool:
    """Whether the request, and not the engine, is the cause of an error of `ModelRunnerOutput.errors`."""
    return error == NOTHING_LEFT or error.startswith(GRAMMAR_FAILED)


class StateGroupInfo(msgspec.Struct, frozen=True):
    """What the scheduler must know of a state group.

    kind: "tokens": a page holds the keys and values of `block_size` tokens. "slot": a sequence's state has a fixed size. "items": a page
        holds what an encoder made of `block_size` rows of a request's items.
    block_size: of a slot, the tokens between two places where a snapshot may lie.
    window: a token reads itself and the `window` - 1 tokens before it; None: all tokens before it.
    pages_per_slot: pages of the pool that one slot takes. snapshots: other requests may take up a state that was kept.
    rollback_tokens: the state after n tokens can be taken up at any m ≥ n - rollback_tokens. max_items_pages: of the items of a request.
    """

    kind: Literal["tokens", "slot", "items"]
    block_size: int
    window: int | None = None
    pages_per_slot: int = 0
    snapshots: bool = False
    rollback_tokens: int = 0
    max_items_pages: int = 0


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder beside the model. arrays: of media items, which it reads. max_tokens: that it reads in one step. max_item_tokens: of one
    item. leading_rows: that a step has before each item, and that count as its tokens do. num_pages: of the region for its rows.
    rows_per_page: of that. whole_arrays: those that have one row for a whole item. embedded: the array of an item that comes with its rows,
    in place of the others. fills_items: the rows go to the state group of items, and there is no region. is_required: a request must bring
    an item. is_whole: no step computes a part of an item's tokens. whole_prompts: nor of a prompt's.
    max_aligned_rows: of `SamplingParams.aligned_rows`. decoder_start: of `ModelSpec`.
    """

    arrays: list[str]
    whole_arrays: list[str] = []
    embedded: str = ""
    is_whole: bool = False
    whole_prompts: bool = False
    max_tokens: int
    max_item_tokens: int
    leading_rows: int = 0
    num_pages: int
    rows_per_page: int
    fills_items: bool = False
    is_required: bool = False
    max_aligned_rows: int = 0
    decoder_start: list[int] = []


class EncodeItem(msgspec.Struct, kw_only=True):
    """A media item whose rows a request reads from this step on: its tokens from `position` on, `length` of them.

    page_ids: where the rows lie. arrays: what this step computes them from, before the model runs; their first token is the item's first.
    Empty: they are there.
    """

    request_id: str
    position: int
    length: int
    page_ids: list[int]
    arrays: dict[str, StepArray] = {}


class NewRequestData(msgspec.Struct, kw_only=True):
    """A request that the runner does not hold: it runs for the first time, or resumes after a preemption.

    token_ids: the prompt and, after a preemption, the tokens generated before it; num_prompt_tokens is the prompt's
        length.
    stop_token_ids: every id that ends the request, the model's end ids among them (min_tokens masks them).
    block_ids: for each group, blocks for all of token_ids (a group with a window: up to the end of this step's chunk).
        The first `num_computed_tokens` tokens are in the cache already. Of a group of slots: the `pages_per_slot` pages
        that the step writes; if num_computed_tokens is not 0, before them as many that it reads, which others may read too.
    step_data: of the request (`TokenBatch.step_data`). arrays: of the request and its media, by name.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    block_ids: list[list[int]]
    num_computed_tokens: int
    step_data: StepData = {}
    arrays: dict[str, list[StepArray]] = {}
    pooling: PoolingParams | None = None


class CachedRequestData(msgspec.Struct, kw_only=True):
    """Blocks to append, for each group, to those of a request that the runner holds. Of a group of slots: none, or the
    `pages_per_slot` pages to which its state moves: this step, of a prefill or a decode, reads the ones before and writes these.
    """

    request_id: str
    new_block_ids: list[list[int]]


class StateChecks(msgspec.Struct, kw_only=True):
    """What the canary wants to know. pages: (group, page) whose checksums are taken before the step. tables: request → (group, leading
    entries that count no more, its blocks), to be compared with the device's tables after the step began. pairs: (group, page, other page)
    whose contents are compared before the step.
    """

    pages: list[tuple[int, int]] = []
    tables: dict[str, list[tuple[int, int, list[int]]]] = {}
    pairs: list[tuple[int, int, int]] = []


class StepShape(msgspec.Struct, array_like=True, frozen=True):
    """What all data groups pad a step to, so that their ranks meet in the same collectives.

    tokens, rows: the most that a group computes. is_decode: every group decodes one token of each of its sequences, or nothing. is_apart: a
    group changes logits between the model and sampling, so that all sample outside of its graph. group_tokens: of each group.
    """

    tokens: int
    rows: int
    is_decode: bool
    is_apart: bool = False
    group_tokens: tuple[int, ...] = ()


class ExpertMoves(msgspec.Struct, array_like=True):
    """Experts to be moved between slots before a step (`runner/spread_experts.py`).

    copies: (layer, slot, slot whose expert it gets), all at once. turns: of a layer, the slot of each turn of experts with several slots.
    The others of a layer that is named here take turns evenly.
    """

    copies: list[tuple[int, int, int]] = []
    turns: list[tuple[int, dict[int, list[int]]]] = []


class SpreadInfo(msgspec.Struct, kw_only=True):
    """Experts that are spread over ranks. placements: of each layer, the expert of each slot of all ranks."""

    num_ranks: int
    placements: list[list[int]]
    bytes_of_expert: int


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step. `num_scheduled_tokens` has every request of the step, in batch order: decodes, then prefill chunks.

    cached_requests: only requests that got new blocks.
    finished_request_ids: requests that ended or were preempted since the last step. The runner forgets them before it
        takes in `new_requests`: an id may be in both.
    adapter_loads: (slot, adapter) to copy into the device's slots before the step.
    drafts: draft tokens of decodes, at least one each. last_tokens: number of tokens and last token of every decode in a step with
        drafts, and of every request of the step before if that had drafts: the runner takes back what it computed beyond.
    is_drafting_off: the next step will have no drafts either.
    is_ahead: the step before has drafts, and its tokens are not known here yet: `last_tokens` are those before that step. All requests
        are decodes of the step before, and none has a grammar, penalties or other options that change logits. The step may have no drafts,
        if the requests that had some were preempted for the others' blocks.
    transfers: to begin before the step. A step without tokens has only transfers, and asks what has become of earlier ones.
    encodes: media whose rows requests read from this step on, those that it computes among them.
    emptied_blocks: to be filled with poison before the step, in tests (`POISON_VARIABLE`).
    times_masks: `ModelRunnerOutput.mask_seconds` is of interest.
    num_decodes: requests of the step that decode. missed_drafts: of `MISSES["draft"]`, why none of them has drafts; "": some have, or never
        do.
    checks: of the canary, in a few steps.
    shape: of all data groups' steps together; None: there is one group. groups: each group's own step; this one is their sum then.
    expert_moves: to be done before the step.
    """

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]
    adapter_loads: list[tuple[int, int]] = []
    drafts: dict[str, list[int]] = {}
    last_tokens: dict[str, tuple[int, int]] = {}
    is_drafting_off: bool = False
    is_ahead: bool = False
    transfers: StepTransfers | None = None
    encodes: list[EncodeItem] = []
    emptied_blocks: list[int] = []
    times_masks: bool = False
    num_decodes: int = 0
    missed_drafts: str = ""
    checks: StateChecks | None = None
    shape: StepShape | None = None
    groups: list[SchedulerOutput] = []
    expert_moves: ExpertMoves | None = None


def step_without_tokens(step: int, transfers: StepTransfers | None) -> SchedulerOutput:
    """A step that only transfers."""
    return SchedulerOutput(
        step=step,
        new_requests=[],
        cached_requests=[],
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        finished_request_ids=[],
        transfers=transfers,
    )


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """The result of a step.

    sampled_token_ids: 1 to `num_scheduled_tokens[id]` tokens of each request. One whose prefill is not complete has no
        entry.
    logprobs: one entry for each sampled token.
    prompt_logprobs: where a request asks for them and the step computed positions a … b-1 of its prompt of P tokens:
        the entries of the prompt tokens a+1 … min(b, P-1), in order (the logits at a position are those of the token
        after it). May be left out when empty.
    pooled: the result of each pooling request whose prefill is complete.
    errors: request → sentence. The request ends with finish_reason "error" and needs no other entry. `is_users_mistake` tells
        whose fault it is.
    expert_tokens: see `EngineStats`.
    missing_drafts: request → draft tokens that the runner was asked for and had no guess for.
    transfers: those that no rank works on any more. None: nothing new.
    mask_seconds: host time of the masks of structured output, of requests whose masks take long, where the step before took long, too.
    ran: how the device ran the step. checksums: of `StateChecks.pages`. wrong_tables: request → a sentence.
    differences: of `StateChecks.pairs`: how far apart they are, for the norm of the first; the most of all layers.
    groups: the result of each data group; the other fields are empty then, but for `expert_tokens` and `ran`.
    """

    step: int
    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    errors: dict[str, str]
    pooled: dict[str, Pooled] = {}
    expert_tokens: list[list[int]] = []
    missing_drafts: dict[str, int] = {}
    transfers: FinishedTransfers | None = None
    mask_seconds: dict[str, float] = {}
    ran: StepRan = StepRan()
    checksums: list[int] = []
    wrong_tables: dict[str, str] = {}
    differences: list[float] = []
    groups: list[ModelRunnerOutput] = []


class WorkerInfo(msgspec.Struct, kw_only=True):
    """What a rank knows once its weights are loaded.

    num_blocks: KV blocks that it has room for, over all groups. block_size: as the options say, or as was chosen for the model.
    page_bytes: of each block on this rank. is_asynchronous: of its platform.
    has_idle_tasks: whether `Worker.idle` may have work to do. prefix_caching_unsupported: why this model's cache
    cannot be reused by other requests, as a sentence. adapter_targets: the linears
    that LoRA adapters may change, by their names in the checkpoint; None: the engine takes no adapters. drafts_run_ahead: the runner can
    compute steps with `SchedulerOutput.is_ahead` without waiting, once their graphs are captured. whole_prompts, length_regimes: of
    `ModelSpec`.
    arrays: that requests may bring. encoder: None: there is none. spread: experts that may move between ranks.
    """

    num_blocks: int
    block_size: int
    page_bytes: int
    is_asynchronous: bool
    has_idle_tasks: bool
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    groups: list[StateGroupInfo]
    prefix_caching_unsupported: str | None = None
    drafts_run_ahead: bool = False
    adapter_targets: dict[str, list[AdapterTarget]] | None = None
    compile_report: dict[str, int | float | str]
    pooling: PoolingInfo | None = None
    whole_prompts: bool = False
    length_regimes: LengthRegimes | None = None
    arrays: list[ArrayInfo] = []
    encoder: EncoderInfo | None = None
    media: MediaInfo | None = None
    spread: SpreadInfo | None = None


class WorkerStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counters since the start. captures_due: steps after which the capture of a CUDA graph was due.
    steps_on_device: steps that found their inputs on the device. prompt_steps, pending_work, stage_wait_seconds: see `EngineStats`."""

    padded_tokens: int = 0
    captures_due: int = 0
    steps_on_device: int = 0
    stage_wait_seconds: float = 0.0
    graph_replays: dict[str, int] = {}
    prompt_steps: dict[str, int] = {}
    pending_work: dict[str, int] = {}
