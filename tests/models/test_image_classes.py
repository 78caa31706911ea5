"""The table of classes of images and text is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from compile_and_serve.models.image_classes import DOCUMENT, classes, make_table, outcome

HINT = "run python -m compile_and_serve.models.image_classes"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

pytestmark = pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in CONSTRAINTS.read_text(encoding="utf-8").split(),
    reason="the table is of the transformers that constraints.txt names",
)


def test_every_class_is_in_the_table() -> None:
    """A new version of transformers adds classes."""
    rows = [line.split("|")[1].strip(" `") for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == sorted(classes()), HINT


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "Kimi_K25ForConditionalGeneration"])
def test_a_row_is_what_becomes_of_the_class(name: str) -> None:
    one = outcome(name, classes()[name])
    assert f"| `{name}` | {one.status} | {one.reason} |\n" in DOCUMENT.read_text(encoding="utf-8"), HINT


@pytest.mark.exhaustive
def test_the_table_is_up_to_date() -> None:
    assert make_table({name: outcome(name, model_type) for name, model_type in classes().items()}) == DOCUMENT.read_text("utf-8"), HINT
