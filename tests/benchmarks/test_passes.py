"""`benchmarks.passes`: every pass is measured in a setting that exists, and of several rounds the best step counts."""

from __future__ import annotations

from benchmarks.passes import NOT_MEASURED, SETTINGS, _best_step
from compile_and_serve.compiler.passes import default_passes


def test_settings_name_passes_that_there_are() -> None:
    names = {graph_pass.name for graph_pass in default_passes()}
    assert set(NOT_MEASURED) <= names
    assert SETTINGS.keys() <= names
    for name, setting in SETTINGS.items():
        assert setting.without <= names
        assert name not in setting.without


def test_the_fastest_round_counts() -> None:
    def report(seconds: float) -> dict[str, object]:
        rows = [
            {"tokens": 1, "count": 3, "bytes": 100, "flops": 7},
            {"tokens": 1, "count": 1, "bytes": 10, "flops": 1},
            {"tokens": 16, "count": 1, "bytes": 1000, "flops": 1000},
        ]
        steps = [{"tokens": 1, "seconds": seconds}, {"tokens": 16, "seconds": 9.0}]
        return {"profile": {"rows": rows, "steps": steps}}

    assert _best_step([report(0.3), report(0.2), report(0.5)], 1) == {"seconds": 0.2, "bytes": 310, "flops": 22}
