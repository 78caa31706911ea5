"""`Speculator`: drafts of a step's sequences from their token histories. The scheduler owns it.

The scheduler asks `is_on`. Then `drafts` gives each sequence its tokens, as many as pay (payoff.py), and `observe` learns from what was
accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from compile_and_serve.runtime.drafting.host_drafter import ConstantDrafter, HostDrafter
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.drafting.payoff import Acceptance, Payoff
from compile_and_serve.runtime.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0


def make_drafter(config: SpeculativeConfig, *, is_asynchronous: bool) -> HostDrafter:
    """The drafter of a config's method. is_asynchronous: of the device."""
    method = method_of(config)
    if method.drafts_on_device(is_asynchronous=is_asynchronous):
        return ConstantDrafter(-1)
    assert method.host is not None
    # Under synthetic acceptance drafts need not be right.
    return ConstantDrafter(None) if config.synthetic_acceptance_rate is not None else method.host(config)


class Speculator:
    """num_drafts: drafts that were checked. num_draft_tokens, num_accepted: their tokens. accepted_at: accepted ones by place.
    max_rows: draft tokens and sequences of one step, at most.
    drafts_on_device: the drafts' tokens are not known here. is_asynchronous: of the device.
    """

    def __init__(self, config: SpeculativeConfig, max_rows: int, *, is_asynchronous: bool) -> None:
        self.max_tokens = config.num_speculative_tokens
        self.drafts_on_device = method_of(config).drafts_on_device(is_asynchronous=is_asynchronous)
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self.accepted_at = [0] * config.num_speculative_tokens
        self._max_rows = max_rows
        self._drafter = make_drafter(config, is_asynchronous=is_asynchronous)
        self._payoff = Payoff(config.disable_by_batch_size)
        self._acceptance: dict[str, Acceptance] = {}
        self._logged = (time.monotonic(), 0, 0, 0)

    def is_on(self, num_decodes: int) -> bool:
        """Whether the next step, of `num_decodes` decodes, should have drafts."""
        return self._payoff.is_on(num_decodes)

    def drafts(self, sequences: Mapping[str, tuple[Sequence[int], int]], num_decodes: int) -> dict[str, list[int]]:
        """Sequence → draft tokens, at least one. sequences: the tokens of those that may have drafts, and how many fit."""
        drafts: dict[str, list[int]] = {}
        for request_id, (token_ids, room) in sequences.items():
            if draft := self._drafter.propose(request_id, token_ids, min(room, self.max_tokens)):
                drafts[request_id] = draft
        room = self._max_rows - num_decodes
        if not drafts or room <= 0:
            return {}
        rates = {name: (len(draft), self._of(name).rate) for name, draft in drafts.items()}
        lengths = self._payoff.draft_lengths(num_decodes, rates, room)
        for name in drafts:
            if name not in lengths:
                self._of(name).forget()
        return {name: drafts[name][:count] for name, count in lengths.items()}

    def observe(self, drafts: Mapping[str, Sequence[int]], accepted: Mapping[str, int], missing: Mapping[str, int]) -> None:
        """What became of a step's drafts. accepted: sequence → draft tokens that were accepted. missing: sequence → tokens that the runner
        had no guess for; they count as wrong when the next drafts are chosen.
        """
        for request_id, count in accepted.items():
            drafted = len(drafts[request_id])
            made = drafted - missing.get(request_id, 0)
            self.num_drafts += made > 0
            self.num_draft_tokens += made
            self.num_accepted += count
            for place in range(count):
                self.accepted_at[place] += 1
            self._of(request_id).add(drafted, count)
        self._log()

    def record_step(self, num_seqs: int, num_drafts: int, num_tokens: int, seconds: float, *, was_on: bool) -> None:
        """The time of a step of decodes alone: see `Payoff.record`."""
        self._payoff.record(num_seqs, num_drafts, num_tokens, seconds, was_on)

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        """The request has ended."""
        self._acceptance.pop(request_id, None)
        self._drafter.forget(request_id, output_ids)

    def _of(self, request_id: str) -> Acceptance:
        known = self._acceptance.get(request_id)
        if known is None:
            known = self._acceptance[request_id] = Acceptance()
        return known

    def _log(self) -> None:
        last, num_drafts, num_tokens, num_accepted = self._logged
        now = time.monotonic()
        if now - last < LOG_SECONDS or self.num_drafts == num_drafts:
            return
        drafts, tokens = self.num_drafts - num_drafts, self.num_draft_tokens - num_tokens
        accepted = self.num_accepted - num_accepted
        self._logged = now, self.num_drafts, self.num_draft_tokens, self.num_accepted
        logger.info(
            "Speculative decoding: mean accepted length %.2f (%d of %d draft tokens, in %d drafts).",
            1 + accepted / drafts,
            accepted,
            tokens,
            drafts,
        )
