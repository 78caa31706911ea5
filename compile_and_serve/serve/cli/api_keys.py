"""Where the command line gets API keys from: flags, a file, or the environment."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from compile_and_serve.serve.tenant_options import TenantOptions

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "COMPILE_AND_SERVE_API_KEY"
ADMIN_KEY_VARIABLE = "COMPILE_AND_SERVE_ADMIN_API_KEY"
_ARG_START, _ARG_END = 45, 46  # in /proc/self/stat, counted from the field behind the program's name


def read_api_keys(
    given: Sequence[str] | None, file: Path | None, *, flag: str = "--api-key", variable: str = API_KEY_VARIABLE
) -> tuple[str, ...]:
    """The keys of the flag and of its file (`flag`-file); without either, the environment variable's, which are separated by commas
    or newlines. Keys of the flag are erased from the command line that other users see.

    Raises `ValueError` if the file cannot be read or contains no key.
    """
    keys = list(given or ())
    hide_arguments(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{flag}-file {file} cannot be read: {error}.") from None
        if not any(lines):
            raise ValueError(f"{flag}-file {file} contains no key.")
        keys += filter(None, lines)
    elif not keys and variable in os.environ:
        keys += filter(None, (key.strip() for key in re.split(r"[,\n]", os.environ[variable])))
        if not keys:
            logger.warning("The environment variable %s contains no key, so it is ignored.", variable)
    return tuple(dict.fromkeys(keys))


def with_tenants(keys: Sequence[str], tenants: Sequence[TenantOptions]) -> tuple[str, ...]:
    """All keys: those of tenants, too."""
    return tuple(dict.fromkeys([*keys, *(tenant.key for tenant in tenants if tenant.key is not None)]))


def hide_arguments(secrets: Sequence[str]) -> None:
    """Overwrite these values in this process's command line with `x`, so that `ps` does not show them. Linux only."""
    values = [secret.encode() for secret in secrets if secret]
    if not values:
        return
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, IndexError, ValueError):
        return  # another system: `ps` shows the value until the process ends
    if not 0 < start < end:
        return
    offset = start
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        for value in values:
            if argument == value or (argument.startswith(b"--") and argument.partition(b"=")[2] == value):
                ctypes.memset(offset + len(argument) - len(value), ord("x"), len(value))
        offset += len(argument) + 1
