"""Keys of the prefix cache. The scheduler finds blocks by them, and the router replicas.

The keys of a sequence form a chain, one key per full block: key(b) = SHA-256(key(b-1) ‖ content keys in b ‖ tokens of b
as int64). key(-1), the root, covers what applies to the whole sequence: the cache salt, the prefix key (a LoRA
adapter, say) and the request's step data. So a key names everything that the keys and values of its block depend on.
The hash is a strong one: a collision would show one tenant the cache of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from compile_and_serve.runtime.messages import StepData

ContentKey = tuple[int, bytes]  # token position from which the content applies, and the hash of the content


def root_key(cache_salt: str | None, prefix_key: str | None = None, step_data: StepData | None = None) -> bytes:
    """The root of a chain. Sequences share blocks only where all arguments are equal."""
    parts = [cache_salt, prefix_key]
    if step_data:
        parts.append(repr(sorted(step_data.items())))
    return sha256(b"".join(_with_length(None if part is None else part.encode()) for part in parts)).digest()


def extend_keys(
    keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int, contents: Sequence[ContentKey] = ()
) -> None:
    """Append to `keys`, the chain of a sequence's leading full blocks, until it has `num_blocks` keys.

    token_ids: of the whole sequence. contents: keys of what stands for tokens (images), sorted by position; each
    enters the block that holds its position, and so every block after it.
    """
    start, end = len(keys) * block_size, num_blocks * block_size
    assert end <= len(token_ids), (end, len(token_ids))
    data = array("q", token_ids[start:end]).tobytes()
    parent = keys[-1] if keys else root
    stride = block_size * 8
    if not contents:
        for offset in range(0, len(data), stride):
            parent = sha256(parent + data[offset : offset + stride]).digest()
            keys.append(parent)
        return
    for offset in range(0, len(data), stride):
        block_start = start + offset // 8
        inside = [
            position.to_bytes(8) + _with_length(content)
            for position, content in contents
            if block_start <= position < block_start + block_size
        ]
        parent = sha256(parent + b"".join(inside) + data[offset : offset + stride]).digest()
        keys.append(parent)


def _with_length(part: bytes | None) -> bytes:
    """An encoding that no two lists of parts share."""
    return b"\0" if part is None else b"\1" + len(part).to_bytes(8) + part
