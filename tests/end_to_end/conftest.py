"""The prompts of every comparison with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colors are",
    "In 1969, humans first",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. The dog",
    "A recipe for pancakes: first, mix",
    "1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
    "She opened the old wooden box and found",
    "import numpy as np\n\ndef softmax(x):\n",
    "The theory of relativity was proposed by",
    "To be, or not to be, that is",
    "Machine learning models are trained by",
    "The largest planet in the solar system is",
    "Yesterday it rained; today",
    "Question: Why is the sky blue?\nAnswer:",
    "He said it in a low voice, " * 12 + "and then",
]


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
