"""Every family cut into two and three stages: its tokens are those of one rank.

Pieces are not compiled, for compiling is not the subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.all_families import DENSE, MOE, RECURRENT, write_family
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.staged_engine import plugged_in, use_plain_pieces

# A hybrid, of whose groups of state one is on one stage alone. The others, and transformers' implementation, run with --all-cases.
ALWAYS = ("Qwen3_5ForCausalLM",)
pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        everything = [*DENSE, *MOE, *RECURRENT]
        metafunc.parametrize("architecture", everything if metafunc.config.getoption("--all-cases") else ALWAYS)


@pytest.fixture(scope="module", autouse=True)
def plain_pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plugged_in(tmp_path_factory.mktemp("site"), patch)
        use_plain_pieces(patch)
        yield


@pytest.mark.exhaustive
def test_stages_say_what_one_rank_says(architecture: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Prompts in chunks beside decodes, one of which finds its prefix in the cache."""
    folder = write_family(tmp_path / "model", architecture)
    lengths = (1, 15, 40, 90)
    requests = [
        request(f"r{i}", [(i * 131 + at * at * 7 + at * 31) % 317 + 3 for at in range(length)], max_tokens=24, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    backend = {"attention_backend": "torch"} if architecture.startswith(("Deepseek", "KimiLinear")) else {}  # not in the interpreter
    given: dict[str, Any] = {"load_format": "auto", "enforce_eager": False, "use_cache": False, "block_size": 16, "num_kv_blocks": 512}
    given |= {"max_model_len": 128, "max_num_batched_tokens": 48, **backend}
    found = []
    for stages in (1, 2, 3) if pytestconfig.getoption("--all-cases") else (1, 3):
        core = EngineCore(tiny_config(folder, pipeline_parallel_size=stages, **given))
        found.append([tokens_of(run_requests(core, requests)), tokens_of(run_requests(core, requests[2:]))])
        stats = core.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        core.shutdown()
    assert all(one == found[0] for one in found[1:])
