"""Whisper with random weights: the encoder alone, and whole requests with forced tokens. Prints JSON lines.

    python -m benchmarks.transcription_gpu CONFIG [--files 64] [--tokens 200] [--together 8 32] [--dtype bfloat16] [--device auto]

CONFIG: the folder of a config.json; no tokenizer is needed.

encoder: `files` windows of random features, `together` of them in a step. `encoder_s`: of the steps alone, which give the keys and values
    of cross-attention; `filled_s`: with what fills and uploads their inputs. Features are there already.
requests: `files` requests at once, each with a window and `tokens` tokens, greedily, whatever they are. `features_s`: of all windows' mel
    features, one after another, as `LLM.transcribe` computes them; `engine_s`: of the requests after that. Rates with `whole` count both.

Requests of other windows run before, so that nothing is compiled, captured or found in a cache while these are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_timing import emit
from compile_and_serve import LLM, SamplingParams
from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.audio.mel import HOP, SAMPLE_RATE, log_mel

ROUNDS = 5
PROMPT_TOKENS = 4  # as with a language, a task and no timestamps


class Windows:
    """Items of random features, each another one. rows: of the encoder, two frames of 10 ms each."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rows, self.bands = int(config["max_source_positions"]), int(config["num_mel_bins"])
        self.seconds = self.rows * 2 * HOP / SAMPLE_RATE
        self._begin = int(config["decoder_start_token_id"])
        self._rng, self._number = np.random.default_rng(0), 0

    def prompt(self) -> dict[str, Any]:
        self._number += 1
        mel = StepArray.of(self._rng.standard_normal((self.rows, 2, self.bands), dtype=np.float32))
        item = MediaItem(key=b"%d" % self._number, position=0, length=self.rows, is_beside=True, arrays={"mel": mel})
        return {"prompt_token_ids": [self._begin, *range(1, PROMPT_TOKENS)], "media": [item]}

    def features_s(self, count: int) -> float:
        """Seconds for the features of so many recordings."""
        samples = self._rng.uniform(-0.5, 0.5, round(self.seconds * SAMPLE_RATE)).astype(np.float32)
        log_mel(samples, self.bands)
        begin = time.perf_counter()
        for number in range(count):
            log_mel(np.roll(samples, 1000 * number), self.bands)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--together", type=int, nargs="+", default=[8, 32], help="files in a step of the encoder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args()
    if any(given.files % together for together in given.together):
        parser.error(f"--files must be a multiple of each of --together, got {given.files} and {given.together}")
    windows = Windows(json.loads((given.config / "config.json").read_text()))
    most = max(given.together)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": given.device, "dtype": given.dtype}
    options |= {"max_num_seqs": given.files, "max_encoder_tokens": most * windows.rows}
    common = {"model": given.config.name, "files": given.files, "audio_s": round(given.files * windows.seconds, 1), "dtype": given.dtype}
    with LLM(str(given.config), **options) as llm:
        _settle(llm)
        for together in given.together:
            emit(work="encoder", **common, **_encoder(llm, windows, given.files, together))
        emit(work="requests", encoder_files=most, **common, **_requests(llm, windows, given.files, given.tokens))


def _settle(llm: LLM) -> None:
    while llm.core.idle():
        pass


def _encoder(llm: LLM, windows: Windows, files: int, together: int) -> dict[str, Any]:
    """Of all files, in as many steps as that takes."""
    worker = llm.core.executor.worker  # type: ignore[attr-defined]
    encoder, wait = worker.runner.encoder, worker.platform.synchronize
    lengths = [windows.rows] * together
    arrays = [{name: [array] for name, array in windows.prompt()["media"][0].arrays.items()} for _ in range(together)]
    step = encoder._step(lengths, arrays)

    def run() -> None:
        for _ in range(files // together):
            encoder._steps.run(step)
        wait()

    def fill_and_run() -> None:
        for _ in range(files // together):
            encoder._steps.run(encoder._step(lengths, arrays))
        wait()

    alone, filled = (_seconds(work) for work in (run, fill_and_run))
    times = {"encoder_s": round(statistics.median(alone), 4), "filled_s": round(statistics.median(filled), 4)}
    return {"together": together, **times, "audio_per_s": round(files * windows.seconds / statistics.median(alone), 1)}


def _seconds(work: Callable[[], object]) -> list[float]:
    """Of each round, after some that compile kernels and capture graphs."""
    times = []
    for _ in range(3 + ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[3:]


def _requests(llm: LLM, windows: Windows, files: int, tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    times = []
    for number in range(2 + 3):
        prompts = [windows.prompt() for _ in range(files)]
        begin = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        if number >= 2:
            times.append(time.perf_counter() - begin)
        assert all(len(one.outputs[0].token_ids) == tokens for one in results), "a request has fewer tokens than it was forced to"
        _settle(llm)
    engine_s, features_s, audio_s = statistics.median(times), windows.features_s(files), files * windows.seconds
    row: dict[str, Any] = {"tokens": tokens, "engine_s": round(engine_s, 4), "features_s": round(features_s, 4)}
    for name, seconds in (("", engine_s), ("whole_", engine_s + features_s)):
        row |= {f"{name}tokens_per_s": round(files * tokens / seconds, 1), f"{name}audio_per_s": round(audio_s / seconds, 1)}
    return row | {"runs_s": [round(one, 4) for one in times]}


if __name__ == "__main__":
    main()
