"""`--tenants FILE`: the API keys of a server with their names, weights and limits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

MAX_FILE_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantOptions:
    """An API key and what it may use.

    key: None: requests of a server without keys. weight: its share among the keys that want something at the same time. max_running,
    max_waiting: sequences. requests_per_minute, tokens_per_minute: None is no limit.
    """

    name: str
    key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def has_rates(self) -> bool:
        """Whether its requests or tokens a minute are limited."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    key: str
    name: str
    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def read_tenants(file: Path) -> tuple[TenantOptions, ...]:
    """The entries of a YAML file. Raises `ValueError` with one sentence if it cannot be read or an entry is wrong."""
    entries = _load(file)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"--tenants {file} must be a list of entries with 'key' and 'name'.")
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(_checked(msgspec.convert(entry, _Entry)))
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(f"--tenants {file}, entry {number}: {str(error).rstrip('.')}.") from None
    for what in ("name", "key"):
        values = [getattr(one, what) for one in found]
        if len(set(values)) < len(values):
            raise ValueError(f"--tenants {file}: two entries have the same {what}.")
    return tuple(found)


def _load(file: Path) -> Any:
    import yaml

    try:
        if not file.is_file():
            raise ValueError(f"--tenants {file} is not a regular file.")
        with file.open("rb") as content:
            text = content.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"--tenants {file} is larger than {MAX_FILE_BYTES} bytes.")
        return yaml.safe_load(text.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"--tenants {file} is nested too deeply: it is a list of entries with 'key' and 'name'.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--tenants {file} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        # The error's text repeats lines of the file, which holds keys.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise ValueError(f"--tenants {file} is not valid YAML{where}.") from None


def _checked(entry: _Entry) -> TenantOptions:
    if not _NAME.fullmatch(entry.name):
        raise ValueError("name must be 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    if not entry.key.strip() or entry.key != entry.key.strip():
        raise ValueError("key must be a text without spaces around it")
    if not 0.001 <= entry.weight <= 1000:
        raise ValueError(f"weight must be from 0.001 to 1000, got {entry.weight:g}")
    for name, least in (("max_running", 1), ("max_waiting", 0), ("requests_per_minute", 1), ("tokens_per_minute", 1)):
        value = getattr(entry, name)
        if value is not None and not least <= value < 1 << 53:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    return TenantOptions(**msgspec.structs.asdict(entry))


def tenants_of(tenants: Sequence[TenantOptions], keys: Sequence[str]) -> dict[str, TenantOptions]:
    """The tenant of each key, by the key's digest. Keys without an entry get a name of their digest."""
    found = {digest_of(one.key): one for one in tenants if one.key is not None}
    for key in keys:
        digest = digest_of(key)
        found.setdefault(digest, TenantOptions(name=f"key-{digest[:8]}", key=key))
    return found


def digest_of(key: str) -> str:
    """What names a key where the key itself must not be seen."""
    return hashlib.sha256(key.encode()).hexdigest()
