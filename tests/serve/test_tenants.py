"""API keys as tenants, over HTTP: names, limits a minute, places in the queue, users."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.messages import EngineStats, Tenant, TenantStats
from compile_and_serve.serve.observe.metrics import Metrics
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.tenant_options import TenantOptions, read_tenants
from compile_and_serve.serve.tenants.current import current_tenant
from compile_and_serve.serve.tenants.rate_limits import LocalRateLimits, RateAnswer, SharedRateLimits
from compile_and_serve.serve.tenants.turns import FairTurns
from tests.serve.conftest import StartServer

A, B = TenantOptions(name="team-a", key="a key"), TenantOptions(name="team-b", key="b key", weight=2.0, max_running=4, max_waiting=7)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4}


async def test_the_engine_learns_whose_a_request_is(start_server: StartServer) -> None:
    server = await start_server(api_keys=("a key", "b key", "other"), tenants=(A, B), admin_keys=("admin",))
    for name in ("a key", "b key", "other", "admin"):
        assert (await server.http.post("/v1/completions", json=BODY | {"user": "u"}, headers=key(name))).status_code == 200
    first, second, third, fourth = (request.tenant for request in server.engine.requests)
    assert (first, second) == (Tenant("team-a"), Tenant("team-b", 2.0, 4, 7))
    assert third is not None
    assert third.name.startswith("key-")
    assert "other" not in third.name
    assert fourth == Tenant("admin")
    text = (await server.http.get("/metrics", headers=key("admin"))).text
    assert 'cas:tenant_generation_tokens_total{model_name="test-model",tenant="team-a"} 4.0' in text
    assert 'cas:tenant_request_success_total{model_name="test-model",tenant="team-b"} 1.0' in text


async def test_one_key_alone_is_not_told_apart(start_server: StartServer) -> None:
    server = await start_server(api_keys=("only",))
    await server.http.post("/v1/completions", json=BODY, headers=key("only"))
    [request] = server.engine.requests
    assert request.tenant is None


async def test_users_of_a_key_have_shares(start_server: StartServer) -> None:
    server = await start_server(fair_by_user=True)
    long = {"prompt": "Hi " * 30_000, "max_tokens": 4, "truncate_prompt_tokens": 8}
    for body in (BODY, BODY | {"user": "x"}, BODY | {"user": "y"}, long | {"user": "x"}):
        assert (await server.http.post("/v1/completions", json=body)).status_code == 200
    message = {"model": "test-model", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "metadata": {"user_id": "y"}}
    assert (await server.http.post("/v1/messages", json=message)).status_code == 200
    users = [request.tenant.user for request in server.engine.requests]
    assert users[0] == ""
    assert users[1] == users[3] != users[2] == users[4]
    assert all(len(user) == 16 for user in users[1:])


async def test_requests_a_minute(start_server: StartServer) -> None:
    limited = TenantOptions(name="limited", key="a key", requests_per_minute=2)
    server = await start_server(api_keys=("a key", "b key"), tenants=(limited,))
    answers = [await server.http.post("/v1/completions", json=BODY, headers=key("a key")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    assert float(answers[2].headers["x-ratelimit-reset-requests"].removesuffix("s")) == pytest.approx(60, abs=5)
    assert 25 <= int(answers[2].headers["retry-after"]) <= 30
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", 429)
    assert "used up its 2 requests a minute" in error["message"]
    other = await server.http.post("/v1/completions", json=BODY, headers=key("b key"))
    assert other.status_code == 200
    assert "x-ratelimit-limit-requests" not in other.headers
    assert (await server.http.get("/v1/models", headers=key("a key"))).status_code == 200
    text = (await server.http.get("/metrics", headers=key("b key"))).text
    assert 'cas:tenant_requests_refused_total{model_name="test-model",tenant="limited"} 1.0' in text


async def test_tokens_a_minute_count_prompts_and_outputs(start_server: StartServer) -> None:
    limited = TenantOptions(name="limited", key="a key", tokens_per_minute=12)
    server = await start_server(api_keys=("a key", "b key"), tenants=(limited,))
    first = await server.http.post("/v1/completions", json=BODY, headers=key("a key"))
    assert first.headers["x-ratelimit-remaining-tokens"] == "12"
    await asyncio.sleep(0)
    usage = first.json()["usage"]["total_tokens"]
    second = await server.http.post("/v1/completions", json=BODY, headers=key("a key"))
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == 12 - usage
    while (answer := await server.http.post("/v1/completions", json=BODY, headers=key("a key"))).status_code == 200:
        await asyncio.sleep(0)
    assert answer.status_code == 429
    assert "used up its 12 tokens a minute" in answer.json()["error"]["message"]


async def test_a_key_that_fills_the_queue_keeps_no_other_out(start_server: StartServer) -> None:
    server = await start_server(api_keys=("a key", "b key"), tenants=(A, TenantOptions(name="b", key="b key")), engine={"max_in_flight": 4})
    server.engine.hold.clear()
    held = [asyncio.create_task(server.http.post("/v1/completions", json=BODY, headers=key("a key"))) for _ in range(4)]
    while len(server.engine.requests) < 4:
        await asyncio.sleep(0.001)
    assert (await server.http.post("/v1/completions", json=BODY, headers=key("a key"))).status_code == 503
    held += [asyncio.create_task(server.http.post("/v1/completions", json=BODY, headers=key("b key"))) for _ in range(2)]
    while len(server.engine.requests) < 6:
        await asyncio.sleep(0.001)
    assert (await server.http.post("/v1/completions", json=BODY, headers=key("b key"))).status_code == 503
    server.engine.hold.set()
    assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}
    assert server.app.state.context.engine.places._counts == {}


async def test_waiting_sequences_of_a_key(start_server: StartServer) -> None:
    limited = TenantOptions(name="limited", key="a key", max_running=1, max_waiting=1)
    server = await start_server(api_keys=("a key", "b key"), tenants=(limited,))
    answer = await server.http.post("/v1/completions", json=BODY | {"n": 3}, headers=key("a key"))
    assert answer.status_code == 429
    assert "retry-after" in answer.headers
    assert "its limit is 2" in answer.json()["error"]["message"]


async def test_buckets_refill_and_may_be_overdrawn() -> None:
    now = 0.0
    limits = LocalRateLimits([TenantOptions(name="a", requests_per_minute=60, tokens_per_minute=600)], lambda: now)
    assert (await limits.begin("a")).is_allowed
    await limits.use("a", 700)
    answer = await limits.begin("a")
    assert not answer.is_allowed
    assert answer.tokens is not None
    assert answer.retry_after == 11
    assert (answer.tokens.remaining, answer.tokens.reset_seconds) == (0, 70.0)
    now = 10.2
    assert (await limits.begin("a")).is_allowed
    now = 1000.0
    answer = await limits.begin("a")
    assert (answer.requests, answer.tokens) == (answer.requests, answer.tokens)
    assert answer.requests is not None
    assert answer.requests.remaining == 59
    assert await limits.begin("unlimited") == RateAnswer(True, None, None)


async def test_other_processes_ask_the_first() -> None:
    there = LocalRateLimits([TenantOptions(name="a", requests_per_minute=1)])

    async def ask(name: str, *arguments: Any) -> Any:
        import msgspec

        answer = await {"begin_request": there.begin, "use_tokens": there.use}[name](*arguments)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))

    shared = [SharedRateLimits(ask), SharedRateLimits(ask)]
    assert [(await one.begin("a")).is_allowed for one in shared] == [True, False]

    async def gone(name: str, *arguments: Any) -> Any:
        raise ConnectionRefusedError

    with pytest.raises(OSError):
        await SharedRateLimits(gone).begin("a")
    await SharedRateLimits(gone).use("a", 5)


async def test_turns_go_round_among_keys() -> None:
    turns, order = FairTurns(1), list[str]()

    async def work(name: str) -> None:
        current_tenant.set(Tenant(name[0]))
        async with turns.turn():
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a1", "b1", "c1", "a3", "b2", "a4"]
    async with turns.turn():
        pass


def test_metrics_have_bounded_labels() -> None:
    metrics = Metrics("model")
    labels = {metrics.start(1, tenant=f"t{number}").tenant for number in range(150)}
    assert len(labels) == 101
    metrics.observe_step(EngineStats(tenants={"t1": TenantStats(3, 2, 5.0), "t149": TenantStats(1, 0, 5.0)}))
    text = metrics.render().decode()
    assert 'cas:tenant_num_requests_running{model_name="model",tenant="t1"} 3.0' in text
    assert 'cas:tenant_num_requests_running{model_name="model",tenant="other"} 1.0' in text
    metrics.observe_step(EngineStats())
    assert 'cas:tenant_num_requests_running{model_name="model",tenant="t1"} 0.0' in metrics.render().decode()


def test_a_file_of_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("- {key: a key, name: team-a}\n- key: '0123'\n  name: b\n  weight: 2\n  max_running: 4\n  tokens_per_minute: 1000\n")
    assert read_tenants(file) == (A, TenantOptions(name="b", key="0123", weight=2.0, max_running=4, tokens_per_minute=1000))
    assert "a key" not in repr(ServerSettings(served_model_names=("m",), api_keys=("a key",), tenants=(A,)))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a list of entries"),
        ("key: a\nname: b", "must be a list of entries"),
        ("- {name: b}", "entry 1: Object missing required field `key`"),
        ("- {key: 123, name: b}", "entry 1: Expected `str`, got `int`"),
        ("- {key: a, name: b, wieght: 2}", "entry 1: Object contains unknown field `wieght`"),
        ("- {key: a, name: b}\n- {key: c, name: 'two words'}", "entry 2: name must be 1 to 64 letters"),
        ("- {key: ' a', name: b}", "key must be a text without spaces around it"),
        ("- {key: a, name: b, weight: 0}", "weight must be from 0.001 to 1000"),
        ("- {key: a, name: b, weight: .nan}", "weight must be from 0.001 to 1000"),
        ("- {key: a, name: b, max_running: 0}", "max_running must be at least 1"),
        ("- {key: a, name: b}\n- {key: c, name: b}", "two entries have the same name"),
        ("- {key: a, name: b}\n- {key: a, name: c}", "two entries have the same key"),
        ("- {key: secret, name: [}", "is not valid YAML (line 1)"),
        ("[" * 5000, "nested too deeply"),
        ("- {key: a, name: " + "b" * (5 << 20) + "}", "is larger than"),
    ],
)
def test_a_wrong_file_is_a_sentence(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match="--tenants") as error:
        read_tenants(file)
    assert message in str(error.value)
    assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_tenants(tmp_path)
