"""Keys of the prefix cache. The scheduler finds blocks by them, and the router replicas.

The keys of a sequence form a chain, one key per full block: key(b) = SHA-256(key(b-1) ‖ contents of b ‖ tokens of b
as int64). The contents are the keys of the media that begin in b, and the rows of the request's arrays for its tokens. key(-1), the root,
covers what applies to the whole sequence: the cache salt, the prefix key (a LoRA adapter, say) and the scalars of the request's step data.
So a key names everything that the keys and values of its block depend on, and no more: prompts share what stands before their images.
The hash is a strong one: a collision would show one tenant the cache of another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import sha256

from compile_and_serve.custom_ops.step_data import MediaItem, PromptContents
from compile_and_serve.runtime.messages import StepData


def root_key(cache_salt: str | None, prefix_key: str | None = None, step_data: StepData | None = None) -> bytes:
    """The root of a chain. Sequences share blocks only where all arguments are equal."""
    parts = [cache_salt, prefix_key]
    if step_data:
        parts.append(repr(sorted(step_data.items())))
    return sha256(b"".join(_with_length(None if part is None else part.encode()) for part in parts)).digest()


def extend_keys(
    keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int, contents: PromptContents | None = None
) -> None:
    """Append to `keys`, the chain of a sequence's leading full blocks, until it has `num_blocks` keys.

    token_ids: of the whole sequence. contents: what stands beside them. It enters its block, and so every block after it.
    """
    start, end = len(keys) * block_size, num_blocks * block_size
    assert end <= len(token_ids), (end, len(token_ids))
    data = array("q", token_ids[start:end]).tobytes()
    parent = keys[-1] if keys else root
    stride = block_size * 8
    if contents is None:
        for offset in range(0, len(data), stride):
            parent = sha256(parent + data[offset : offset + stride]).digest()
            keys.append(parent)
        return
    for offset in range(0, len(data), stride):
        block_start = start + offset // 8
        inside = contents_of_block(contents, block_start, block_start + block_size)
        parent = sha256(parent + inside + data[offset : offset + stride]).digest()
        keys.append(parent)


def contents_of_block(contents: PromptContents, begin: int, end: int) -> bytes:
    """What stands beside tokens `begin` … `end` - 1, as bytes; b"" where there is nothing."""
    media = contents.media
    inside = media[bisect_left(media, begin, key=_position) : bisect_left(media, end, key=_position)]
    parts = [b"m" + item.position.to_bytes(8) + _with_length(item.key) for item in inside]
    for name, values in contents.arrays.items():
        first_row, end_row = max(begin, values.start), min(end, values.end)
        if first_row < end_row:
            size = values.row_bytes
            rows = memoryview(values.data)[(first_row - values.start) * size : (end_row - values.start) * size]
            kind = f"{name}\0{values.dtype}{values.row_shape}{first_row}-{end_row}".encode()
            parts.append(b"a" + _with_length(kind) + sha256(rows).digest())
    return b"".join(parts)


def _position(item: MediaItem) -> int:
    return item.position


def _with_length(part: bytes | None) -> bytes:
    """An encoding that no two lists of parts share."""
    return b"\0" if part is None else b"\1" + len(part).to_bytes(8) + part
