"""Time until the explorer's page of a deep model is painted and loaded, in headless Chromium. Prints one JSON line per page load.

    python -m benchmarks.explorer --layers 64 --loads 5

The model is a Llama with many small layers, because the page grows with depth, not with width.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.models.registry import build_model
from compile_and_serve.serve.inspect.data import load_dump
from compile_and_serve.serve.inspect.page import build_page

FIRST_PAINT = "return performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0]"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def make_page(layers: int, folder: Path) -> Path:
    """Compile the model, dump it and write the page. → the page's file."""
    spec = build_model(CONFIG | {"num_hidden_layers": layers}, dtype=torch.bfloat16)
    config = CompileConfig(use_cache=False, verify_passes=True, dump_dir=folder / "dump")
    kernels = frozenset({"rope_attention", "fused_linear"})
    compile_model(spec, config, device=torch.device("cpu"), dtype=torch.bfloat16, kernels=kernels)
    page = folder / "report.html"
    page.write_text(build_page(load_dump(folder / "dump")), encoding="utf-8")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--loads", type=int, default=5)
    arguments = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    with tempfile.TemporaryDirectory() as folder:
        page = make_page(arguments.layers, Path(folder))
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            for load in range(arguments.loads):
                driver.get(f"{page.as_uri()}?load={load}#graph")
                paint = WebDriverWait(driver, 10, poll_frequency=0.02).until(lambda d: d.execute_script(FIRST_PAINT))
                done = driver.execute_script("return performance.timing.loadEventEnd - performance.timing.navigationStart")
                nodes = len(driver.find_elements("css selector", "#canvas .node"))
                row = {"layers": arguments.layers, "page_bytes": page.stat().st_size, "nodes_drawn": nodes}
                row |= {"first_contentful_paint_ms": paint, "loaded_ms": done}
                print(json.dumps(row | {"browser": driver.capabilities["browserVersion"]}), flush=True)
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
