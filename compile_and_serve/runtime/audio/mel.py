"""Log-mel features of sound, as Whisper was trained on (arXiv:2212.04356): what the encoder reads. No torch: it runs in API processes.

Shape legend: N samples, F frames of 10 ms, M mel bands, Q frequencies.
"""

from __future__ import annotations

from functools import cache

import numpy as np

SAMPLE_RATE = 16000
HOP, FFT_SIZE = 160, 400  # samples: between frames, and that a frame reads
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
_FRAMES_AT_ONCE = 4096  # so that a long recording takes no more memory than its features


def log_mel(samples_N: np.ndarray, num_bands: int) -> np.ndarray:
    """float32 [F, M] with F = N // 160. samples_N: float32, mono, 16 kHz, from -1 to 1.

    A frame is the power spectrum of 400 samples around its first one, under a periodic Hann window, with the ends reflected. In mel bands
    (Slaney's scale and norm) as log10, no more than 8 below the largest value of the whole, plus 4, divided by 4.
    """
    num_frames = len(samples_N) // HOP
    if num_frames == 0:
        return np.zeros((0, num_bands), dtype=np.float32)
    half = FFT_SIZE // 2
    padded_N = np.pad(samples_N.astype(np.float32, copy=False), half, mode="reflect" if len(samples_N) > half else "constant")
    window = _hann()
    filters_QM = mel_filters(num_bands)
    frames = np.lib.stride_tricks.sliding_window_view(padded_N, FFT_SIZE)[::HOP]
    log_FM = np.empty((num_frames, num_bands), dtype=np.float32)
    for begin in range(0, num_frames, _FRAMES_AT_ONCE):
        end = min(begin + _FRAMES_AT_ONCE, num_frames)
        spectrum_FQ = np.fft.rfft(frames[begin:end] * window, axis=1)
        power_FQ = (spectrum_FQ.real**2 + spectrum_FQ.imag**2).astype(np.float32)
        np.log10(np.maximum(power_FQ @ filters_QM, 1e-10), out=log_FM[begin:end])
    np.maximum(log_FM, log_FM.max() - 8.0, out=log_FM)
    return (log_FM + 4.0) / 4.0


@cache
def _hann() -> np.ndarray:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT_SIZE) / FFT_SIZE)).astype(np.float32)


@cache
def mel_filters(num_bands: int) -> np.ndarray:
    """float32 [Q, M]: triangles that are equally far from each other on Slaney's scale from 0 to 8000 Hz, each of area 1."""
    edges = _hertz(np.linspace(0.0, float(_mel(np.array(SAMPLE_RATE / 2))), num_bands + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))).astype(np.float32)


def _mel(hertz: np.ndarray) -> np.ndarray:
    """Linear below 1000 Hz, logarithmic above."""
    return np.where(hertz < 1000.0, 3.0 * hertz / 200.0, 15.0 + 27.0 / np.log(6.4) * np.log(np.maximum(hertz, 1.0) / 1000.0))


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15.0, 200.0 * mel / 3.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)))
