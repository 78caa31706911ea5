"""Schemathesis: generated requests for every route of the OpenAPI document, valid and invalid ones.

Most bodies of which every field is random are refused. So half of the bodies are the document's example with two random fields.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_CASES = 2000
OPTIONS = (
    "--port", "0", "--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-model-len", "256",
    "--num-threads", "1", "--max-body-size", "100k", "--response-store", "1MiB", "--served-model-name", "tiny",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(str(tiny_llama_dir), *OPTIONS)
    yield server
    assert server.stop() == 0, server.output


def test_no_generated_request_is_a_5xx(server: ServerProcess) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    examples = _examples(schema.raw_schema)
    operations = [result.ok() for result in schema.get_all_operations()]
    statuses: Counter[int] = Counter()
    # Routes without a body have few different requests.
    with_body = [operation for operation in operations if operation.body]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for operation in operations:
        num_examples = -(-NUM_CASES // len(with_body) // len(modes)) if operation.body else 20
        for mode in modes:
            try:
                example = examples.get(operation.path) if mode is schemathesis.GenerationMode.POSITIVE else None
                checks = [status_code_conformance, content_type_conformance]
                _try(operation, mode, num_examples, checks, statuses, example)
            except hypothesis.errors.Unsatisfiable:
                assert mode is schemathesis.GenerationMode.NEGATIVE  # a route without parameters has no wrong request
    print(f"{sum(statuses.values())} requests, by status: {dict(sorted(statuses.items()))}")
    assert sum(statuses.values()) >= NUM_CASES
    assert statuses[200] > NUM_CASES / 10
    assert {400, 404} <= set(statuses)
    with server.client() as client:
        assert client.get("/health").status_code == 200


def _examples(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Path → the example of its body, for a short answer."""
    found = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                [example] = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["examples"]
                lengths = {"max_tokens", "max_output_tokens"} & set(example)
                found[path] = {**example, **dict.fromkeys(lengths, 4)}
    found["/detokenize"] = {"tokens": [5]}
    return found


def _try(operation: Any, mode: Any, num_examples: int, checks: list[Any], statuses: Counter[int], example: dict[str, Any] | None) -> None:
    """Send generated requests. example: a body that gets two of the generated fields; None: all fields are generated."""
    chooser = random.Random(operation.path)

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: Any) -> None:
        if example is not None and isinstance(case.body, dict):
            names = sorted(set(case.body) - {"model", *example})
            case.body = {**example, **{name: case.body[name] for name in chooser.sample(names, min(2, len(names)))}}
        response = case.call(timeout=120)
        statuses[response.status_code] += 1
        # 501: a task that this model cannot do.
        assert response.status_code < 500 or response.status_code == 501, (case.as_curl_command(), response.text)
        case.validate_response(response, checks=checks)

    check()
