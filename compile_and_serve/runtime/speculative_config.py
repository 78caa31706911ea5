"""Options of speculation, in the JSON of vLLM's `--speculative-config`, which `runtime/drafting/config.py` reads."""

from __future__ import annotations

from dataclasses import dataclass


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
    draft_sample_method: str = "probabilistic"

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """Shortest and longest suffix that ngram looks up."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None and longest is None:
            return 3, 5
        return shortest or longest or 0, longest or shortest or 0
