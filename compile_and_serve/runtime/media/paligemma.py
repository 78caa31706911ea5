"""Images of PaliGemma, which stand before the text; the beginning-of-sequence token follows them, and a line break ends the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.by_transformers import TransformersProcessor
from compile_and_serve.runtime.media.prepared import PreparedMedia


class PaliGemmaProcessor(TransformersProcessor):
    """As `TransformersProcessor`. An item is the image's tokens alone, without the text around them that transformers adds."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        """Raises `MediaError` if the folder has no processor that can be used."""
        super().__init__(config, folder)
        tokenizer = self.transformers_processor.tokenizer
        self._bos = int(tokenizer.bos_token_id)
        self._end: list[int] = tokenizer("\n", add_special_tokens=False)["input_ids"]

    def with_placeholders(self, prompt: Sequence[int], media: Sequence[PreparedMedia]) -> Sequence[int]:
        """As transformers' processor orders them: images, unless placeholders stand elsewhere, then BOS, the text and a line break."""
        ids = list(prompt)
        if not media:
            return ids
        if self._token not in ids:
            ids[:0] = [self._token] * len(media)
        ids = [token for token in ids if token != self._bos]
        behind = len(ids) - ids[::-1].index(self._token)
        ids.insert(behind, self._bos)
        return ids if ids[-len(self._end) :] == self._end else ids + self._end

    def _made(self, **given: Any) -> dict[str, np.ndarray]:
        made = super()._made(**given)
        made["input_ids"] = made["input_ids"][:, made["input_ids"][0] == self._token]
        return made
