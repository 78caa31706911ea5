"""Keys of the prefix cache: equal exactly where everything that the block's keys and values depend on is equal."""

import numpy as np
import pytest

from compile_and_serve.custom_ops.step_data import ArrayInfo, MediaItem, PromptContents, StepArray
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys, root_key

TOKENS = list(range(100, 124))


def chain(
    tokens: list[int],
    *,
    size: int = 4,
    salt: str | None = None,
    prefix_key: str | None = None,
    contents: list[tuple[int, bytes]] | None = None,
    arrays: dict[str, StepArray] | None = None,
) -> list[bytes]:
    """contents: position and key of media items."""
    keys: list[bytes] = []
    inside = PromptContents.of(items(contents or []), arrays or {})
    extend_keys(keys, root_key(salt, prefix_key), tokens, size, len(tokens) // size, inside)
    return keys


def items(contents: list[tuple[int, bytes]]) -> list[MediaItem]:
    return [MediaItem(key=key, position=position, length=1) for position, key in contents]


def num_equal(a: list[bytes], b: list[bytes]) -> int:
    equal = [x == y for x, y in zip(a, b, strict=True)]
    assert equal == sorted(equal, reverse=True), "equal keys after different ones"
    return sum(equal)


def test_keys_are_equal_up_to_the_first_different_token() -> None:
    other = TOKENS.copy()
    other[13] = 7
    assert len(set(chain(TOKENS))) == 6
    assert num_equal(chain(TOKENS), chain(TOKENS)) == 6
    assert num_equal(chain(TOKENS), chain(other)) == 3


def test_roots_keep_salts_and_prefix_keys_apart() -> None:
    names = [None, "", "a", "b", "ab"]
    firsts = {chain(TOKENS, salt=salt, prefix_key=prefix_key)[0] for salt in names for prefix_key in names}
    assert len(firsts) == len(names) ** 2


def test_step_data_keeps_requests_apart() -> None:
    roots = [root_key("a"), root_key("a", None, {"x": 1}), root_key("a", None, {"x": 2}), root_key("a", None, {"y": 1})]
    assert len(set(roots)) == 4
    assert root_key("a", None, {"x": 1, "y": 2}) == root_key("a", None, {"y": 2, "x": 1})
    assert root_key("a", None, {}) == root_key("a")


def test_a_content_key_counts_from_the_block_of_its_position_on() -> None:
    plain = chain(TOKENS)
    image = chain(TOKENS, contents=[(9, b"image")])
    assert num_equal(plain, image) == 2
    assert num_equal(image, chain(TOKENS, contents=[(9, b"image")])) == 6
    assert num_equal(image, chain(TOKENS, contents=[(9, b"other")])) == 2
    assert num_equal(image, chain(TOKENS, contents=[(10, b"image")])) == 2
    assert num_equal(image, chain(TOKENS, contents=[(9, b"image"), (20, b"image")])) == 5
    together = chain(TOKENS, contents=[(9, b"im"), (9, b"age")])
    assert num_equal(image, together) == 2


def test_a_chain_extended_in_parts_is_the_same_chain() -> None:
    keys: list[bytes] = []
    contents = [(9, b"image"), (17, b"other")]
    for num_blocks in (1, 1, 4, 6):
        extend_keys(keys, root_key("salt"), TOKENS, 4, num_blocks, PromptContents.of(items(contents), {}))
        assert len(keys) == num_blocks
    assert keys == chain(TOKENS, salt="salt", contents=contents)


def test_a_row_of_an_array_counts_from_the_block_of_its_token_on() -> None:
    rows = np.arange(24 * 3).reshape(24, 3)
    other = rows.copy()
    other[14, 1] = -1
    place, moved = StepArray.of(rows), StepArray.of(other)
    assert num_equal(chain(TOKENS, arrays={"a": place}), chain(TOKENS, arrays={"a": StepArray.of(rows.copy())})) == 6
    assert num_equal(chain(TOKENS, arrays={"a": place}), chain(TOKENS, arrays={"a": moved})) == 3
    assert num_equal(chain(TOKENS), chain(TOKENS, arrays={"a": StepArray.of(rows[9:], start=9)})) == 2
    alike: list[dict[str, StepArray]] = [{"b": place}, {"a": StepArray.of(rows.astype(np.int32))}, {}]
    alike.append({"a": StepArray.of(rows.reshape(24, 3, 1))})
    assert len({chain(TOKENS, arrays=arrays)[0] for arrays in ({"a": place}, *alike)}) == 5
    # In whichever order they were given.
    both = {"a": place, "b": moved}
    assert chain(TOKENS, arrays=both) == chain(TOKENS, arrays=dict(reversed(both.items())))


def test_arrays_of_media_do_not_count_beside_their_keys() -> None:
    chains: list[list[bytes]] = []
    for rows in (np.zeros((2, 2), dtype=np.float32), np.ones((2, 2), dtype=np.float32)):
        media = [MediaItem(key=b"k", position=5, length=2, arrays={"a": StepArray.of(rows, start=5)})]
        chains.append([])
        extend_keys(chains[-1], root_key(None), TOKENS, 4, 6, PromptContents.of(media, {}))
    assert chains[0] == chains[1]


INFOS = [ArrayInfo(name="places", row_shape=(3,), limit=50), ArrayInfo(name="rows", row_shape=(2,), is_floating=True)]


def check(arrays: dict[str, StepArray], media: list[MediaItem]) -> None:
    contents = PromptContents.of(media, arrays)
    assert contents is not None
    contents.check(10, INFOS)


@pytest.mark.parametrize(
    ("arrays", "media", "message"),
    [
        ({"x": StepArray.of(np.zeros(3, dtype=np.int64))}, [], "The model's inputs read no array 'x': they read places, rows"),
        ({"places": StepArray.of(np.zeros((3, 2), dtype=np.int64))}, [], r"integer rows of shape \[3\]"),
        ({"rows": StepArray.of(np.zeros((3, 2), dtype=np.int64))}, [], "floating rows"),
        ({"places": StepArray.of(np.zeros((9, 3), dtype=np.int64), start=3)}, [], "tokens 3 to 11 of a prompt of 10"),
        ({"places": StepArray.of(np.zeros((0, 3), dtype=np.int64))}, [], "tokens 0 to -1"),
        ({"places": StepArray.of(np.zeros((9, 3), dtype=np.int64), start=-1)}, [], "tokens -1 to 7"),
        ({"places": StepArray.of(np.full((4, 3), 50))}, [], "they must be 0 to 49"),
        ({"places": StepArray(dtype="int64", row_shape=(3,), data=memoryview(b"x" * 25))}, [], "25 bytes, no multiple of 24"),
        ({}, [MediaItem(key=b"", position=8, length=3)], "A media item stands at tokens 8 to 10 of a prompt of 10"),
        ({}, [MediaItem(key=b"", position=4, length=3), MediaItem(key=b"", position=5, length=1)], "one behind the other"),
        (
            {},
            [MediaItem(key=b"", position=4, length=2, arrays={"rows": StepArray.of(np.zeros((2, 2), dtype=np.float32), start=3)})],
            "values for other tokens than the item's",
        ),
    ],
)
def test_arrays_and_media_that_do_not_fit_are_refused(arrays: dict[str, StepArray], media: list[MediaItem], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(arrays, media)


def test_arrays_and_media_that_fit_are_taken() -> None:
    rows = StepArray.of(np.zeros((2, 2), dtype=np.float32), start=4)
    check({"places": StepArray.of(np.zeros((11, 3), dtype=np.int64))}, [MediaItem(key=b"", position=4, length=2, arrays={"rows": rows})])


def test_an_array_that_numpy_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of uint8, int32, int64, float16, bfloat16, float32, got float64"):
        StepArray.of(np.zeros(3))
