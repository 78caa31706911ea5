"""Steps of recurrent ops over plain tensors: sequences with slots of their own, which move to new pages now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, StatePart
from compile_and_serve.custom_ops.state.kind import LayerState
from compile_and_serve.custom_ops.state.recurrent import Recurrent, SlotMetadata
from compile_and_serve.custom_ops.step import running

PAGE_BYTES = 80 * 1024


class Slots:
    """The state of one layer for `num_seqs` sequences, filled with what must never be read. dtype: of the checkpoint."""

    def __init__(self, layer: LayerState, num_seqs: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        kind = Recurrent(snapshots=True, dtype=dtype)
        tensors = {str(i): one for i, one in enumerate(layer.tensors(1, dtype))}
        typed = {name: type(one)(shape=one.shape, dtype=kind.dtype_of(one, dtype)) for name, one in tensors.items()}
        layout = kind.layout(typed, 1, PAGE_BYTES)
        self.pages_per_slot, self.num_seqs, self.device = layout.pages_per_slot, num_seqs, device
        num_pages = 3 * num_seqs * layout.pages_per_slot + 1
        pool = torch.full((num_pages, PAGE_BYTES), 0x7F, dtype=torch.uint8, device=device)  # large numbers in every dtype
        self.parts: list[StatePart] = []
        for name, one in layout.tensors.items():
            strides = PAGE_BYTES // one.dtype.itemsize, *(math.prod(one.shape[i + 1 :]) for i in range(len(one.shape)))
            view = pool.view(one.dtype).as_strided((num_pages, *one.shape), strides, one.offset // one.dtype.itemsize)
            self.parts.append((view, torch.tensor(layout.columns[name], dtype=torch.int32, device=device)))
        order = torch.randperm(num_pages - 1)
        self._free = order.tolist()
        self.pages = {seq: self._take() for seq in range(num_seqs)}

    def _take(self) -> list[int]:
        return [self._free.pop() for _ in range(self.pages_per_slot)]

    def step(self, spans: Mapping[int, tuple[int, int]], run: Callable[[], torch.Tensor], moving: tuple[int, ...] = ()) -> torch.Tensor:
        """Run one step of sequences from so many tokens to so many. moving: those that write new pages."""
        read = [list(self.pages[seq]) for seq in spans]
        released = []
        for seq in moving:
            released += self.pages[seq]
            self.pages[seq] = self._take()
        write = [self.pages[seq] for seq in spans]
        new = [end - begin for begin, end in spans.values()]
        ints = {"dtype": torch.int32, "device": self.device}
        metadata = SlotMetadata(
            query_start_loc=torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], **ints),
            seq_lens=torch.tensor([end for _, end in spans.values()], **ints),
            num_seqs=len(spans),
            num_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(end for _, end in spans.values()),
            read_pages=torch.tensor(read, **ints),
            write_pages=torch.tensor(write, **ints),
        )
        before = [self.parts[0][0][page].clone() for page in released]
        with running({RECURRENT_STATES: metadata}):
            out = run()
        assert all(kept.equal(self.parts[0][0][page]) for kept, page in zip(before, released, strict=True))  # a snapshot stays as it is
        self._free[:0] = released
        return out


# Each step: sequence → (tokens before, tokens after), and who moves to new pages. Prompts in chunks, decodes, drafts of which some are
# rejected, a boundary that is crossed by each of them, and a state that is taken up again at its last boundary.
SCRIPT: list[tuple[dict[int, tuple[int, int]], tuple[int, ...]]] = [
    ({0: (0, 1), 1: (0, 33), 2: (0, 16)}, ()),
    ({0: (1, 2), 1: (33, 100), 2: (16, 17)}, (2,)),
    ({1: (100, 101), 2: (17, 22), 0: (2, 15)}, ()),
    ({0: (15, 16), 1: (101, 117), 2: (18, 23)}, (1,)),
    ({0: (16, 17), 1: (103, 110), 2: (23, 33)}, ()),
    ({0: (17, 18), 1: (109, 113), 2: (31, 47)}, (0,)),
    ({0: (18, 90), 2: (47, 63), 1: (112, 113)}, ()),
    ({0: (90, 91), 2: (63, 64), 1: (113, 180)}, (0, 2)),
    ({0: (80, 81), 2: (64, 65), 1: (176, 177)}, (0, 1)),
    ({0: (81, 97), 2: (65, 66), 1: (177, 178)}, ()),
]
