"""Sample a step's tokens from its logits.

Shape legend: S rows (one for each request that samples in the step), V vocabulary, R rows with the same kind of sampling,
L rows with logprobs.

The semantics are those of vLLM. Allowed ids, bad words, min_tokens, bias and penalties change the logits; then
temperature, min_p, top_k and top_p apply. Log-probabilities are those of the unchanged logits, unless the mode
says otherwise; those of transcripts are among the tokens that may follow. A batch of plain greedy requests costs one
argmax. Everything that depends only on the composition of the batch is prepared in a `SamplingPlan`, which is reused
while the composition stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.sampling.token_masks import mask_tokens
from compile_and_serve.runtime.config import LogprobsMode
from compile_and_serve.runtime.sampling.logits_processors import FOREVER, LogitsPlan, LogitsProcessors
from compile_and_serve.runtime.sampling.logprobs import RowLogprobs, row_logprobs
from compile_and_serve.runtime.sampling.ops import (
    SAMPLING_FIELDS,
    argmax_rows,
    sample_rows,
    sample_top_k,
    sample_top_p,
    sample_unsorted,
    stream_key,
    uniforms,
)
from compile_and_serve.runtime.sampling.processed import processed_logits
from compile_and_serve.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class _RandomGroup:
    """Rows with the same top_k (0 is off), of which all or none have top_p.

    A row's arithmetic then does not depend on its neighbors, and neither does its token.
    """

    rows_R: torch.Tensor | None  # None: every row of the batch, in order
    uniform_begin: int  # index of the group's first uniform number
    uniform_end: int
    top_k: int
    inverse_temperature_R1: torch.Tensor
    log_min_p_R1: torch.Tensor | None
    top_p_R1: torch.Tensor | None


@dataclass(kw_only=True, slots=True)
class SamplingPlan:
    """How to sample one batch composition.

    valid_steps: for how many more steps. num_random: number of rows that are not greedy.
    """

    slots_S: np.ndarray  # int64
    offsets_S: np.ndarray  # int64, rows of the same slot before this one
    is_plain_greedy: bool
    greedy_rows_R: torch.Tensor | None  # None if no row or all rows are greedy
    all_greedy: bool
    groups: list[_RandomGroup]
    gpu: dict[str, np.ndarray]  # the constant arrays of `SAMPLING_FIELDS` [S]; empty on the CPU
    num_random: int
    random_slots: np.ndarray  # int64, in the order of the groups
    random_offsets: np.ndarray  # int64, likewise
    logits: LogitsPlan | None
    logprob_rows: list[int]
    logprob_rows_L: torch.Tensor | None
    ruled_R: torch.Tensor | None  # int64, which of logprob_rows have speech rules; None: none
    logprob_counts: list[int]
    logprob_others_Lw: torch.Tensor | None  # int64, `logprob_token_ids` padded with 0
    num_logprob_others: list[int]
    valid_steps: int
    has_drafts: bool  # the host says later which tokens are kept: `Sampler.take`


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """Device tensors. best_S: each row's largest logit after all changes; if it is not finite, the token is meaningless."""

    tokens_S: torch.Tensor  # int64
    best_S: torch.Tensor
    logprobs: RowLogprobs | None


class Sampler:
    """Sampling options and state of requests by slot.

    Call `add` and `remove` for each request, `plan` for each batch composition, and `inputs` and `sample` in each step.
    """

    def __init__(self, *, vocab_size: int, num_slots: int, device: torch.device, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self._logprobs_are_processed = logprobs_mode.startswith("processed")
        self._logprobs_are_normalized = logprobs_mode.endswith("logprobs")
        self.vocab_size = vocab_size
        self.device, self._platform = device, platform_of(device)
        self._has_triton = self._platform.runs_triton_kernels  # one kernel samples all rows
        # Tokens that the slot's request has generated, including those of steps in flight.
        self.num_outputs = np.zeros(num_slots, dtype=np.int64)
        self._processors = LogitsProcessors(vocab_size, num_slots, device)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._keys = np.zeros(num_slots, dtype=np.uint64)

    def add(self, slot: int, params: SamplingParams, stop_ids: Sequence[int], prompt: np.ndarray, output: np.ndarray) -> None:
        """Add a request. prompt, output: int64 token ids; output is what was generated before a preemption.

        stop_ids: ids that min_tokens masks. A request that is not greedy must have a seed; the engine core provides it.
        """
        self._params[slot] = params
        self.num_outputs[slot] = len(output)
        if not params.is_greedy:
            assert params.seed is not None, f"the request of slot {slot} is not greedy and has no seed"
            self._keys[slot] = stream_key(params.seed)
        self._processors.add(slot, params, stop_ids, prompt, output)

    def remove(self, slot: int) -> None:
        """Drop the slot's request."""
        self._params[slot] = None
        self._processors.remove(slot)

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Run every Triton kernel once, which compiles it. dtype: of the model's logits. No slot may be taken."""
        token = np.zeros(1, dtype=np.int64)
        for logits_dtype in {dtype, torch.float32}:
            logits_SV = torch.zeros(1, self.vocab_size, dtype=logits_dtype, device=self.device)
            for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=2, top_p=0.5, seed=0)):
                self.add(0, params, [], token, token)
                plan = self.plan([0])
                inputs = {name: torch.from_numpy(values).to(self.device) for name, values in self.inputs(plan).items()}
                self.sample(logits_SV, plan, inputs)
                self.remove(0)
            words = torch.zeros(1, -(-self.vocab_size // 32), dtype=torch.int32, device=self.device)
            mask_tokens(logits_SV, words, torch.zeros(1, dtype=torch.int32, device=self.device))

    def needs_history(self, slots: list[int]) -> bool:
        """Whether one of the slots has logits that depend on the tokens before, so that rows behind a guessed token cannot be sampled
        before the guess is known.
        """
        return self._processors.plan(slots, self.num_outputs[slots]) is not None

    def take(self, num_outputs_of: dict[int, int], tokens_of: dict[int, list[int]]) -> None:
        """By slot, the tokens that requests have generated, and those of them that they gained in a step with drafts."""
        for slot, count in num_outputs_of.items():
            self.num_outputs[slot] = count
        self._processors.extend(tokens_of)

    def plan(self, slots: Sequence[int], offsets: Sequence[int] | None = None, before: np.ndarray | None = None) -> SamplingPlan:
        """Prepare a batch whose row i is the request of slots[i]. offsets: how many rows of the same slot come before each row; None: 0.
        before: int64 [S, D], the draft tokens that these rows check, padded with -1 at the end. The step's tokens
        then count as sampled only after `take`.
        """
        slots_S = np.array(slots, dtype=np.int64)
        offsets_S = np.zeros_like(slots_S) if offsets is None else np.array(offsets, dtype=np.int64)
        params = [self._params_of(slot) for slot in slots]
        logits = self._processors.plan(list(slots), self.num_outputs[slots_S], before)
        greedy, by_options = [], dict[tuple[int, bool], list[int]]()
        for row, row_params in enumerate(params):
            if row_params.is_greedy:
                greedy.append(row)
                continue
            top_k = row_params.top_k if 0 < row_params.top_k < self.vocab_size else 0
            by_options.setdefault((top_k, row_params.top_p < 1.0), []).append(row)
        groups: list[_RandomGroup] = []
        random_rows: list[int] = []
        for (top_k, has_top_p), rows in sorted(by_options.items()):
            if not self._has_triton:
                group_params = [params[row] for row in rows]
                groups.append(self._group(rows, group_params, len(random_rows), top_k, has_top_p, len(params)))
            random_rows.extend(rows)
        logprob_rows = [row for row, row_params in enumerate(params) if row_params.logprobs is not None]
        ruled = [place for place, row in enumerate(logprob_rows) if params[row].speech_rules is not None]
        other_ids = [params[row].logprob_token_ids for row in logprob_rows]
        all_greedy = len(greedy) == len(params)
        return SamplingPlan(
            slots_S=slots_S,
            offsets_S=offsets_S,
            is_plain_greedy=all_greedy and logits is None and not logprob_rows,
            greedy_rows_R=self._upload(np.array(greedy, dtype=np.int64)) if greedy and not all_greedy else None,
            all_greedy=all_greedy,
            groups=groups,
            gpu=self._gpu_rows(params, slots_S) if self._has_triton else {},
            num_random=len(random_rows),
            random_slots=slots_S[random_rows],
            random_offsets=offsets_S[random_rows],
            logits=logits,
            logprob_rows=logprob_rows,
            logprob_rows_L=self._upload(np.array(logprob_rows, dtype=np.int64)) if logprob_rows else None,
            ruled_R=self._upload(np.array(ruled, dtype=np.int64)) if ruled else None,
            # Named tokens take the place of the likeliest ones, as in vLLM.
            logprob_counts=[0 if params[row].logprob_token_ids else params[row].logprobs or 0 for row in logprob_rows],
            logprob_others_Lw=self._upload(_padded(other_ids)) if any(other_ids) else None,
            num_logprob_others=[len(ids) for ids in other_ids],
            valid_steps=FOREVER if logits is None else logits.valid_steps,
            has_drafts=before is not None,
        )

    def inputs(self, plan: SamplingPlan) -> dict[str, np.ndarray]:
        """The step's random inputs by name of the step's array. Call before `sample`, which advances the random streams.

        CPU: "uniforms", float32 [num_random], or nothing without random rows. Other devices: `SAMPLING_FIELDS` [S], or only
        "temperatures" without random rows.
        """
        if self._has_triton:
            return {**plan.gpu, "sample_positions": self.num_outputs[plan.slots_S] + plan.offsets_S} if plan.num_random else plan.gpu
        if not plan.num_random:
            return {}
        return {"uniforms": uniforms(self._keys[plan.random_slots], self.num_outputs[plan.random_slots] + plan.random_offsets)}

    def sample(
        self,
        logits_SV: torch.Tensor,
        plan: SamplingPlan,
        inputs: Mapping[str, torch.Tensor],
        drawn: tuple[torch.Tensor, torch.Tensor] | None = None,
        exclude: Callable[[torch.Tensor], None] | None = None,
    ) -> SampledRows:
        """Sample one token per row.

        logits_SV: raw, any floating dtype, changed only by `exclude`. inputs: the arrays of `inputs`, on the device. drawn: the result of
        `sample_rows` if the model's graph has already computed it. exclude: sets logits of tokens that must not be sampled to -inf,
        in place.
        """
        if not plan.has_drafts:
            self.num_outputs[plan.slots_S] += 1
        plan.valid_steps -= 1
        if plan.is_plain_greedy and exclude is None:
            tokens_S, best_S = drawn or argmax_rows(logits_SV)
            return SampledRows(tokens_S=tokens_S, best_S=best_S, logprobs=None)

        raw_SV = logits_SV
        if plan.logits is not None:
            logits_SV = logits_SV.to(torch.float32, copy=True)
            self._processors.apply(plan.logits, logits_SV)
            drawn = None  # it was drawn from the unchanged logits
        if exclude is not None:
            if logits_SV is raw_SV and plan.logprob_rows_L is not None:
                logits_SV = logits_SV.clone()
            exclude(logits_SV)
            drawn = None
        tokens_S, best_S = drawn or self._choose(logits_SV, plan, inputs)
        if plan.logits is not None and not plan.has_drafts:
            self._processors.observe(plan.logits, tokens_S)
        logprobs = None
        if plan.logprob_rows_L is not None:
            rows_L = plan.logprob_rows_L
            source_LV = (logits_SV if self._logprobs_are_processed else raw_SV)[rows_L]
            if plan.ruled_R is not None:
                source_LV = source_LV.to(torch.float32, copy=True)
                source_LV.index_copy_(0, plan.ruled_R, logits_SV[rows_L[plan.ruled_R]].float())
            if self._logprobs_are_processed:
                params = [self._params_of(slot) for slot in plan.slots_S[plan.logprob_rows].tolist()]
                source_LV = processed_logits(source_LV.float(), params)
            logprobs = row_logprobs(
                source_LV, tokens_S[rows_L], max(plan.logprob_counts), plan.logprob_others_Lw, normalized=self._logprobs_are_normalized
            )
        return SampledRows(tokens_S=tokens_S, best_S=best_S, logprobs=logprobs)

    def _choose(self, logits_SV: torch.Tensor, plan: SamplingPlan, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if plan.all_greedy:
            return argmax_rows(logits_SV)
        num_rows = logits_SV.shape[0]
        if self._has_triton:
            return sample_rows(logits_SV, [inputs[name][:num_rows] for name in SAMPLING_FIELDS])
        randomness = inputs["uniforms"]
        if len(plan.groups) == 1 and plan.groups[0].rows_R is None:
            return _sample_group(logits_SV.float(), plan.groups[0], randomness)
        tokens_S = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        best_S = torch.empty(num_rows, dtype=torch.float32, device=self.device)
        if plan.greedy_rows_R is not None:
            tokens_R, best_R = argmax_rows(logits_SV[plan.greedy_rows_R])
            tokens_S.index_copy_(0, plan.greedy_rows_R, tokens_R)
            best_S.index_copy_(0, plan.greedy_rows_R, best_R.float())
        for group in plan.groups:
            assert group.rows_R is not None
            tokens_R, best_R = _sample_group(logits_SV[group.rows_R].float(), group, randomness)
            tokens_S.index_copy_(0, group.rows_R, tokens_R)
            best_S.index_copy_(0, group.rows_R, best_R)
        return tokens_S, best_S

    def _group(self, rows: list[int], params: list[SamplingParams], begin: int, top_k: int, has_top_p: bool, num_rows: int) -> _RandomGroup:
        min_p = np.array([p.min_p for p in params], dtype=np.float32)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p)
        return _RandomGroup(
            rows_R=None if len(rows) == num_rows else self._upload(np.array(rows, dtype=np.int64)),
            uniform_begin=begin,
            uniform_end=begin + len(rows),
            top_k=top_k,
            inverse_temperature_R1=self._column([1.0 / p.temperature for p in params]),
            log_min_p_R1=self._column(log_min_p) if min_p.any() else None,
            top_p_R1=self._column([p.top_p for p in params]) if has_top_p else None,
        )

    def _gpu_rows(self, params: list[SamplingParams], slots_S: np.ndarray) -> dict[str, np.ndarray]:
        temperatures = np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32)
        if not temperatures.any():
            return {"temperatures": temperatures}
        return {
            "temperatures": temperatures,
            "top_ks": np.array([p.top_k if 0 < p.top_k < self.vocab_size else 0 for p in params], dtype=np.int32),
            "top_ps": np.array([p.top_p for p in params], dtype=np.float32),
            "min_ps": np.array([p.min_p for p in params], dtype=np.float32),
            "seeds": self._keys[slots_S].view(np.int64),
        }

    def _params_of(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        assert params is not None, f"slot {slot} holds no request"
        return params

    def _column(self, values: Sequence[float] | np.ndarray) -> torch.Tensor:
        return self._upload(np.array(values, dtype=np.float32)[:, None])

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return self._platform.upload(array)


def _padded(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """int64 [L, w], filled with 0."""
    padded = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
    for row, ids in enumerate(lists):
        padded[row, : len(ids)] = ids
    return padded


def _sample_group(logits_RV: torch.Tensor, group: _RandomGroup, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    uniform_R1 = uniforms_R[group.uniform_begin : group.uniform_end, None]
    inverse_temperature_R1, log_min_p_R1 = group.inverse_temperature_R1, group.log_min_p_R1
    if group.top_k:
        return sample_top_k(logits_RV, group.top_k, inverse_temperature_R1, log_min_p_R1, group.top_p_R1, uniform_R1)
    if group.top_p_R1 is not None:
        return sample_top_p(logits_RV, inverse_temperature_R1, log_min_p_R1, group.top_p_R1, uniform_R1)
    return sample_unsorted(logits_RV, inverse_temperature_R1, log_min_p_R1, uniform_R1)
