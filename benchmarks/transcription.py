"""Seconds of audio that are transcribed in a second, of ours and of others in turns. Prints JSON lines.

    python -m benchmarks.transcription FOLDER AUDIO.npy [--files 1 8] [--turns 3] [--peer-python PYTHON --ctranslate2 FOLDER --ggml FILE]

FOLDER: a Whisper checkpoint in Hugging Face's layout. AUDIO.npy: float32, one channel, 16 kHz. `--files N` transcribes N copies, each
rotated by a second, at once; the others take them one after another. All are greedy, in float32, with timestamps, without voice detection.
`--peer-python`: of an environment with faster-whisper, pywhispercpp or transformers; those that it lacks are left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import environment

# Reads paths from its arguments and numbers of files from its input; writes seconds.
_COMMON = """
import sys, time, numpy as np
def serve(transcribe):
    audio = np.load(sys.argv[1])
    transcribe(audio[:160000])
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        for number in range(int(line)):
            transcribe(np.roll(audio, 16000 * number))
        print(time.perf_counter() - begin, flush=True)
"""
_PEERS = {
    "faster-whisper": """
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[3], device="cpu", compute_type="float32", cpu_threads=int(sys.argv[2]))
def transcribe(audio):
    segments, _ = model.transcribe(
        audio, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False, vad_filter=False,
        log_prob_threshold=None, no_speech_threshold=None, compression_ratio_threshold=None)
    list(segments)
serve(transcribe)
""",
    "whisper.cpp": """
from pywhispercpp.model import Model
model = Model(sys.argv[4], n_threads=int(sys.argv[2]), print_progress=False, print_realtime=False, language="en")
serve(lambda audio: model.transcribe(audio.astype(np.float32)))
""",
    "transformers": """
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
torch.set_num_threads(int(sys.argv[2]))
model, extract = WhisperForConditionalGeneration.from_pretrained(sys.argv[5]).eval(), WhisperFeatureExtractor()
def transcribe(audio):
    found = extract(audio, sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest", return_attention_mask=True)
    with torch.inference_mode():
        model.generate(found.input_features, attention_mask=found.attention_mask, return_timestamps=True, do_sample=False, num_beams=1)
serve(transcribe)
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("audio", type=Path)
    parser.add_argument("--files", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=None)
    parser.add_argument("--ctranslate2", default="", help="faster-whisper's folder")
    parser.add_argument("--ggml", default="", help="whisper.cpp's file")
    given = parser.parse_args()
    seconds = len(np.load(given.audio)) / 16000
    common = [str(given.audio), str(given.threads), given.ctranslate2, given.ggml, str(given.folder)]
    ours = "import benchmarks.transcription as one\none.serve_ours()"
    runners = {"ours": _start(sys.executable, ours, common)}
    if given.peer_python is not None:
        runners |= {name: _start(given.peer_python, _COMMON + code, common) for name, code in _PEERS.items()}
    for turn in range(given.turns):
        for name, process in runners.items():
            for count in given.files if process is not None else ():
                assert process is not None
                taken = _ask(process, str(count))
                fields: dict[str, Any] = {"turn": turn, "who": name, "files": count, "audio_s": round(seconds * count, 1)}
                print(
                    json.dumps({**fields, "seconds": round(taken, 3), "rate": round(seconds * count / taken, 1), **environment()}),
                    flush=True,
                )
    for process in runners.values():
        if process is not None:
            process.terminate()


def serve_ours() -> None:
    """As `serve` of the others."""
    from compile_and_serve import LLM
    from compile_and_serve.runtime.audio.options import TranscriptionOptions

    options = TranscriptionOptions(language="en", timestamps=True, falls_back=False)
    audio, threads, folder = np.load(sys.argv[1]), int(sys.argv[2]), sys.argv[5]
    with LLM(folder, dtype="float32", max_num_seqs=16, num_threads=threads) as llm:
        llm.transcribe(audio[:160000], options)
        print("ready", flush=True)
        for line in sys.stdin:
            recordings = [np.roll(audio, 16000 * number) for number in range(int(line))]
            begin = time.perf_counter()
            llm.transcribe(recordings, options)
            print(time.perf_counter() - begin, flush=True)


def _start(python: str, code: str, arguments: list[str]) -> subprocess.Popen[str] | None:
    """A process that is ready; None, and a line that says so, where it does not start."""
    command = [python, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    print(json.dumps({"left_out": code.strip().splitlines()[-1], "why": process.stderr.read().strip().splitlines()[-1:]}), flush=True)
    return None


def _ask(process: subprocess.Popen[str], line: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    for answer in process.stdout:
        try:
            return float(answer)
        except ValueError:
            continue  # a library's own words
    raise RuntimeError("The process ended before it answered.")


if __name__ == "__main__":
    main()
