"""Images: the encoder, text beside images, and preprocessing. Prints JSON lines.

    python -m benchmarks.vision CONFIG [--device auto] [--side 1024] [--images 16] [--requests 64] [--tokens 64]

CONFIG: the folder of a config.json of Qwen2.5-VL or Qwen3-VL; weights are random.

`preprocess_ms`: of one image on one core, after decoding; `decode_ms`: of its JPEG file. `encoder_ms`: one step of all images, and its
share of the rate of a product of 8192 × 8192 × 8192. `text_ms`: a decode step of 1 and of 64 sequences of text, of this model and of the
text model alone. `mixed_s`: requests with an image each; `ratio`: to the sum of `encoder_s`, the encoder's time of these images alone, and
`text_s`, requests with as many tokens of text in place of the image's. Where the rest goes: `prepare_s` is what the threads need to prepare
all images while nothing else runs, on `cores`; `engine_s` is the time of the requests whose images are prepared already. Requests of other
images and texts run before, so that nothing is compiled, captured or found in a cache while these are timed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment, error_head
from compile_and_serve import LLM, SamplingParams
from compile_and_serve.custom_ops.platform import platform_of, resolve_device
from compile_and_serve.runtime.media.images import decode_image
from compile_and_serve.runtime.media.pixels import pixel_library
from compile_and_serve.runtime.media.prepared import PreparedMedia
from compile_and_serve.runtime.media.qwen_vl import QwenVLProcessor
from compile_and_serve.runtime.weights.folder_config import read_folder_config

TEXT_MODELS = {"qwen3_vl": ("Qwen3ForCausalLM", "qwen3"), "qwen2_5_vl": ("Qwen2ForCausalLM", "qwen2")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's sides")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    given = parser.parse_args()
    try:
        _measure(given)
    except Exception as error:  # an interpreter that ends with a CUDA error prints pages behind it
        print(json.dumps({"model": given.config.name, "error": error_head(error), **environment()}), flush=True)
        raise


def _measure(given: argparse.Namespace) -> None:
    device = resolve_device(given.device, None)
    platform = platform_of(device)
    config = read_folder_config(given.config)

    def show(**fields: Any) -> None:
        print(json.dumps({"model": given.config.name, "device": platform.name, **fields, **environment()}), flush=True)

    most = (given.side + 64) ** 2  # so that the image keeps its size
    processor = QwenVLProcessor(config | {"image_processor": {"max_pixels": most}}, has_windows=config["model_type"] == "qwen2_5_vl")
    pixels = np.random.default_rng(0).integers(0, 256, (given.side // 8, given.side // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    buffer = io.BytesIO()
    import PIL.Image

    PIL.Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    image = decode_image(buffer.getvalue())
    pixel_library(waits=True)
    tokens = len(processor.image(image, b"").tokens)
    show(
        preprocess_ms=_median_ms(lambda: processor.image(image, b""), 20),
        decode_ms=_median_ms(lambda: decode_image(buffer.getvalue()), 20),
        side=given.side,
        tokens=tokens,
    )
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": given.device, "max_model_len": 8192}
    media = {
        "mm_processor_kwargs": {"max_pixels": most},
        "max_encoder_tokens": given.images * max(tokens, most // processor.patches.block_pixels**2),
    }
    with LLM(str(given.config), **options, **media) as llm:
        encoder_ms = _encoder(llm, processor.image(image, b""), given.images, platform.synchronize)
        flops = given.images * _flops(config["vision_config"], processor, tokens)
        rate = _gemm_rate(device, platform.synchronize)
        show(
            encoder_ms=encoder_ms,
            images=given.images,
            tflops=round(flops / encoder_ms / 1e9, 1),
            gemm_tflops=round(rate / 1e12, 1),
            share=round(flops / (encoder_ms / 1e3) / rate, 3),
        )
        here = {count: _decode_ms(llm, count) for count in (1, 64)}
        start = {"prompt_token_ids": [100, processor.tokens["image"], 101]}
        count = given.requests

        def with_images(part: int) -> list[Any]:
            numbers = range(part * count, (part + 1) * count)
            return [start | {"multi_modal_data": {"image": _shifted(image, number)}} for number in numbers]

        def with_text(part: int) -> list[Any]:
            begins = range(100 + part * count, 100 + (part + 1) * count)
            return [{"prompt_token_ids": [(begin + k) % llm.info.vocab_size for k in range(tokens + 2)]} for begin in begins]

        for warm in (with_images(0), with_text(0)):
            _seconds(llm, warm, given.tokens)
        text_s = _seconds(llm, with_text(1), given.tokens)
        prepare_s, prepared = _prepared(llm, with_images(1))
        engine_s = _seconds(llm, prepared, given.tokens)
        mixed_s = _seconds(llm, with_images(2), given.tokens)
        alone_s = encoder_ms / 1e3 / given.images * count
        show(
            mixed_s=mixed_s,
            text_s=text_s,
            encoder_s=round(alone_s, 3),
            ratio=round(mixed_s / (text_s + alone_s), 3),
            prepare_s=prepare_s,
            engine_s=engine_s,
            engine_ratio=round(engine_s / (text_s + alone_s), 3),
            cores=len(os.sched_getaffinity(0)),
            requests=count,
        )
    if (known := TEXT_MODELS.get(config["model_type"])) is not None:
        text = dict(config.get("text_config") or {k: v for k, v in config.items() if k != "vision_config"})
        text = {k: v for k, v in text.items() if k not in ("rope_scaling", "rope_parameters")}
        text |= {"architectures": [known[0]], "model_type": known[1]}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(text))
            with LLM(folder, **options) as llm:
                for count, ms in here.items():
                    alone = _decode_ms(llm, count)
                    show(sequences=count, text_ms=ms, text_model_ms=alone, ratio=round(ms / alone, 4))


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(times), 3)


def _encoder(llm: LLM, image: PreparedMedia, images: int, wait: Callable[[], object]) -> float:
    """Milliseconds of a step of so many images."""
    engine: Any = llm.engine
    encoder = engine.core.executor.worker.runner.encoder
    (item,) = image.items
    step = encoder._step([item.length] * images, [{name: [array] for name, array in item.arrays.items()}] * images)

    def run() -> None:
        encoder._steps.run(step)
        wait()

    for _ in range(4):  # the first ones compile kernels and capture graphs
        run()
    return _median_ms(run, 10)


def _flops(vision: dict[str, Any], processor: QwenVLProcessor, tokens: int) -> float:
    """Of one image: products of the blocks and of the merger, and attention."""
    width, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
    patches, merged = tokens * processor.patches.merge**2, width * processor.patches.merge**2
    num_mlp = 3 if processor._window else 2
    block = 2 * patches * (4 * width * width + num_mlp * width * inner)
    full = len(vision.get("fullatt_block_indexes") or range(depth)) if processor._window else depth
    window = (processor._window * processor.patches.merge) ** 2
    attention = 4 * patches * width * (full * patches + (depth - full) * window)
    mergers = 1 + (0 if processor._window else len(vision.get("deepstack_visual_indexes", ())))
    merger = 2 * tokens * merged * (merged + vision["out_hidden_size"]) * mergers
    return float(depth * block + attention + merger + 2 * patches * processor.patches.values * width)


def _gemm_rate(device: torch.device, wait: Callable[[], object]) -> float:
    """Operations a second."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def run() -> None:
        torch.mm(a, b)
        wait()

    for _ in range(3):
        run()
    return float(2 * size**3 / (_median_ms(run, 10) / 1e3))


def _decode_ms(llm: LLM, count: int) -> float:
    """Of a decode step: what 128 more tokens take."""
    prompts = [{"prompt_token_ids": list(range(100 + i, 132 + i))} for i in range(count)]
    times = []
    for _ in range(3):
        short, long = (_seconds(llm, prompts, tokens) for tokens in (32, 160))
        times.append((long - short) / 128)
    return round(1e3 * statistics.median(times), 3)


def _prepared(llm: LLM, prompts: list[Any]) -> tuple[float, list[Any]]:
    """How long the images of prompts take to prepare, and the prompts with them."""
    reader, params = llm._prompts, SamplingParams()
    began = time.perf_counter()
    started = [reader.start(prompt, params) for prompt in prompts]
    read = [reader.finish(one) for one in started]
    seconds = round(time.perf_counter() - began, 4)
    return seconds, [{"prompt_token_ids": one.prompt, "media": one.media} for one in read]


def _seconds(llm: LLM, prompts: list[Any], tokens: int) -> float:
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return round(time.perf_counter() - began, 4)


def _shifted(image: Any, number: int) -> Any:
    """Another image of the same size."""
    import PIL.ImageChops

    return PIL.ImageChops.offset(image, 3 * number + 1, 0)


if __name__ == "__main__":
    main()
