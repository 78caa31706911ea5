"""Log-mel features are those of transformers' feature extractor."""

from __future__ import annotations

import numpy as np
import pytest

from compile_and_serve.runtime.audio.mel import log_mel


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("length", [16000 * 3 + 77, 417, 16000 * 42])
def test_they_are_those_of_transformers(num_bands: int, length: int) -> None:
    """Shorter than a window and longer than one; longer than what is computed at once."""
    from transformers import WhisperFeatureExtractor

    generator = np.random.default_rng(length)
    samples = (np.sin(np.arange(length) / 9.0) * 0.3 + generator.standard_normal(length) * 0.01).astype(np.float32)
    extract = WhisperFeatureExtractor(feature_size=num_bands)
    wanted = extract(samples, sampling_rate=16000, return_tensors="np", truncation=False, padding="longest").input_features[0].T
    ours = log_mel(samples, num_bands)
    assert ours.shape == (length // 160, num_bands)
    np.testing.assert_allclose(ours, wanted[: len(ours)], atol=2e-4)
