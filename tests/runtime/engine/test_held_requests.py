from __future__ import annotations

from compile_and_serve.runtime.engine.held_requests import HeldRequests, TenantsInFlight
from compile_and_serve.runtime.messages import EngineRequest, Sibling, Tenant
from compile_and_serve.runtime.sampling_params import SamplingParams


def request(name: str, weight: float = 1.0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        siblings=[Sibling(f"{name}.1")],
        tenant=Tenant(name[0], weight),
    )


def test_the_next_request_is_of_the_key_with_the_fewest_for_its_weight() -> None:
    in_flight = TenantsInFlight()
    held = HeldRequests(in_flight)
    for name, weight in (("a0", 1.0), ("a1", 1.0), ("b0", 2.0), ("b1", 2.0), ("b2", 2.0)):
        held.add(request(name, weight))
    order = []
    while held:
        if len(order) == 3:
            assert held.abort(["b2", "b2.1", "unknown"]) == ["unknown"]
        taken, aborted = held.pop()
        assert not aborted
        in_flight.add(taken)
        order.append(taken.request_id)
    assert order == ["a0", "b0", "b1", "a1"]
    assert in_flight.counts == {"a": 4, "b": 4}
    for name in ("a0", "a0.1", "a1", "a1.1", "a1.1"):
        in_flight.remove(name)
    assert in_flight.counts == {"b": 4}
    assert set(in_flight.tenants) == {"b"}
