"""The records of a request's ledger. They travel with the engine's outputs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# Why a request that could run waits.
#   step: for the end of the step under way. slots: every batch slot is taken. blocks: too few blocks of the KV cache are free.
#   budget: the tokens of the steps go to other prompts. prefix: the step before computes blocks that it can share.
#   adapter_slots: running requests use all slots of LoRA adapters. key: its API key has its share, or its limit.
#   group: batch slots are kept for several requests at once. encoder: the step has no room for its media.
#   prompt_logprobs: the step has no room for its prompt's log-probabilities.
WaitReason = Literal["step", "slots", "blocks", "budget", "prefix", "adapter_slots", "key", "group", "encoder", "prompt_logprobs"]

# What is prepared for a request before it can run.
Preparation = Literal["grammar", "adapter", "kv_load"]

# How a step ran. full: as one CUDA graph. piecewise: as graphs between the attention ops. plain: without graphs.
GraphKind = Literal["full", "piecewise", "plain"]

MISSES = {  # kind of a miss → its reasons; the labels of /metrics are these and no others
    "prefix": ("first", "differs", "salt", "adapter", "evicted", "short", "snapshot", "off", "reads_all", "not_loaded"),
    "graph": ("size", "not_captured", "optional_input", "addresses", "unsampled"),
    "draft": ("batch", "request", "structured", "none_found"),
    "structured": ("refused",),
}


class Miss(msgspec.Struct, omit_defaults=True):
    """Why something was not reused or not used. kind, reason: of `MISSES`.

    count: steps, where it happened in several. Of a prefix that differs: other: the request that it was compared with. position: of the
    first token that differs. mine, theirs: the tokens from there on. seconds: since the block was evicted.
    """

    kind: str
    reason: str
    count: int = 1
    other: str = ""
    position: int = 0
    mine: list[int] = []
    theirs: list[int] = []
    seconds: float = 0.0


class StepTotals(msgspec.Struct, omit_defaults=True):
    """What the engine's steps did since it started. A request's part is the difference between two of them: nothing is counted by request.

    steps, seconds: by `GraphKind`. prompt_steps, prompt_seconds: of steps that computed prompts, whatever else they did. tokens,
    padded_tokens: of all steps. bytes: that they read: the weights of this rank and the blocks that requests hold. row_bytes: the sum over
    the steps of bytes / sequences.
    misses: "kind.reason" → steps.
    """

    steps: dict[str, int] = {}
    seconds: dict[str, float] = {}
    prompt_steps: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    bytes: float = 0.0
    row_bytes: float = 0.0
    misses: dict[str, int] = {}

    def copy(self) -> StepTotals:
        """As it is now."""
        return msgspec.structs.replace(self, steps=self.steps.copy(), seconds=self.seconds.copy(), misses=self.misses.copy())

    def since(self, before: StepTotals) -> StepTotals:
        """What was added after `before`."""
        return StepTotals(
            steps=_added(self.steps, before.steps),
            seconds=_added(self.seconds, before.seconds),
            prompt_steps=self.prompt_steps - before.prompt_steps,
            prompt_seconds=self.prompt_seconds - before.prompt_seconds,
            tokens=self.tokens - before.tokens,
            padded_tokens=self.padded_tokens - before.padded_tokens,
            bytes=self.bytes - before.bytes,
            row_bytes=self.row_bytes - before.row_bytes,
            misses=_added(self.misses, before.misses),
        )


class StepRan(msgspec.Struct, array_like=True, frozen=True):
    """How the device ran a step. miss: of `MISSES["graph"]`, why not as a graph; "": it did, or there are none. encode: seconds in
    which the encoder computed media before it.
    """

    kind: GraphKind = "plain"
    miss: str = ""
    padded: int = 0
    encode: float = 0.0


class LastStep(msgspec.Struct, array_like=True, frozen=True):
    """A step, for a time line. began: time.time(). kind: a `GraphKind`. decodes, prompts: sequences. idle: seconds before it in which the
    device had nothing to do. held: share of the KV cache's blocks that requests hold.
    """

    number: int
    began: float
    seconds: float
    kind: str
    decodes: int
    prompts: int
    tokens: int
    padded: int
    idle: float = 0.0
    held: float = 0.0


class RequestLedger(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the engine knows of a sequence once its prompt is computed. All times in seconds.

    transport: from the API process to the engine. preparing: by `Preparation`. queue: by `WaitReason`, the times after a preemption
    included. prefill: from the first scheduled chunk to the first token. prefill_steps: steps in this time, of which `chunks` computed a
    part of the prompt. beside_tokens: what these computed for others. encode: the encoder's part of them.
    computed_tokens, cached_tokens: of the prompt. loaded_tokens: cached ones, by the tier that they came from.
    preemptions: how often it lost its blocks; preempted: seconds from then until it went on; recomputed: seconds from then until its next
    token, in which recomputed_tokens were computed again.
    """

    transport: float = 0.0
    preparing: dict[str, float] = {}
    queue: dict[str, float] = {}
    prefill: float = 0.0
    prefill_steps: int = 0
    chunks: int = 0
    beside_tokens: int = 0
    encode: float = 0.0
    computed_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: dict[str, int] = {}
    encoded_items: int = 0
    preemptions: int = 0
    preempted: float = 0.0
    recomputed: float = 0.0
    recomputed_tokens: int = 0
    misses: list[Miss] = []


def _added(now: dict[str, int] | dict[str, float], before: dict[str, int] | dict[str, float]) -> dict[str, Any]:
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}
