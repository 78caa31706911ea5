"""`MediaInfo`: what processes that prepare media must know of the model."""

from __future__ import annotations

import msgspec


class MediaInfo(msgspec.Struct, kw_only=True, frozen=True):
    """config: the model's config.json, with `image_processor`, as JSON. folder: of the checkpoint. limits: kind → items of a prompt.
    domains: from which media may be downloaded. by_transformers: the processor is the transformers package's. max_audio_seconds: the
    longest audio that is taken; None: as the processor has it. sees_ahead: tokens of an image attend to later ones of it. embeds:
    requests may bring rows of the encoder in place of an image.
    """

    config: bytes
    folder: str
    limits: dict[str, int] = {}
    domains: list[str] = []
    by_transformers: bool = False
    max_audio_seconds: float | None = None
    sees_ahead: bool = False
    embeds: bool = False
