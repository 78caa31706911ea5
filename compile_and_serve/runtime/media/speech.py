"""Audio for classes of the transformers package that read speech, prepared by their own processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.runtime.media.audio import MIN_SECONDS, AudioLimits
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia
from compile_and_serve.runtime.media.transformers_files import first_line, load_processor, packed_arrays, token_arrays

DEFAULT_MAX_SECONDS = 600.0
_SOME_SECONDS = 10.0
_BEGIN_AUDIO = "[BEGIN_AUDIO]"  # of Voxtral's prompts


class SpeechProcessor(NoMedia):
    """One item is the whole text of an audio: its placeholders, and what the processor puts around them.

    config: the model's config.json. folder: of the checkpoint. max_seconds: the longest audio that is taken; None: 600, or less where the
    processor takes less.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, max_seconds: float | None = None) -> None:
        """Raises `MediaError` if the folder has no processor that can be used."""
        import transformers

        self.transformers_processor: Any = load_processor(folder)
        loaded = self.transformers_processor
        extractor = getattr(loaded, "feature_extractor", None) or getattr(loaded, "audio_processor", None)
        if extractor is None or getattr(loaded, "audio_token", None) is None:
            raise MediaError(f"{type(loaded).__name__} of {folder.name} prepares no audio that a prompt has placeholders for.")
        self._rate = int(extractor.sampling_rate)
        self._token = int(loaded.tokenizer.convert_tokens_to_ids(loaded.audio_token))
        model = getattr(transformers, (config.get("architectures") or [""])[0], None)
        self.three_rows = hasattr(model, "get_rope_index")
        self._cuts_windows = hasattr(loaded, "_retrieve_input_features")  # Voxtral's, whose call takes no audio
        most = getattr(loaded, "max_audio_len", None)
        if most is None and not self._cuts_windows and hasattr(extractor, "n_samples"):
            most = extractor.n_samples / self._rate  # it would cut off the rest
        self._limits = AudioLimits(rate=self._rate, max_seconds=float(min(max_seconds or DEFAULT_MAX_SECONDS, most or np.inf)))
        audio_config = config.get("audio_config") or {}
        self._window_tokens = int(audio_config.get("max_source_positions", 1500)) // 4

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {self._token: "audio"}

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return f"{type(self.transformers_processor).__name__} {self._limits.rate}"

    @property
    def audio_limits(self) -> AudioLimits:
        """Of one audio."""
        return self._limits

    def with_options(self, options: Mapping[str, Any]) -> SpeechProcessor:
        """There are none. Raises `MediaError`."""
        raise MediaError(f"mm_processor_kwargs has {min(options)!r:.100}, but this model's audio has no settings.")

    def audio(self, samples: np.ndarray, key: bytes) -> PreparedMedia:
        """samples: float32 [N] at the rate of `audio_limits`. Raises `MediaError`."""
        try:
            arrays = self._windows(samples) if self._cuts_windows else self._called(samples)
        except MediaError:
            raise
        except Exception as error:  # of audio that the processor cannot take
            raise MediaError(f"The model's processor cannot take the audio: {first_line(error)}.") from None
        ids = arrays["input_ids"]
        length = ids.shape[1]
        rows = np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1) if self.three_rows else None
        given: dict[str, StepArray] = {"processed": packed_arrays(arrays)}
        item = PreparedItem(offset=0, length=length, arrays=given, relative=rows, advance=length)
        return PreparedMedia(kind="audio", key=key, tokens=ids[0].tolist(), items=[item])

    def shortest_and_longest(self, max_tokens: int) -> tuple[PreparedItem, PreparedItem]:
        """Items of silence: of the shortest audio, and of the longest one that `max_tokens` tokens have room for. Lowers the limit to it.

        Raises `MediaError`.
        """
        shortest, some = self._silence(MIN_SECONDS), self._silence(min(_SOME_SECONDS, self._limits.max_seconds))
        seconds = self._limits.max_seconds
        if (room := _SOME_SECONDS * max_tokens / some.length) < seconds:
            seconds = room
        while (longest := self._silence(seconds)).length > max_tokens:
            seconds = 0.9 * seconds - 1.0
            if seconds < MIN_SECONDS:
                raise MediaError(f"The model's context of {max_tokens} tokens has no room for audio.")
        self._limits = AudioLimits(rate=self._rate, max_seconds=seconds)
        return shortest, longest

    def _silence(self, seconds: float) -> PreparedItem:
        return self.audio(np.zeros(int(seconds * self._rate), np.float32), b"").items[0]

    def _called(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        loaded = self.transformers_processor
        options = {} if hasattr(loaded, "audio_processor") and not hasattr(loaded, "image_token") else {"sampling_rate": self._rate}
        made = loaded(audio=[samples], text=[loaded.audio_token], add_special_tokens=False, return_tensors="pt", **options)
        return token_arrays(made)

    def _windows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Voxtral's: windows of 30 seconds, with a token for the beginning of the audio."""
        from transformers.models.voxtral.processing_voxtral import VoxtralProcessorKwargs

        loaded = self.transformers_processor
        options = {**VoxtralProcessorKwargs._defaults["audio_kwargs"], "return_tensors": "pt"}
        positions = options.pop("max_source_positions")
        features = loaded._retrieve_input_features([samples], positions, **options)
        ids = [self._token] * (len(features) * self._window_tokens)
        begin = loaded.tokenizer.convert_tokens_to_ids(_BEGIN_AUDIO)
        if isinstance(begin, int) and begin != loaded.tokenizer.unk_token_id:
            ids.insert(0, begin)
        return {"input_ids": np.array([ids]), "input_features": features.numpy()}
