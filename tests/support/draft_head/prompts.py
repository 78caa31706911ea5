"""Questions for the target: those of `benchmarks/texts/questions.txt` are for measuring, those about Python's library for training."""

from __future__ import annotations

import importlib
import inspect
import random
import re
import sys

from benchmarks.common import ROOT

ABOUT_TEXTS = (
    "Summarize this text in two sentences:\n\n{}",
    "Repeat this text word for word:\n\n{}",
    "What is this text about?\n\n{}",
    "Rewrite this text in simple English:\n\n{}",
    "List the most important points of this text.\n\n{}",
    "Translate this text to French:\n\n{}",
    "Write three questions about this text:\n\n{}",
    "{}\n\nQuote the first sentence of this text exactly.",
)
ABOUT_NAMES = (
    "What does {} do in Python?",
    "Explain {} to a beginner.",
    "Write a Python program that uses {}.",
    "When would you use {}?",
    "Give an example of {} in Python, with comments.",
    "Write a short story in which somebody learns about {}.",
    "Write an e-mail to a colleague about a mistake with {}.",
    "Make a list of five facts about {}.",
)


def held_out_questions() -> list[str]:
    return (ROOT / "benchmarks/texts/questions.txt").read_text().splitlines()


def training_questions(count: int) -> list[str]:
    """About names and documentation of Python's standard library."""
    names: dict[str, str] = {}
    for module_name in sorted(sys.stdlib_module_names):
        if module_name.startswith("_") or module_name in ("antigravity", "this", "idlelib", "turtledemo"):
            continue
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        names[module_name] = inspect.getdoc(module) or ""
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and callable(value):
                names[f"{module_name}.{name}"] = inspect.getdoc(value) or ""
    numbers = random.Random(0)
    texts = [re.sub(r"[ \t]+", " ", text)[:600] for text in names.values() if len(text) > 150]
    questions = []
    for _ in range(count):
        form, given = numbers.choice([(ABOUT_TEXTS, texts), (ABOUT_NAMES, [*names])])
        questions.append(numbers.choice(form).format(numbers.choice(given)))
    return questions
