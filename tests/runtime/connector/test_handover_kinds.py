"""Every kind of state goes from one engine to another: windows, latents, snapshots of recurrent state, and with drafts on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.all_families import write_family
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.recurrent_models import write_recurrent

SLOW = pytest.mark.slow
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("Gemma3ForCausalLM", marks=SLOW),
        pytest.param("DeepseekV2ForCausalLM", marks=SLOW),
        pytest.param("recurrent", marks=SLOW),
        "drafts",
    ],
)
def test_tokens_are_as_from_one_engine(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"load_format": "auto", "max_model_len": 256, "num_kv_blocks": 400}
    if kind == "recurrent":
        folder = write_recurrent(tmp_path / "model", "Qwen3_5ForCausalLM")
    elif kind == "drafts":
        folder, options = write_tiny_model(tmp_path / "model"), DRAFTS
    else:
        folder = write_family(tmp_path / "model", kind)
        options["attention_backend"] = "torch"  # blocks are the same, and the interpreter takes a minute
    patient = {"kv_connector_extra_config": {"lease_seconds": 300, "load_seconds": 60}}
    giver = EngineCore(tiny_config(folder, kv_transfer_config={"kv_role": "kv_producer", **patient}, **options))
    taker = EngineCore(tiny_config(folder, kv_transfer_config={"kv_role": "kv_both", **patient}, **options))
    try:
        requests = [request(f"{number}", prompt_of(number, length)) for number, length in enumerate((100, 33, 64, 70))]
        given, found = {}, {}
        for one in requests:
            [output] = run_requests(giver, [msgspec.structs.replace(one, kv_transfer={"do_remote_decode": True})])[one.request_id]
            given[one.request_id] = output.kv_transfer
        for one in requests:
            found |= run_requests(taker, [msgspec.structs.replace(one, kv_transfer=given[one.request_id])])
        loaded = [max(output.num_loaded_tokens.get("engine", 0) for output in found[one.request_id]) for one in requests]
        assert all(count > len(one.prompt_token_ids) // 2 for count, one in zip(loaded, requests, strict=True)), loaded
        alone = [msgspec.structs.replace(one, request_id=f"alone {one.request_id}") for one in requests]
        assert taker._scheduler.reset_prefix_cache()
        assert list(tokens_of(run_requests(taker, alone)).values()) == list(tokens_of(found).values())
        assert taker.stats().kv_tiers["handover_failures"] == 0
        assert taker.stats().num_free_blocks == taker.stats().num_total_blocks
    finally:
        giver.shutdown()
        taker.shutdown()
