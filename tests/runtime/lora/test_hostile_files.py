"""Adapter folders that somebody prepared, or that were damaged: each is one sentence, soon."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.peft_files import CONFIG_FILE, TENSOR_FILE, open_adapter
from compile_and_serve.runtime.lora.request import AdapterTarget

FILES = (CONFIG_FILE, TENSOR_FILE)
MODULE = "model.layers.0.mlp.up_proj"
TARGETS = {MODULE: [AdapterTarget(MODULE, 6, 10)]}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "rank_pattern": {"up_proj": 4}}
A, B = (f"base_model.model.{MODULE}.lora_{x}.weight" for x in "AB")
TENSORS = {A: torch.ones(4, 6), B: torch.ones(10, 4)}


def read(folder: Path, **options: Any) -> None:
    with open_adapter(folder, TARGETS, 8, **options) as file:
        list(file.tensors(torch.float16))


def refused(folder: Path, match: str | None = None, **options: Any) -> str:
    began = time.monotonic()
    with pytest.raises(AdapterError, match=match) as raised:
        read(folder, **options)
    assert time.monotonic() - began < 5.0
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 4000
    return message


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG))
    (tmp_path / TENSOR_FILE).write_bytes(save(TENSORS))
    read(tmp_path)
    return tmp_path


def replace(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "folder": Path.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": bind,
    "link to nothing": lambda path: path.symlink_to("absent"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "file of the kernel": lambda path: path.symlink_to("/proc/self/mem"),
    "empty": Path.touch,
    "sparse": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_of_an_adapter_is_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    monkeypatch.chdir(adapter)  # the path of a socket may have 107 bytes
    replace(adapter / name, SPECIAL[kind])
    refused(adapter)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000, b'{"r":' * 200_000, b'{"a":"\\ud800"}', b"\xff\xfe{", b"1" * 10_000, b'{"peft_type":"LORA","r":1e999}', b"null",
        b'{"peft_type":"LORA"} {}', b" " * (2 << 20), b'{"peft_type":"LORA","r":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_configs_that_are_no_configs(adapter: Path, content: bytes) -> None:
    (adapter / CONFIG_FILE).write_bytes(content)
    refused(adapter)


HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"r": HUGE}, "positive integers up to"),
        ({"r": True}, "positive integers"),
        ({"r": 4.0}, "positive integers"),
        ({"rank_pattern": {"up_proj": HUGE}}, "positive integers up to"),
        ({"lora_alpha": HUGE}, "as numbers up to"),
        ({"lora_alpha": -HUGE}, "as numbers up to"),
        ({"lora_alpha": True}, "as numbers"),
        ({"lora_alpha": 1e300}, "as numbers up to"),
        ({"alpha_pattern": {"up_proj": HUGE}}, "as numbers up to"),
        ({"alpha_pattern": {"up_proj": None}}, "as numbers"),
        ({"lora_alpha": 1e29}, "not finite as torch.float16"),
        ({"use_rslora": "no"}, "true or false"),
        ({"rank_pattern": {"(a+)+$": 2, "(": 3}}, "not a regular expression"),
        ({"rank_pattern": {r"(?<=x)up_proj": 2}}, "not a regular expression"),
        ({"alpha_pattern": {"up" * 1000 + "*": 2}}, "pattern of 2001 characters"),
        ({"alpha_pattern": {f"up{i}*": 2 for i in range(300)}}, "more than 256 patterns"),
        ({"rank_pattern": [["up_proj", 2]]}, "must be an object"),
    ],
)
def test_values_of_a_config_that_are_refused(adapter: Path, changes: dict[str, Any], match: str) -> None:
    (adapter / CONFIG_FILE).write_text(json.dumps(CONFIG | changes))
    refused(adapter, match)


def test_patterns_that_hang_other_readers_are_matched_at_once(adapter: Path) -> None:
    patterns = {r"(([a-z_.])+)+\d!": 2, "(.*)*x": 3, r"(\w+\.?)+-": 4}
    changes = {"rank_pattern": patterns, "alpha_pattern": patterns, "target_modules": r"(([a-z_.])+)+\d!"}
    (adapter / CONFIG_FILE).write_text(json.dumps(CONFIG | changes))
    began = time.monotonic()
    read(adapter)
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({A: torch.full((4, 6), float("nan"))}, "not finite"),
        ({B: torch.full((10, 4), float("-inf"))}, "not finite"),
        ({B: torch.full((10, 4), 6e4)}, "not finite as torch.float16 .scaled by 2"),
        ({A: torch.full((4, 6), 1e300, dtype=torch.float64)}, "not finite"),
        ({A: torch.ones(4, 6, dtype=torch.int32)}, "as I32, but adapters are floating-point numbers"),
        ({B: torch.ones(10, 4, dtype=torch.uint8)}, "as U8"),
        ({A: torch.ones(4, 6, dtype=torch.bool)}, "as BOOL"),
        ({f"{MODULE}.lora_A.weight": torch.ones(4, 6)}, "has both"),
        ({A.replace(".weight", ".default.weight"): torch.ones(4, 6)}, "has both"),
        ({"x" * 600 + ".lora_A.weight": torch.ones(4, 6)}, "not a safetensors header"),
        ({A: torch.ones(4, 6, 1)}, "expected"),
    ],
)
def test_tensors_that_are_refused(adapter: Path, changes: dict[str, torch.Tensor], match: str) -> None:
    (adapter / TENSOR_FILE).write_bytes(save(TENSORS | changes))
    refused(adapter, match)


def with_header(header: Any, data: bytes = bytes(256), length: int | None = None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96], **changes}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x01", with_header(b"", b"", 1 << 63), with_header(b"{}", b"", 1 << 20), with_header(b"[" * 10_000),
        with_header(b'{"a":' * 10_000), with_header({}), with_header([]), with_header({A: 1}), with_header({A: entry(shape=[-4, -6])}),
        with_header({A: entry(shape=[HUGE])}), with_header({A: entry(data_offsets=[0, HUGE])}),
        with_header({A: entry(data_offsets=[96, 0])}),
        with_header({A: entry(data_offsets=[-96, 0])}), with_header({A: entry(shape=[1] * 1000)}), with_header({A: entry(shape="46")}),
        with_header({A: entry(dtype="F128")}, bytes(96)), with_header({A: entry(dtype=None)}), with_header({A: entry()}, bytes(95)),
        with_header({A: entry()}, bytes(97)), with_header({A: entry(), B: entry()}, bytes(96)), with_header({A: entry(shape=[0, 6])}, b""),
        with_header({A: entry(data_offsets=[1 << 62, (1 << 62) + 96])}), with_header({"__metadata__": {"a": [1]}}, b""),
    ],
)  # fmt: skip
def test_headers_that_lie(adapter: Path, content: bytes) -> None:
    (adapter / TENSOR_FILE).write_bytes(content)
    refused(adapter)


def test_a_large_header_is_not_read(adapter: Path) -> None:
    entries = {f"layers.{i}.lora_A.weight": entry(shape=[0], data_offsets=[0, 0]) for i in range(10_000)}
    (adapter / TENSOR_FILE).write_bytes(with_header(entries, b""))
    refused(adapter, "are possible for this model")


def test_a_file_that_is_cut_or_changed_while_it_is_read(adapter: Path) -> None:
    """A mapped file would end the process by SIGBUS."""
    file = adapter / TENSOR_FILE
    whole = file.read_bytes()
    for change, match in (
        (lambda: os.truncate(file, len(whole) - 100), "is truncated"),
        (lambda: os.truncate(file, 0), "is truncated"),
        (lambda: (file.write_bytes(whole), os.utime(file, ns=(1, 1))), "changed while it was read"),
    ):
        file.write_bytes(whole)
        with open_adapter(adapter, TARGETS, 8) as opened:
            change()
            with pytest.raises(AdapterError, match=match):
                list(opened.tensors(torch.float16))


def test_reading_ends_at_the_deadline(adapter: Path) -> None:
    refused(adapter, "could not be read in time", deadline=time.monotonic() - 1)


NUMBERS: tuple[Any, ...] = (0, -1, 1.5, HUGE, None, True, "4", [], {}, 2**31, 1e30)


def damage(files: dict[str, bytes], generator: random.Random) -> str:
    """Damage one of an adapter's files. → how"""
    name = generator.choice(FILES)
    content = bytearray(files[name])
    kind = generator.choice(("cut", "bit", "noise", "value", "value", "length", "repeat"))
    at = generator.randrange(len(content))
    if kind == "cut":
        del content[at:]
    elif kind == "bit":
        content[at] ^= 1 << generator.randrange(8)
    elif kind == "noise":
        content[at : at + 16] = generator.randbytes(generator.randrange(32))
    elif kind == "repeat":
        content[at:at] = content[at : at + generator.randrange(1, 200)] * generator.randrange(1, 50)
    elif kind == "length":
        files[TENSOR_FILE] = struct.pack("<Q", generator.getrandbits(generator.randrange(1, 65))) + files[TENSOR_FILE][8:]
        return kind
    elif name == CONFIG_FILE:
        config = json.loads(content)
        config[generator.choice([*config, "bias", "use_dora", "use_rslora", "init_lora_weights"])] = generator.choice(NUMBERS)
        content = bytearray(json.dumps(config).encode())
    else:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        tensor = header[generator.choice([A, B])]
        field = generator.choice([*tensor])
        tensor[field] = generator.choice([*NUMBERS, [generator.choice(NUMBERS), generator.choice(NUMBERS)], "I64", "F16", "BF16"])
        content = bytearray(with_header(header, bytes(content[8 + length :])))
    files[name] = bytes(content)
    return kind


def outcome(folder: Path) -> str | None:
    """The sentence with which a folder is refused; None if it is read."""
    try:
        read(folder)
    except AdapterError as error:
        return str(error)
    return None


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.exhaustive_cases
def test_damaged_folders_are_sentences(tmp_path: Path, count: int) -> None:
    whole = {CONFIG_FILE: json.dumps(CONFIG).encode(), TENSOR_FILE: save(TENSORS, {"format": "pt"})}
    outcomes: Counter[str] = Counter()
    for number in range(count):
        generator = random.Random(number)
        files = dict(whole)
        kind = damage(files, generator)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        message = outcome(tmp_path)
        outcomes["read" if message is None else "refused"] += 1
        assert message is None or (20 < len(message) < 4000 and "\n" not in message), (number, kind, message)
    assert outcomes["refused"] > count // 2
    assert outcomes["read"] > 0
