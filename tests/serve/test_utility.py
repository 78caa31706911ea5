"""Models, tokenize, probes, metrics, documentation, API keys and CORS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.pooling_params import PoolingInfo
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.observe.metrics import Metrics
from tests.serve.conftest import ANSWER, Server, StartServer
from tests.support.fake_engine import says


async def test_models_list_every_name(server: Server) -> None:
    models = (await server.http.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["test-model", "alias"]
    assert models["data"][0]["max_model_len"] == 256
    for model in models["data"]:  # as vLLM's
        assert set(model) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
        [permission] = model["permission"]
        allowed = {f"allow_{what}" for what in ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")}
        assert set(permission) == allowed | {"id", "object", "created", "organization", "group", "is_blocking"}
    assert (await server.http.get("/v1/models/alias")).json()["id"] == "alias"
    assert (await server.chat(model="alias")).json()["model"] == "alias"


async def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    answer = (await server.http.post("/tokenize", json={"prompt": ANSWER, "return_token_strs": True})).json()
    assert answer["tokens"] == server.tokenizer.encode(ANSWER)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert len(answer["token_strs"]) == answer["count"]
    text = (await server.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text == {"prompt": ANSWER}


async def test_tokenize_accepts_texts_longer_than_the_models_limit(server: Server) -> None:
    answer = (await server.http.post("/tokenize", json={"prompt": "word " * 2000})).json()
    assert answer["count"] > 256


async def test_tokenize_of_messages_is_the_chat_prompt(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    await server.chat(messages=messages)
    answer = (await server.http.post("/tokenize", json={"messages": messages})).json()
    assert answer["tokens"] == server.engine.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    "path,body",
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {}),
    ],
)
async def test_invalid_tokenize_requests_are_400(server: Server, path: str, body: dict[str, object]) -> None:
    response = await server.http.post(path, content=json.dumps(body))
    assert response.status_code == 400, response.text


async def test_probes(server: Server) -> None:
    for path in ("/health", "/ready", "/ping", "/version", "/load"):
        assert (await server.http.get(path)).status_code == 200
    assert (await server.http.post("/ping")).status_code == 200
    assert (await server.http.get("/load")).json() == {"server_load": 0}


async def test_ready_says_what_is_still_to_come(server: Server) -> None:
    assert (await server.http.get("/ready")).json() == {"status": "ready"}
    last = server.app.state.context.engine.metrics.last_stats
    last[0] = EngineStats(pending_work={"captures": 5, "builds": 1})
    last[1] = EngineStats(pending_work={"captures": 2, "choices": 3})
    expected = {"status": "ready", "to_come": {"builds": 1, "captures": 7, "choices": 3}}
    assert (await server.http.get("/ready")).json() == expected
    last[0] = last[1] = EngineStats()
    assert (await server.http.get("/ready")).json() == {"status": "ready"}


async def test_health_is_503_with_the_engines_problem(server: Server) -> None:
    server.engine.problem = "The engine process has sent no heartbeat for 11 seconds."
    response = await server.http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == server.engine.problem
    assert "retry-after" in response.headers


async def test_health_names_passes_that_failed_their_verification(server: Server) -> None:
    assert (await server.http.get("/health")).json() == {"status": "ok"}
    server.engine.info.compile_report["failed_passes.fuse_linears"] = "relative error 0.3 at fused_linear"
    response = await server.http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "failed_passes": {"fuse_linears": "relative error 0.3 at fused_linear"}}


async def test_metrics_count_the_sites_of_passes(server: Server) -> None:
    info = server.engine.info
    info.compile_report |= {
        "pass_sites.merge_linears.matched": 10,
        "pass_sites.merge_linears.expected": 12,
        "failed_passes.fuse_linears": "wrong",
        "kv_cache_dtype": "float8_e4m3fn",
        "memory.weights": 3 << 30,
    }
    metrics = Metrics("m")
    metrics.describe_engine(info)
    text = metrics.render().decode()
    assert 'cas:pass_sites_matched{graph_pass="merge_linears",model_name="m"} 10.0' in text
    assert 'cas:pass_sites_expected{graph_pass="merge_linears",model_name="m"} 12.0' in text
    assert 'kv_cache_dtype="float8_e4m3fn"' in text
    assert 'cas:device_memory_bytes{model_name="m",part="weights"} 3.221225472e+09' in text
    assert 'cas:pass_failed{graph_pass="fuse_linears",model_name="m"} 1.0' in text


def metrics_in(text: str) -> Callable[..., float]:
    def value(name: str, labels: str = "") -> float:
        found = re.search(rf'^cas:{name}{{{labels}model_name="test-model"[^}}]*}} ([0-9.e+-]+)$', text, re.MULTILINE)
        assert found is not None, (name, text)
        return float(found[1])

    return value


async def test_metrics_count_scored_prompts_and_aborted_sequences(start_server: StartServer, tokenizer: Tokenizer) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.001})
    await server.complete(prompt=[5] * 20, echo=True, logprobs=0, max_tokens=0)
    value = metrics_in((await server.http.get("/metrics")).text)
    assert (value("prompt_tokens_total"), value("time_to_first_token_seconds_count")) == (20, 0)
    assert value("request_queue_time_seconds_sum") == pytest.approx(0.01)
    assert value("request_prefill_time_seconds_sum") == pytest.approx(0.02)
    engine = server.app.state.context.engine
    prompt, params = engine.inputs.prepare([5] * 7, SamplingParams(max_tokens=200, ignore_eos=True))
    generation = await engine.submit("left", [prompt], [params])
    await anext(generation)
    generation.close()
    value = metrics_in((await server.http.get("/metrics")).text)
    assert value("request_success_total", 'finished_reason="abort",') == 1
    assert value("prompt_tokens_total") == value("request_prompt_tokens_sum") == 27
    assert value("request_generation_tokens_sum") == value("generation_tokens_total") >= 1
    assert value("e2e_request_latency_seconds_count") == 2


async def test_metrics_count_a_request(server: Server) -> None:
    await server.chat(stop=["wör"])
    await server.complete()
    value = metrics_in((await server.http.get("/metrics")).text)
    prompts = sum(len(request.prompt_token_ids) for request in server.engine.requests)
    assert value("prompt_tokens_total") == prompts
    assert value("request_success_total", 'finished_reason="stop",') == 2
    assert value("time_to_first_token_seconds_count") == 2
    assert value("e2e_request_latency_seconds_count") == 2
    assert value("request_queue_time_seconds_sum") == pytest.approx(0.02)
    assert value("request_prefill_time_seconds_sum") == pytest.approx(0.04)
    generated = value("generation_tokens_total")
    assert generated > len(server.tokenizer.encode(ANSWER))
    assert value("inter_token_latency_seconds_count") == generated - 2
    assert value("kv_cache_usage_perc") == 0.25
    assert value("compile_seconds") == 1.5
    assert (value("unique_pieces"), value("total_pieces"), value("artifact_hits")) == (3, 31, 1)
    for name in (
        "num_requests_running", "num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "num_preemptions_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "request_decode_time_seconds_count", "request_prompt_tokens_count", "request_generation_tokens_count",
        "iteration_tokens_total_count", "padded_tokens_total", "host_gap_seconds_total",
    ):  # fmt: skip
        value(name)
    assert value("stage_wait_seconds_total") == 0.25 * server.engine.steps


async def test_documentation_needs_no_network(server: Server) -> None:
    page = (await server.http.get("/docs")).text
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(sources) >= 2
    assert not [source for source in sources if source.startswith(("http", "//"))]
    for source in sources:
        assert (await server.http.get(source)).status_code == 200
    schema = (await server.http.get("/openapi.json")).json()
    assert "422" not in json.dumps(schema)
    chat = schema["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["examples"][0]["messages"][1]["role"] == "user"
    assert {"temperature", "top_k", "logit_bias", "cache_salt"} <= set(chat["properties"])


async def test_examples_of_the_documentation_work(server: Server, start_server: StartServer) -> None:
    embeds = await start_server(engine={"pooling": PoolingInfo(kind="embed", width=4)})
    classifies = await start_server(engine={"pooling": PoolingInfo(kind="classify", width=2)})
    sparse = await start_server(engine={"pooling": PoolingInfo(kind="embed", width=4, is_normalized=False)})
    others = {"/classify": classifies, "/embed_sparse": sparse} | dict.fromkeys(("/v1/embeddings", "/pooling", "/score", "/rerank"), embeds)
    schema = (await server.http.get("/openapi.json")).json()
    tried = 0
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                continue  # forms have files: test_transcriptions sends them
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            [example] = schema["components"]["schemas"][reference.rsplit("/", 1)[1]]["examples"]
            if path == "/detokenize":  # the example's ids exceed the test vocabulary
                example = {"tokens": [5]}
            response = await others.get(path, server).http.request(method, path, json=example)
            assert response.status_code == 200, (path, response.text)
            tried += 1
    assert tried >= 13


async def test_api_key_is_required_except_for_probes_and_documentation(start_server: StartServer) -> None:
    server = await start_server(api_keys=("secret", "other"))
    for path in ("/v1/models", "/load", "/v1/nothing"):
        response = await server.http.get(path)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == 401
        assert response.headers["www-authenticate"] == "Bearer"
    for header in ("Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer \xe9"):
        headers = {"Authorization": header.encode("latin-1")}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 401  # type: ignore[arg-type]
    for key in ("secret", "other"):
        assert (await server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
    for path in ("/health", "/ready", "/ping", "/version", "/metrics", "/docs", "/openapi.json"):
        assert (await server.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "host,status", [("127.0.0.1", 200), ("::1", 200), ("localhost", 200), ("0.0.0.0", 401), ("::", 401), ("gpu-7", 401)]
)
async def test_metrics_need_the_key_beyond_localhost(start_server: StartServer, host: str, status: int) -> None:
    server = await start_server(api_keys=("secret",), host=host)
    assert (await server.http.get("/metrics")).status_code == status
    assert (await server.http.get("/metrics", headers={"Authorization": "Bearer secret"})).status_code == 200


async def test_api_key_of_any_characters(start_server: StartServer) -> None:
    key = "zwölf-🙂"
    server = await start_server(api_keys=(key, "café"))
    for sent in (key.encode(), "café".encode(), "café".encode("latin-1")):
        response = await server.http.get("/v1/models", headers={"Authorization": b"Bearer " + sent})  # type: ignore[arg-type]
        assert response.status_code == 200, sent
    for sent in ("zwölf-".encode(), b"caf?", "cafÃ©".encode()):
        response = await server.http.get("/v1/models", headers={"Authorization": b"Bearer " + sent})  # type: ignore[arg-type]
        assert response.status_code == 401, sent


async def test_metrics_are_documented_as_text(server: Server) -> None:
    paths = (await server.http.get("/openapi.json")).json()["paths"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


async def test_no_cors_headers_by_default(server: Server) -> None:
    origin = {"Origin": "https://app.example"}
    response = await server.http.get("/v1/models", headers=origin)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert (await server.http.options("/v1/completions", headers=preflight)).status_code == 405


async def test_cors_headers_are_on_answers_and_on_a_401(start_server: StartServer) -> None:
    server = await start_server(api_keys=("secret",), allowed_origins=("https://app.example",))
    origin = {"Origin": "https://app.example"}
    response = await server.http.get("/v1/models", headers=origin)
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert (await server.http.options("/v1/completions", headers=preflight)).status_code == 200
    assert "access-control-allow-origin" not in (await server.http.get("/health", headers={"Origin": "https://x"})).headers
