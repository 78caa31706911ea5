"""Which items beside prompts are encoded in a step: those of the requests that begin in it, within a budget of encoder tokens."""

from __future__ import annotations

import msgspec
import numpy as np

from compile_and_serve.custom_ops.step_data import CROSS_SPANS_ARRAY, PromptContents, StepArray
from compile_and_serve.runtime.scheduler.encoder_cache import EncoderCache
from compile_and_serve.runtime.scheduler.item_blocks import ItemBlocks, items_of
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem, EncoderInfo


class ItemQueue(EncoderCache):
    """As `EncoderCache`, but what is encoded lies in the requests' blocks (`ItemBlocks`), which hold it until a request ends.

    A request whose items together exceed the budget begins in a step that encodes no other's.
    """

    def __init__(self, info: EncoderInfo) -> None:
        super().__init__(info)
        self.blocks: ItemBlocks | None = None

    def check(self, contents: PromptContents | None) -> None:
        super().check(contents)
        has_items = contents is not None and any(item.is_beside for item in contents.media)
        if self.info.is_required and not has_items:
            raise ValueError("This model reads an encoder's output beside the prompt: the request must bring what the encoder reads.")
        if contents is not None and self.blocks is not None:
            self.blocks.check_size([item for item in contents.media if item.is_beside])

    def num_rows(self, request: Request) -> int:
        """Rows that the tokens of a request read."""
        return sum(item.length for item in items_of(request))

    def spans(self, request: Request) -> list[StepArray]:
        """`CROSS_SPANS_ARRAY` of a request whose tokens read one of its items each, from the item's first token on."""
        assert self.blocks is not None
        found, first_page = [], 0
        for item in items_of(request):
            if (array := item.arrays.get(CROSS_SPANS_ARRAY)) is not None:
                spans_T2 = array.rows(array.start, array.end).copy()
                spans_T2[:, 0] = first_page
                found.append(StepArray.of(np.minimum(spans_T2, [first_page, item.length]).astype(np.int32), start=array.start))
            first_page += self.blocks.num_pages(item)
        return found

    def has_room(self, request: Request, start: int, budget: int) -> bool:
        """Whether the step can begin the request, or go on with it."""
        if request.block_ids:
            return True
        assert self.blocks is not None
        wanted = self.blocks.num_unencoded(request)
        return wanted <= self._budget or self._budget == self.info.max_tokens

    def take(self, request: Request, start: int, end: int) -> int:
        assert self.blocks is not None
        for item, pages in self.blocks.unencoded.pop(request.request_id, ()):
            self._budget -= item.length
            self.num_encoded += 1
            given = {
                name: msgspec.structs.replace(array, start=array.start - item.position)
                for name, array in item.arrays.items()
                if name in self.arrays
            }
            one = EncodeItem(request_id=request.request_id, position=0, length=item.length, page_ids=pages, arrays=given)
            self._items.append(one)
        return end

    def release(self, request: Request) -> None:
        """The blocks are freed with the request's others."""

    def forget(self) -> None:
        """They are forgotten with the pool's other contents."""
