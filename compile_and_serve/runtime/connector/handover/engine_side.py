"""What the engine does with requests of a handover before they are queued."""

from __future__ import annotations

from typing import Any

import msgspec

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.handover.config import of_replica
from compile_and_serve.runtime.connector.handover.fingerprint import handover_fingerprint
from compile_and_serve.runtime.connector.handover.params import OWN, OwnParams, check_transfer_params, digest_of, early_lease, read_taken
from compile_and_serve.runtime.messages import EngineRequest, KVTransferInfo


def transfer_info(config: EngineConfig, dtype: str) -> KVTransferInfo | None:
    """What clients of the engine are told. dtype: of the model."""
    transfer = config.kv_transfer
    if transfer is None:
        return None
    engine_id, _ = of_replica(transfer, config.parallel.data_parallel_rank)
    return KVTransferInfo(
        role=transfer.role,
        engine_id=engine_id,
        fingerprint=handover_fingerprint(config, dtype),
        hosts=sorted({transfer.host, "127.0.0.1", "localhost", "::1", *transfer.peers}),
        offers_early=config.parallel.data_parallel_size == 1,
    )


def with_handover(request: EngineRequest, info: KVTransferInfo | None) -> EngineRequest:
    """The request, checked, with what goes to the other engine or came from it. Raises `ValueError` with one sentence."""
    params = request.kv_transfer
    assert params is not None
    direction = check_transfer_params(params, info)
    if direction is None:
        return msgspec.structs.replace(request, kv_transfer=None)
    if request.siblings or request.pooling is not None:
        raise ValueError("kv_transfer_params are of one sequence that is generated: set n to 1.")
    assert info is not None
    if direction == "give":
        own = OwnParams(
            fingerprint=info.fingerprint,
            prompt=digest_of(request.prompt_token_ids),
            seed=request.sampling_params.seed,
            early=early_lease(params),
            offers_early=info.offers_early,
        )
        return msgspec.structs.replace(request, kv_transfer=params | {OWN: msgspec.to_builtins(own)})
    taken = read_taken(params)
    if taken.host not in info.hosts and "*" not in info.hosts:
        raise ValueError(
            f"kv_transfer_params name an engine at {taken.host:.100}, but this one takes blocks only from {', '.join(info.hosts)}: name it "
            "in peers of kv_connector_extra_config."
        )
    if not taken.own.early and taken.own.prompt != digest_of(request.prompt_token_ids):
        raise ValueError("kv_transfer_params belong to another prompt: send the body with which the other engine computed it.")
    if taken.own.seed is not None and request.sampling_params.seed is None:
        return msgspec.structs.replace(request, sampling_params=msgspec.structs.replace(request.sampling_params, seed=taken.own.seed))
    return request


def note_seed(request: EngineRequest) -> None:
    """Let the other engine draw from the seed that was chosen for the request."""
    own: dict[str, Any] | None = (request.kv_transfer or {}).get(OWN)
    if own is not None and not own.get("token_ids"):
        own["seed"] = request.sampling_params.seed
