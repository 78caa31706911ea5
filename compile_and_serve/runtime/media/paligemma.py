"""Images for PaliGemma, all of whose prompt's tokens attend to each other (arXiv:2407.07726, §3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.models.vision.names import AHEAD_ARRAY
from compile_and_serve.runtime.media.by_transformers import TransformersProcessor
from compile_and_serve.runtime.media.prepared import content_key


class PaliGemmaProcessor(TransformersProcessor):
    """A prompt with images is one media item as a whole: no step computes a part of it, and no other prompt shares its beginning."""

    takes_rows, reads_prompts = False, True

    def arranged(self, tokens: Sequence[int], items: Sequence[MediaItem]) -> tuple[list[int], list[MediaItem]]:
        """The one item of a prompt with images. A first token that begins texts goes behind the images, and a line break to the end."""
        from compile_and_serve.models.vision.whole_items import joined  # imports torch

        tokens = list(tokens)
        if not items:
            return tokens, []
        tokenizer = self.transformers_processor.tokenizer
        images = [place for place, token in enumerate(tokens) if token == self._token]
        if tokens[0] == tokenizer.bos_token_id and images[0] == 1:
            tokens[: images[-1] + 1] = [*tokens[1 : images[-1] + 1], tokens[0]]
        line_break = tokenizer.encode("\n", add_special_tokens=False)
        if len(line_break) == 1 and tokens[-1] != line_break[0]:
            tokens += line_break
        ids = np.array([tokens])
        arrays = {
            "processed": joined([item.arrays["processed"] for item in items], input_ids=ids),
            AHEAD_ARRAY: StepArray.of(np.arange(len(tokens) - 1, -1, -1, dtype=np.int32)),
        }
        key = content_key(*(item.key for item in items), ids.tobytes())
        return tokens, [MediaItem(key=key, position=0, length=len(tokens), arrays=arrays)]

    def _made(self, **given: Any) -> dict[str, np.ndarray]:
        made = super()._made(**given)
        ids = made["input_ids"]
        made["input_ids"] = ids[:, ids[0] == self._token]  # without what goes around a prompt
        made.pop("labels", None)
        return made
