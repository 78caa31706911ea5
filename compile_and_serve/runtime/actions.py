"""`ActionSpace`: what tokens of a vision-language-action model mean for a robot (OpenVLA, arXiv:2406.09246)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.info import MediaInfo

ACTION_ARCHITECTURES = ("OpenVLAForActionPrediction",)


class ActionError(ValueError):
    """No action can be given. The message is one sentence for the user."""


class ActionSpace:
    """Each token is a bin of one number between -1 and 1, which the statistics of a dataset turn into the robot's units.

    The last token of the tokenizer's vocabulary is the first bin, and so on backwards. config: the model's config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config") or {}
        self._vocab_size = text.get("vocab_size", 32000) - config.get("pad_to_multiple_of", 64)
        edges = np.linspace(-1.0, 1.0, config.get("n_action_bins", 256))
        self._centers = (edges[:-1] + edges[1:]) / 2
        given = config.get("norm_stats") or {}
        self._statistics = {name: one["action"] for name, one in given.items() if {"q01", "q99"} <= set(one.get("action") or ())}

    @classmethod
    def of(cls, info: MediaInfo | None) -> ActionSpace | None:
        """None for a model that gives no actions."""
        config = {} if info is None else json.loads(info.config)
        return cls(config) if (config.get("architectures") or [""])[0] in ACTION_ARCHITECTURES else None

    def num_tokens(self, unnorm_key: str | None) -> int:
        """How many tokens, and numbers, an action has. Raises `ActionError`."""
        return len(self._of_dataset(unnorm_key)["q01"])

    def action(self, token_ids: Sequence[int], unnorm_key: str | None) -> list[float]:
        """The numbers that an answer means.

        token_ids: of the answer; those behind the action's are ignored. unnorm_key: of the dataset in config.json's `norm_stats` whose
        statistics apply; None: of the only one. A token that is no action's counts as the nearest bin.
        number = q01 + (bin + 1) / 2 · (q99 - q01) where the mask is true, else the bin's own. Raises `ActionError`.
        """
        statistics = self._of_dataset(unnorm_key)
        low, high = np.asarray(statistics["q01"], np.float64), np.asarray(statistics["q99"], np.float64)
        if len(token_ids) < len(low):
            raise ActionError(f"An action has {len(low)} tokens, but the answer has {len(token_ids)}.")
        bins = np.clip(self._vocab_size - np.asarray(token_ids[: len(low)], np.int64) - 1, 0, len(self._centers) - 1)
        values = self._centers[bins]
        mask = np.asarray(statistics.get("mask", [True] * len(low)), bool)
        return [float(one) for one in np.where(mask, low + (values + 1) / 2 * (high - low), values)]

    def _of_dataset(self, unnorm_key: str | None) -> Mapping[str, Any]:
        known = sorted(self._statistics)
        if unnorm_key is None and len(known) == 1:
            unnorm_key = known[0]
        if unnorm_key is None or unnorm_key not in self._statistics:
            given = "is missing" if unnorm_key is None else f"is {unnorm_key!r:.100}"
            raise ActionError(f"unnorm_key {given}: this model has the statistics of {', '.join(known) or 'no dataset'}.")
        return self._statistics[unnorm_key]
