"""The autotuner's times on a GPU."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler.artifacts.autotune import Autotuner
from compile_and_serve.compiler.compat import fake_mode_with_symbols
from compile_and_serve.compiler.passes.fuse_silu_mul import FuseSiluMul
from compile_and_serve.compiler.rewrite.fusion_choice import TOKENS

pytestmark = pytest.mark.gpu


def test_a_choice_is_measured_by_graph_replay() -> None:
    mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
    with mode:
        x = torch.empty(symbols["tokens"], 2 * 4096, dtype=torch.bfloat16, device="meta")
    choice = Autotuner(torch.device("cuda"), []).choose("fuse_silu_mul", FuseSiluMul.ours, FuseSiluMul.plain, [x])
    assert len(choice.ours) == len(choice.inductor) == len(TOKENS)
    assert all(1e-7 < seconds < 1e-2 for seconds in (*choice.ours, *choice.inductor))
