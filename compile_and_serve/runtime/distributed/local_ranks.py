"""`LocalRanks`: ranks as child processes on this host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compile_and_serve.runtime.child_process import boot_input, describe_exit, one_device, private_folder
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.rank_process import BOOT_CODE, RankBootstrap, rank_environment
from compile_and_serve.runtime.distributed.socket_keys import EngineKeys


class LocalRanks:
    """A `RankHost` of child processes on this host. Sockets and rendezvous lie in a folder that only this user can enter."""

    cause_seconds = 0.5

    def __init__(
        self, device: str, first_device: int, parent: Path | None, *, environment: Mapping[str, str] | None = None, first_rank: int = 0
    ) -> None:
        """device: the option. first_device: number of the first rank's device; the other ranks get the devices after it.

        parent: where the folder is created; None is the system's temporary folder. environment: defaults of the ranks' variables; None:
        all ranks are on this host. first_rank: number of the first rank here.
        """
        self._device, self._first_rank = device, first_rank
        self._first_device = first_device
        if environment is None:
            # gloo and NCCL need not resolve the host's name, nor listen on the network.
            has_loopback = any(name == "lo" for _, name in socket.if_nameindex())
            environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if has_loopback else {}
        self._environment = environment
        self._folder = private_folder(parent)
        self.rendezvous = f"file://{self._folder}/meeting"
        self.keys: EngineKeys | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def address(self, name: str) -> str:
        """A Unix socket in the folder."""
        return f"ipc://{self._folder}/{name}"

    def device_index(self, rank: int) -> int:
        """A rank sees only its own CUDA device, which is device 0 there."""
        return one_device(self._first_device + rank, self._device)[1]

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """All ranks share this host."""
        return config.num_processes

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """Start one Python process for each rank. Its standard input stays open as long as this process lives."""
        environment = {**self._environment, **rank_environment(), **os.environ}
        for bootstrap in bootstraps:
            device = one_device(self._first_device + bootstrap.rank.index - self._first_rank, self._device)[0]
            process = subprocess.Popen([sys.executable, "-c", BOOT_CODE], stdin=subprocess.PIPE, env={**environment, **device})
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which `ended` will report
                process.stdin.write(boot_input(self._with_folder(bootstrap)))
                process.stdin.flush()

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, described by their exit status."""
        statuses = {rank: process.poll() for rank, process in enumerate(self._processes, self._first_rank)}
        return {rank: describe_exit(status) for rank, status in statuses.items() if status is not None}

    def stop(self, seconds: float) -> None:
        """Wait `seconds` for the processes to end, kill the rest, and remove the folder."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _with_folder(self, bootstrap: RankBootstrap) -> RankBootstrap:
        config = bootstrap.config
        config = replace(config, compile=replace(config.compile, work_dir=Path(self._folder)))
        return replace(bootstrap, config=config, folder=self._folder)
