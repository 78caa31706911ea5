"""`kv_transfer_params`: what goes with a request from the engine that computes its prompt to the one that continues it.

The keys are vLLM's, so that its proxies can carry them: `do_remote_decode` asks an engine to compute a prompt for another one, which gets
the answer's `kv_transfer_params`, where `do_remote_prefill` is set. Under the key `cas` lies what only our engines understand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import msgspec
import numpy as np

from compile_and_serve.runtime.messages import KVTransferInfo, TokenLogprobs

OWN = "cas"
VERSION = 2  # of these parameters and of `wire.py`
MAX_NAME = 100


class OwnParams(msgspec.Struct, kw_only=True):
    """What our engines tell each other. prompt: `digest_of`. lease: names what is lent, and lets its owner fetch it; "": nothing is lent.
    token_ids: that were sampled, one or none, with their logprobs. seed: of the sequence, if it is random. early: name of a lease under
    which a long prompt's blocks are lent while it is computed, if the client gave one; a request that takes it ends at once and loads them.
    offers_early: such a name may be given.
    """

    version: int = VERSION
    fingerprint: str
    prompt: str
    lease: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None
    early: str = ""
    offers_early: bool = False


class Taken(msgspec.Struct, kw_only=True):
    """A request that another engine began. host, port: where to ask for its blocks. num_tokens: that they hold."""

    engine_id: str
    host: str
    port: int
    num_tokens: int
    own: OwnParams


def digest_of(prompt_token_ids: Sequence[int]) -> str:
    """Of a prompt."""
    return sha256(np.asarray(prompt_token_ids, dtype=np.int64).tobytes()).hexdigest()[:32]


def early_lease(params: Mapping[str, Any]) -> str:
    """The name that a client gave to what is lent while the prompt is computed; "": none. Raises `ValueError`."""
    own = params.get(OWN)
    name = own.get("early", "") if isinstance(own, Mapping) else ""
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise ValueError(f"kv_transfer_params: early must be a text of at most {MAX_NAME} characters, got {name!r:.100}.")
    return name


def early_params(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`kv_transfer_params` with which an engine loads what another one computes and lends under this name. given: of an earlier
    request that the other one computed.
    """
    own = given[OWN] | {"lease": name, "early": name, "prompt": "", "token_ids": [], "logprobs": None, "seed": None}
    return dict(given) | {"remote_block_ids": None, "remote_num_tokens": 0, OWN: own}


def direction_of(params: Mapping[str, Any]) -> Literal["give", "take"] | None:
    """Whether the request goes to another engine or comes from one; None: neither. Raises `ValueError`."""
    flags = {}
    for name in ("do_remote_decode", "do_remote_prefill"):
        flags[name] = params.get(name) or False
        if not isinstance(flags[name], bool):
            raise ValueError(f"kv_transfer_params: {name} must be true or false, got {flags[name]!r:.100}.")
    if all(flags.values()):
        raise ValueError("kv_transfer_params: do_remote_decode and do_remote_prefill are both set: one engine computes, the other takes.")
    return "give" if flags["do_remote_decode"] else "take" if flags["do_remote_prefill"] else None


def read_taken(params: Mapping[str, Any]) -> Taken:
    """What another engine gave. Raises `ValueError` with one sentence."""
    own = params.get(OWN)
    if not isinstance(own, Mapping) or own.get("version") != VERSION:
        raise ValueError(
            "These kv_transfer_params do not come from an engine of this version of compile-and-serve: other engines' blocks are laid out "
            "in another way, so that they cannot be mixed."
        )
    given = {
        "engine_id": params.get("remote_engine_id"),
        "host": params.get("remote_host"),
        "port": params.get("remote_port"),
        "num_tokens": params.get("remote_num_tokens"),
        "own": dict(own),
    }
    try:
        found = msgspec.convert(given, Taken)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params are not as an engine gave them: {error}.") from error
    if not 0 < found.port < 65536 or found.num_tokens < 0 or len(found.own.token_ids) > 1:
        raise ValueError("kv_transfer_params are not as an engine gave them: remote_port, remote_num_tokens or token_ids are out of range.")
    return found


def check_transfer_params(params: Mapping[str, Any], info: KVTransferInfo | None) -> Literal["give", "take"] | None:
    """`direction_of`, for an engine with `info`. Raises `ValueError` for what the engine cannot do."""
    direction = direction_of(params)
    if direction is None:
        return None
    if info is None:
        raise ValueError("This server hands no requests to other engines and takes none: start it with --kv-transfer-config.")
    if direction == "give":
        if info.role == "kv_consumer":
            raise ValueError("kv_transfer_params has do_remote_decode, but this engine only takes requests (kv_role kv_consumer).")
        return direction
    if info.role == "kv_producer":
        raise ValueError("kv_transfer_params has do_remote_prefill, but this engine only computes prompts (kv_role kv_producer).")
    if read_taken(params).own.fingerprint != info.fingerprint:
        raise ValueError(
            "kv_transfer_params come from an engine with another model, or with other options of its KV cache or drafter: start both alike."
        )
    return direction
