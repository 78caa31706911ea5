"""Keys of the prefix cache: equal exactly where everything that the block's keys and values depend on is equal."""

from compile_and_serve.runtime.scheduler.prefix_keys import ContentKey, extend_keys, root_key

TOKENS = list(range(100, 124))


def chain(
    tokens: list[int], *, size: int = 4, salt: str | None = None, prefix_key: str | None = None, contents: list[ContentKey] | None = None
) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(salt, prefix_key), tokens, size, len(tokens) // size, contents or [])
    return keys


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
        extend_keys(keys, root_key("salt"), TOKENS, 4, num_blocks, contents)
        assert len(keys) == num_blocks
    assert keys == chain(TOKENS, salt="salt", contents=contents)
