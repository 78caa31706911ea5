"""`DeviceDrafts`: draft tokens that are made on the device and stay there, by batch slot.

Shape legend: S sequences that get drafts, K draft tokens of a sequence at most, R batch slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from compile_and_serve.compiler.cudagraphs.work_graphs import Work, WorkGraphs
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.staged_arrays import StagedArrays
from compile_and_serve.custom_ops.step import INPUT_IDS, Step
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.compiled_drafter import CompiledDrafter
from compile_and_serve.runtime.sampling.decode_step import DecodeStep
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.side_model import SideModel
from compile_and_serve.runtime.speculative_config import SpeculativeConfig

StepOf = Callable[[int], DecodeStep]


class SlotTable(Protocol):
    """What a drafter reads of `BlockTables`."""

    num_columns: int

    def of_slots(self, slots_S: torch.Tensor) -> torch.Tensor: ...

    def commit(self) -> None: ...


class TargetBatch(Protocol):
    """What a drafter reads of the runner's `InputBatch`."""

    num_slots: int
    max_sampled: int
    last_tokens: torch.Tensor
    num_new_tokens: torch.Tensor
    tokens_per_page: dict[str, int]

    @property
    def token_tables(self) -> Mapping[str, SlotTable]: ...

    def slot_of(self, request_id: str) -> int: ...

    def draft_ends(self, request_id: str) -> frozenset[int]: ...

    def known_tokens(self, request_id: str) -> np.ndarray: ...

    def lengths(self, slots_S: np.ndarray) -> np.ndarray: ...


class TargetLayout(Protocol):
    """What a drafter reads of the runner's `BatchLayout`."""

    version: int
    request_ids: list[str]
    slots_S: np.ndarray
    num_decodes: int
    is_decode_only: bool
    num_tokens: int
    num_logits: int
    sampled_ids: list[str]
    sampled_slots: np.ndarray
    sampled_counts: list[int]
    sampled_drafts: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A step of the target. layout: None: a dummy step. sampled: int64, the token of each sampled row; None: no row is."""

    step: Step
    layout: TargetLayout | None
    outputs: Mapping[str, torch.Tensor]
    sampled: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSetup:
    """What the runner gives to a drafter.

    max_len: of a sequence, in tokens. num_pages: of the target. compiled: None: the method has no model. allocate_state: the keys and
    values of such a model in as many pages, zeroed, by name. graphs: None: nothing is captured.
    """

    config: SpeculativeConfig
    batch: TargetBatch
    device: torch.device
    max_len: int
    num_pages: int
    compiled: CompiledDrafter | None
    allocate_state: Callable[[SideModel], dict[str, torch.Tensor]]
    graphs: WorkGraphs | None


class DeviceDrafts(ABC):
    """Call `follow` after each step of the target, and `propose` before steps with drafts.

    drafts: int64 [R + 1, K], -1 where there is none, with a row for padding sequences. `put_drafts` copies them into the step's inputs;
    `known_drafts` brings them to the host. Only `known_drafts` waits for the device.
    """

    def __init__(self, setup: DraftSetup) -> None:
        batch, device, num_drafts = setup.batch, setup.device, setup.config.num_speculative_tokens
        self._batch, self._num_drafts = batch, num_drafts
        self._platform = platform_of(device)
        self.drafts = torch.full((batch.num_slots + 1, num_drafts), -1, dtype=torch.int64, device=device)
        # What `propose` is asked for, of each sequence: batch slot, position of the last token, number of drafts, last token; whether the
        # device adds what the slot's sequence has gained since.
        fields = ("slots", "positions", "counts", "last_tokens", "is_ahead")
        self._asked = StagedArrays({name: (np.int64, aligned(batch.num_slots)) for name in fields}, device)

    def add(self, slot: int, token_ids: np.ndarray, params: SamplingParams, num_prompt: int) -> None:  # noqa: B027 (some need not know)
        """A request has begun in a batch slot, with these tokens (int64), the first `num_prompt` of which are its prompt."""

    def page_parts(self) -> dict[str, list[torch.Tensor]]:
        """What the drafter keeps under the pages of the target's groups, by their names: see `PageMemory`."""
        return {}

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec | None:
        """The model that drafts; None: there is none. Raises the `ValueError` family with one sentence."""
        return None

    @abstractmethod
    def follow(self, target: TargetStep, *, keeps_state_only: bool = False) -> None:
        """Take in the target's step that was launched last. keeps_state_only: no drafts are wanted after this step."""

    @abstractmethod
    def _make_drafts(self, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        """Write `drafts` of the first `num_seqs` sequences of `_asked`, up to `num_drafts` each. size: of `_padded_size`."""

    def work(self, size: int, plain_step: StepOf, drafted_step: StepOf | None) -> Iterator[Work]:
        """What to capture for so many sequences. plain_step, drafted_step: of decodes, which `follow` follows; each lies in memory until
        the next is made. drafted_step: None: no step of so many has drafts.
        """
        return iter(())

    def can_run_ahead(self, num_drafted: int, size: int, query_len: int) -> bool:
        """Whether `propose` for `num_drafted` sequences, and `follow` after a step of `size` with padding and `query_len` tokens each, need
        nothing from the host that it learns from the step before.
        """
        return True

    def propose(self, last_tokens: Mapping[str, tuple[int, int]], wanted: Mapping[str, Sequence[int]], *, is_ahead: bool = False) -> None:
        """Draft tokens of sequences, from their last tokens on. last_tokens: of `SchedulerOutput`; those that are not wanted get no drafts.
        wanted: sequence → as many entries as tokens are wanted. is_ahead: the device adds what the sequences have gained since.
        """
        names = [*wanted, *(name for name in last_tokens if name not in wanted)]
        slots = [self._batch.slot_of(name) for name in names]
        counts = [len(draft) for draft in wanted.values()]
        asked = [(*last_tokens[name], count) for name, count in zip(names, counts, strict=False)]
        size = self._padded_size(len(wanted))
        self._ask(slots, asked, size, is_ahead=is_ahead)
        self._make_drafts(len(wanted), max(counts), size, is_ahead=is_ahead)
        if len(names) > len(wanted):
            self.drafts.index_fill_(0, self._asked.device["slots"][len(wanted) : len(names)], -1)

    def _padded_size(self, num_drafted: int) -> int:
        """The number of sequences to pad `_asked` to; 0: no padding."""
        return 0

    def _known_positions(self) -> torch.Tensor:
        """int64: the position of each asked sequence's last token."""
        asked = self._asked.device
        return asked["positions"] + asked["is_ahead"] * self._batch.num_new_tokens[asked["slots"]]

    def _last_tokens(self, num_seqs: int) -> torch.Tensor:
        """int64 [S]: the last token of each of the first asked sequences."""
        asked = {name: values[:num_seqs] for name, values in self._asked.device.items()}
        return torch.where(asked["is_ahead"] > 0, self._batch.last_tokens[asked["slots"]], asked["last_tokens"])

    def _write_drafts(self, drafts_SK: torch.Tensor) -> None:
        """Write `drafts` of the first asked sequences: as many as were asked for, and -1 behind them. drafts_SK: int64, K or fewer."""
        num_seqs, num_drafts = drafts_SK.shape
        slots_S, counts_S = (self._asked.device[name][:num_seqs] for name in ("slots", "counts"))
        is_wanted = torch.arange(num_drafts, device=slots_S.device) < counts_S[:, None]
        drafts_SK = drafts_SK.masked_fill(~is_wanted, -1)
        self.drafts.index_copy_(0, slots_S, F.pad(drafts_SK, (0, self._num_drafts - num_drafts), value=-1))

    def _ask(self, slots: Sequence[int], asked: Sequence[tuple[int, int, int]], size: int, *, is_ahead: bool = False) -> None:
        """Fill and upload `_asked`, with padding up to `size` sequences. asked: known tokens, the last of them, number of drafts."""
        host, num_seqs = self._asked.rotate(), len(asked)
        end = aligned(max(len(slots), size))
        host["slots"][: len(slots)] = slots
        host["slots"][len(slots) : end] = self._batch.num_slots
        host["is_ahead"][:end] = is_ahead
        for index, (known, token, count) in enumerate(asked):
            host["positions"][index], host["last_tokens"][index], host["counts"][index] = known - 1, token, count
        for name in ("positions", "last_tokens", "counts"):
            host[name][num_seqs:end] = 0
        self._asked.upload()

    def put_drafts(self, step: Step, layout: TargetLayout) -> None:
        """Copy the drafts into a step's inputs. In `layout.sampled_drafts` they are 0; -1 stands for padding. A missing
        draft is token 0, which is never accepted.
        """
        starts = next(iter(step.metadata.values())).query_start_loc_cpu
        places = [np.flatnonzero(draft >= 0) for draft in layout.sampled_drafts[: layout.num_decodes]]
        rows = [starts[row] + 1 + place for row, place in enumerate(places)]
        sources = [slot * self._num_drafts + place for slot, place in zip(layout.slots_S, places, strict=False)]
        packed = self._upload(np.stack((np.concatenate(rows), np.concatenate(sources))), through_pinned=True)
        step.inputs[INPUT_IDS.name].index_copy_(0, packed[0], self.drafts.view(-1)[packed[1]].clamp(min=0))

    def download(self) -> torch.Tensor:
        """int64 [R + 1, K]: the drafts by batch slot, on the host: see `Platform.download`. -1 where there is none."""
        return self._platform.download(self.drafts)

    def known_drafts(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """The drafts of the last `propose`, once the device has made them. Behind a token where a draft has to end there are only -1."""
        slots = [self._batch.slot_of(name) for name in wanted]
        given, drafts, are_changed = self.drafts.cpu().numpy(), {}, False
        for (name, asked), slot in zip(wanted.items(), slots, strict=True):
            draft, ends = given[slot, : len(asked)].tolist(), self._batch.draft_ends(name)
            end = next((i for i, token in enumerate(draft) if token in ends), len(draft))
            drafts[name] = draft[:end] + [-1] * (len(draft) - end)
            if end < len(draft):
                given[slot, end:] = -1
                are_changed = True
        if are_changed and not self._platform.shares_host_memory:
            self.drafts.copy_(self._upload(given))
        return drafts

    def _upload(self, array: np.ndarray, *, through_pinned: bool = False) -> torch.Tensor:
        return self._platform.upload(np.ascontiguousarray(array), through_pinned=through_pinned)


def aligned(count: int) -> int:
    """The next multiple of 4: rows of int64 then begin at multiples of 16 bytes, which compiled kernels take for granted."""
    return -(-count // 4) * 4
