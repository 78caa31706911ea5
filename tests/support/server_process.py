"""A server as a user starts it: `python -m compile_and_serve.serve.cli serve …` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
_START_SECONDS = 240


class ServerProcess:
    """Started on a free port; `url` is known once it serves. Everything it wrote is in `output`. command: serve, or route.
    on_line: is given each line that it writes, in another thread."""

    def __init__(self, *arguments: str, wait: bool = True, command: str = "serve", on_line: Callable[[str], None] | None = None) -> None:
        words = [sys.executable, "-m", "compile_and_serve.serve.cli", command, *arguments]
        # A wide terminal: rich must not break the line with the URL.
        environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.lines: list[str] = []
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url() if wait else ""

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def engine_pids(self) -> list[int]:
        """Processes that the server started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def wait(self, seconds: float = 60) -> int:
        """Wait for the process to end by itself; its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def stop(self) -> int:
        """SIGTERM, then wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if self._on_line is not None:
                self._on_line(line)

    def _wait_for_url(self) -> str:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            found = re.search(r"(?:Serving \S+|Routing) on (http://\S+)", self.output)
            if found:
                return found[1]
            if self.process.poll() is not None:
                self._reader.join(5)
                break
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.output}")
