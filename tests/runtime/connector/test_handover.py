"""Requests that go from one engine to another after their prompt: no token changes, and nothing leaks, whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compile_and_serve.runtime.connector.handover.config import parse_kv_transfer_config
from compile_and_serve.runtime.connector.handover.params import early_params
from compile_and_serve.runtime.connector.handover.wire import Channel
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.kv_config import KVTransferConfig
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput, Sibling
from compile_and_serve.runtime.options import make_engine_config
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.processes import wait_until

GIVE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "a_field_of_others": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("handover") / "tiny")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    core = EngineCore(tiny_config(model_dir))
    tokens = tokens_of(run_requests(core, mixed_requests()))
    core.shutdown()
    return tokens


@pytest.fixture
def start(model_dir: Path) -> Iterator[Callable[..., EngineCore]]:
    cores: list[EngineCore] = []

    def make(folder: Path = model_dir, transfer: dict[str, Any] | None = None, **options: Any) -> EngineCore:
        cores.append(EngineCore(tiny_config(folder, kv_transfer_config=transfer or {}, **options)))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def given_by(giver: EngineCore, one: EngineRequest) -> dict[str, Any]:
    """The answer's kv_transfer_params."""
    [output] = run_requests(giver, [msgspec.structs.replace(one, kv_transfer=dict(GIVE))])[one.request_id]
    assert output.kv_transfer is not None
    assert output.finish_reason is not None
    return output.kv_transfer


def given_at_once_by(giver: EngineCore, one: EngineRequest) -> dict[str, Any]:
    """The same, without the step that tells the ranks."""
    giver.add_request(msgspec.structs.replace(one, kv_transfer=dict(GIVE)))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = giver.step().outputs
    assert outputs[0].kv_transfer is not None
    return outputs[0].kv_transfer


def taken_by(taker: EngineCore, one: EngineRequest, params: dict[str, Any]) -> list[RequestOutput]:
    return run_requests(taker, [msgspec.structs.replace(one, kv_transfer=params)])[one.request_id]


def check_nothing_is_held(*cores: EngineCore) -> None:
    for core in cores:

        def is_free(core: EngineCore = core) -> bool:
            while core.has_work():
                core.step()
            stats = core.stats()
            return stats.num_free_blocks == stats.num_total_blocks and not stats.kv_tiers["handover_leases"]

        wait_until(is_free, 5)


def test_every_kind_of_request_goes_on_as_it_began(start: Callable[..., EngineCore], expected: dict[str, list[int]]) -> None:
    giver, taker = start(transfer={"kv_role": "kv_producer"}), start(transfer={"kv_role": "kv_consumer"})
    requests = mixed_requests()
    outputs = {}
    for one in requests:
        params = given_by(giver, one)
        assert msgspec.json.decode(msgspec.json.encode(params)) == params
        assert params["remote_num_tokens"] == sum(map(len, params["remote_block_ids"])) * 4 == len(one.prompt_token_ids) // 4 * 4
        outputs[one.request_id] = taken_by(taker, one, params)
    assert tokens_of(outputs) == expected
    loaded = {name: max(one.num_loaded_tokens.get("engine", 0) for one in found) for name, found in outputs.items()}
    assert loaded == {"r0": 0, "r1": 4, "r2": 16, "r3": 32, "r4": 60, "r5": 4, "r6": 20, "r7": 44, "r8": 12, "r9": 0}
    assert [len(one.new_logprobs or []) for one in outputs["r6"]] == [len(one.new_token_ids) for one in outputs["r6"]]
    check_nothing_is_held(giver, taker)
    stats = giver.stats().kv_tiers
    assert (stats["handover_leases_released"], stats["handover_leases_expired"]) == (9, 0)
    assert taker.stats().kv_tiers["handover_taken_requests"] == 8
    assert taker.stats().kv_tiers["handover_failures"] == 0


def test_a_seed_that_the_first_engine_drew_goes_with_the_request(start: Callable[..., EngineCore]) -> None:
    giver, taker = start(), start()
    run_requests(taker, [request("another", prompt_of(2, 8), temperature=1.0)])  # its next draw is not the giver's
    random = request("random", prompt_of(1, 30), temperature=1.0)
    params = given_by(giver, random)
    seeded = request("seeded", prompt_of(1, 30), temperature=1.0, seed=params["cas"]["seed"])
    assert tokens_of({"": taken_by(taker, random, params)})[""] == tokens_of(run_requests(giver, [seeded]))["seeded"]


def test_an_answer_of_one_token_ends_at_once(start: Callable[..., EngineCore]) -> None:
    giver, taker = start(), start()
    one = request("one", prompt_of(1, 30), max_tokens=1)
    params = given_by(giver, one)
    [output] = taken_by(taker, one, params)
    assert (output.new_token_ids, output.finish_reason) == (params["cas"]["token_ids"], "length")
    check_nothing_is_held(giver, taker)


def test_bytes_go_over_tcp_too(start: Callable[..., EngineCore], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "connect_local", lambda name, seconds: None)
    monkeypatch.setattr("compile_and_serve.runtime.connector.handover.pages.MAX_CHUNK_BYTES", 5000)
    giver, taker = start(), start()
    one = mixed_requests()[4]
    outputs = taken_by(taker, one, given_by(giver, one))
    assert tokens_of({"r4": outputs})["r4"] == expected["r4"]
    assert taker.stats().kv_tiers["handover_taken_requests"] == 1
    [ledger] = [output.ledger for output in outputs if output.ledger is not None]
    assert ledger.preparing["kv_load"] > 0
    assert (ledger.loaded_tokens, ledger.misses) == ({"engine": 60}, [])


@pytest.mark.parametrize("failure", ["gone", "restarted", "expired", "another salt", "silent"])
def test_what_does_not_come_is_computed(
    start: Callable[..., EngineCore], expected: dict[str, list[int]], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = 0.05 if failure == "expired" else 60.0
    giver, taker = (
        start(transfer={"kv_connector_extra_config": {"lease_seconds": lease}}),
        start(transfer={"kv_connector_extra_config": {"load_seconds": 0.3}}),
    )
    one = mixed_requests()[4]
    params = given_by(giver, one)
    if failure == "gone":
        giver.shutdown()
    elif failure == "restarted":
        params |= {"remote_engine_id": "another"}
    elif failure == "expired":
        time.sleep(0.06)
        check_nothing_is_held(giver)
        assert giver.stats().kv_tiers["handover_leases_expired"] == 1
    elif failure == "another salt":
        one = msgspec.structs.replace(one, cache_salt="mine")
    else:
        monkeypatch.setattr("compile_and_serve.runtime.connector.handover.lender.Lender._send", lambda *_: time.sleep(1.0))
    assert tokens_of({"r4": taken_by(taker, one, params)})["r4"] == expected["r4"]
    assert taker.stats().kv_tiers["handover_failures"] == 1
    assert taker._scheduler.misses["prefix.not_loaded"] == 1
    check_nothing_is_held(taker, *([giver] if failure in ("expired", "another salt") else []))


def test_blocks_may_be_asked_for_before_the_ranks_know_that_they_are_lent(
    start: Callable[..., EngineCore], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compile_and_serve.runtime.connector.handover.lender._LEND_SECONDS", 30.0)  # however slow this machine is
    patient = {"kv_connector_extra_config": {"load_seconds": 60}}
    giver, taker = start(transfer=patient), start(transfer=patient)
    one = mixed_requests()[4]
    params = given_at_once_by(giver, one)
    later = threading.Timer(0.2, giver.step)
    later.start()
    assert tokens_of({"r4": taken_by(taker, one, params)})["r4"] == expected["r4"]
    later.join()
    assert taker.stats().kv_tiers["handover_failures"] == 0
    check_nothing_is_held(giver, taker)


def early_request(one: EngineRequest, params: dict[str, Any]) -> EngineRequest:
    """What loads what a giver computes under the lease "early". params: of another request, which that one computed."""
    return msgspec.structs.replace(one, request_id="early", kv_transfer=early_params(params, "early"))


def test_blocks_of_a_long_prompt_come_while_it_is_computed(start: Callable[..., EngineCore], expected: dict[str, list[int]]) -> None:
    giver, taker = start(max_num_batched_tokens=16), start()
    params = given_by(giver, before := request("before", prompt_of(7, 9)))
    taken_by(taker, before, params)
    assert params["cas"]["offers_early"]
    one = mixed_requests()[4]
    giver.add_request(msgspec.structs.replace(one, kv_transfer=GIVE | {"cas": {"early": "early"}}))
    taker.add_request(early_request(one, params))
    assert [(output.new_token_ids, output.finish_reason) for output in taker.step().outputs] == [([], "length")]
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs += giver.step().outputs
        taker.step()
    assert outputs[0].kv_transfer is not None
    while giver.has_work():
        giver.step()
    found = taken_by(taker, one, outputs[0].kv_transfer)
    assert tokens_of({"r4": found})["r4"] == expected["r4"]
    assert [(output.num_cached_tokens, output.num_loaded_tokens) for output in found if output.num_cached_tokens] == [(60, {"engine": 4})]
    check_nothing_is_held(giver, taker)
    stats = taker.stats().kv_tiers
    assert (stats["handover_early_requests"], stats["handover_failures"]) == (1, 0)


def test_a_prompt_that_is_given_up_lends_nothing(start: Callable[..., EngineCore], expected: dict[str, list[int]]) -> None:
    giver, taker = start(max_num_batched_tokens=16), start()
    params = given_by(giver, before := request("before", prompt_of(7, 9)))
    taken_by(taker, before, params)
    one = mixed_requests()[4]
    giver.add_request(msgspec.structs.replace(one, kv_transfer=GIVE | {"cas": {"early": "early"}}))
    taker.add_request(early_request(one, params))
    taker.step()
    for _ in range(2):
        giver.step()
    giver.abort([one.request_id])
    check_nothing_is_held(giver, taker)
    assert taker.stats().kv_tiers["handover_failures"] == 1
    assert tokens_of({"r4": taken_by(taker, one, given_by(giver, one))})["r4"] == expected["r4"]


def test_a_prompt_that_the_other_engine_never_gets_is_not_waited_for(start: Callable[..., EngineCore]) -> None:
    """As where the client is gone, or another server computes it: long before the lease's time."""
    patience = {"kv_connector_extra_config": {"load_seconds": 0.5}}
    giver, taker = start(transfer=patience), start(transfer=patience)
    params = given_by(giver, before := request("before", prompt_of(7, 9)))
    taken_by(taker, before, params)
    taker.add_request(early_request(mixed_requests()[4], params))
    check_nothing_is_held(taker)
    assert taker.stats().kv_tiers["handover_failures"] == 1


def test_a_request_that_is_given_up_ends_its_lease(start: Callable[..., EngineCore]) -> None:
    giver, taker = start(), start()
    one = mixed_requests()[4]
    taker.add_request(msgspec.structs.replace(one, kv_transfer=given_by(giver, one)))
    assert giver.stats().num_free_blocks < giver.stats().num_total_blocks
    taker.abort(["r4"])
    check_nothing_is_held(giver, taker)
    assert giver.stats().kv_tiers["handover_leases_released"] == 1


def test_a_lease_may_end_before_the_ranks_know_of_it(start: Callable[..., EngineCore]) -> None:
    giver, taker = start(), start()
    one = mixed_requests()[4]
    params = given_at_once_by(giver, one)
    taker.add_request(msgspec.structs.replace(one, kv_transfer=params))
    taker.abort(["r4"])
    transfers = giver._scheduler._transfers
    assert transfers is not None
    wait_until(lambda: transfers._connector.has_released, 10)
    check_nothing_is_held(giver, taker)


def test_leases_do_not_stop_other_requests_for_ever(start: Callable[..., EngineCore]) -> None:
    """Blocks that are lent come back when the lease ends, and the request that waits for them goes on."""
    giver = start(transfer={"kv_connector_extra_config": {"lease_seconds": 0.3}}, num_kv_blocks=40, max_model_len=120)
    for number in range(2):
        given_by(giver, request(f"{number}", prompt_of(number, 60)))
    outputs = run_requests(giver, [request("long", prompt_of(9, 100))])
    assert outputs["long"][-1].finish_reason == "length"
    check_nothing_is_held(giver)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"cas": None}, "other engines' blocks are laid out in another way"),
        ({"do_remote_decode": True}, "are both set"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill must be true or false"),
        ({"remote_port": "x"}, "not as an engine gave them"),
        ({"remote_host": "example.org"}, "takes blocks only from 127.0.0.1"),
        ({"do_remote_decode": True, "do_remote_prefill": False, "cas": {"early": 1}}, "early must be a text"),
    ],
)
def test_wrong_params_are_a_sentence(start: Callable[..., EngineCore], changes: dict[str, Any], sentence: str) -> None:
    giver = start()
    one = mixed_requests()[2]
    params = given_by(giver, one) | changes
    with pytest.raises(ValueError, match=sentence):
        giver.add_request(msgspec.structs.replace(one, kv_transfer=params))


def test_engines_that_differ_and_prompts_that_differ_are_refused(start: Callable[..., EngineCore]) -> None:
    giver, other = start(), start(block_size=8)
    one = mixed_requests()[2]
    params = given_by(giver, one)
    with pytest.raises(ValueError, match="another model, or with other options"):
        other.add_request(msgspec.structs.replace(one, kv_transfer=params))
    with pytest.raises(ValueError, match="another prompt"):
        giver.add_request(msgspec.structs.replace(one, prompt_token_ids=prompt_of(8, 16), kv_transfer=params))
    with pytest.raises(ValueError, match="of one sequence"):
        giver.add_request(msgspec.structs.replace(one, siblings=[Sibling("second")], kv_transfer=dict(GIVE)))


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"kv_connector": "LMCacheConnectorV1"}, "kv_connector must be one of auto, socket"),
        ({"kv_role": "prefill"}, "kv_role must be one of kv_producer"),
        ({"port": 1}, "has no key port"),
        ({"kv_port": 0}, "kv_port must be an integer of 1 to 65535"),
        ({"kv_ip": "0.0.0.0"}, "kv_ip must be the address under which"),
        ({"kv_load_failure_policy": "fail"}, "recompute"),
        ({"kv_connector_extra_config": {"lease_seconds": 0}}, "lease_seconds must be seconds above 0"),
        ({"kv_connector_extra_config": {"peers": "x"}}, "peers must be a list of hosts"),
    ],
)
def test_wrong_options_are_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="kv_transfer_config") as raised:
        parse_kv_transfer_config(given)
    assert sentence in str(raised.value)


def test_vllms_options_are_understood() -> None:
    text = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda", "engine_id": "a", "kv_port": 7777}'
    found = parse_kv_transfer_config(text)
    assert found is not None
    assert found == KVTransferConfig(engine_id="a", port=7777, secret=found.secret)
    assert found.secret not in repr(found)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"kv_offloading_size": 1}, "does not go with kv_connector, kv_offloading_size"),
        ({"enable_prefix_caching": False}, "remove enable_prefix_caching"),
        ({"pipeline_parallel_size": 2}, "does not go with pipeline_parallel_size"),
        ({"enable_lora": True}, "does not go with enable_lora"),
    ],
)
def test_options_that_exclude_each_other(model_dir: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_engine_config(str(model_dir), load_format="dummy", kv_transfer_config={}, **options)
