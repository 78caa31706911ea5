"""Asks a server for /health again and again, in a process of its own: `python tests/support/health_probe.py HOST:PORT`.

Each answer is a line on stdout: seconds, and the status (0: no answer).
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from typing import Any

_PAUSE = 0.01
_TIMEOUT = 30.0


class HealthProbe:
    """The process. Leaving the `with` block ends it; then `figures` has what it saw. url: the server's."""

    def __init__(self, url: str) -> None:
        self._url = url.removeprefix("http://")
        self.seconds: list[float] = []
        self.statuses: dict[int, int] = {}

    def __enter__(self) -> HealthProbe:
        command = [sys.executable, __file__, self._url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._first = self._process.stdout.readline()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        for line in [self._first, *self._process.communicate()[0].splitlines()]:
            seconds, _, status = line.partition(" ")
            if status:
                self.seconds.append(float(seconds))
                self.statuses[int(status)] = self.statuses.get(int(status), 0) + 1

    @property
    def figures(self) -> dict[str, Any]:
        """Milliseconds, and how often each status came."""
        ordered = sorted(self.seconds)
        places = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
        times = {f"health_{name}_ms": round(ordered[place] * 1e3, 1) for name, place in places.items()}
        return {**times, "health_statuses": self.statuses}


def _probe(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT)
    while True:
        started = time.perf_counter()
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        print(f"{time.perf_counter() - started:.6f} {status}", flush=True)
        time.sleep(_PAUSE)


if __name__ == "__main__":
    _probe(sys.argv[1])
