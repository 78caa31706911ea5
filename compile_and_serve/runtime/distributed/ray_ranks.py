"""`RayRanks`: ranks as actors of a Ray cluster, one a bundle of a placement group; on one host as far as they fit, else on several.

The engine connects to the cluster that RAY_ADDRESS or this host's Ray says, or starts one of this host alone. Ray starts the ranks
and says when one is gone; commands and answers go over ZMQ as everywhere, here over TCP, which is neither encrypted nor
authenticated: as Ray itself, it is for a network that only you can reach.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.child_process import describe_exit, private_folder, remove_after_us
from compile_and_serve.runtime.distributed.rank_process import RankBootstrap, RankProcess

_PLACEMENT_SECONDS = 60.0


class RayRanks:
    """Construction places the ranks; raises `ValueError` where Ray is not installed or has no room for them."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
            from ray.util import get_node_ip_address, placement_group
        except ImportError as error:
            raise ValueError(
                "The executor backend 'ray' needs Ray, which is not installed: pip install 'compile-and-serve[ray]'."
            ) from error
        self._ray = ray
        self._runs: list[Any] = []
        self._actors: list[Any] = []
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            # A cluster that one replica starts is found by no other: they would all take the same devices.
            address = "auto" if config.parallel.data_parallel_size > 1 else None
            try:
                ray.init(address=address, include_dashboard=False, logging_level="warning")
            except ConnectionError as error:
                raise ValueError(
                    "Replicas with the executor backend 'ray' share a Ray cluster, and none was found: run 'ray start --head' "
                    "before, or name one in RAY_ADDRESS."
                ) from error
        resources = ray.cluster_resources()
        has_gpus = config.device == "cuda" or (config.device == "auto" and resources.get("GPU", 0) > 0)
        wanted = {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
        self._group = placement_group([wanted] * config.num_ranks, strategy="PACK")
        try:
            if not self._group.wait(_PLACEMENT_SECONDS):
                raise ValueError(
                    f"Ray found no place for {config.num_ranks} ranks with {' and '.join(f'1 {kind}' for kind in wanted)} each "
                    f"within {_PLACEMENT_SECONDS:g} seconds: the cluster has {resources.get('CPU', 0):g} CPU and "
                    f"{resources.get('GPU', 0):g} GPU in all."
                )
            self._actors = [self._actor(index, wanted) for index in range(config.num_ranks)]
            self.rendezvous = ray.get(self._actors[0].rendezvous.remote())
            self._hosts = ray.get([actor.host.remote() for actor in self._actors])
        except BaseException:
            self.stop(0.0)
            raise
        self._own_address = get_node_ip_address()

    def address(self, name: str) -> str:
        """A free TCP port on the engine's host."""
        return f"tcp://{self._own_address}:*"

    def device_index(self, rank: int) -> int:
        """Ray shows each actor the GPU that it was given, and no other."""
        return 0

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """Ranks of ours on its host; those of other replicas are counted as if they lay evenly on the cluster's hosts."""
        num_hosts = sum(node["Alive"] for node in self._ray.nodes())
        return max(self._hosts.count(self._hosts[rank]), math.ceil(config.num_processes / num_hosts))

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """Begin to run the ranks."""
        self._runs = [actor.run.remote(bootstrap) for actor, bootstrap in zip(self._actors, bootstraps, strict=True)]

    def ended(self) -> dict[int, str]:
        """As Ray says."""
        if not self._runs:
            return {}
        over, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        return {self._runs.index(run): self._how(run) for run in over}

    def stop(self, seconds: float) -> None:
        """Wait, then kill; give back the places."""
        ray = self._ray
        if not ray.is_initialized():
            return
        if self._runs and seconds > 0:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=seconds)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        ray.util.remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()

    def _actor(self, index: int, wanted: dict[str, int]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return (
            self._ray.remote(_RankActor)
            .options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            )
            .remote()
        )

    def _how(self, run: Any) -> str:
        try:
            return describe_exit(self._ray.get(run))
        except self._ray.exceptions.RayError as error:  # the actor's process or host is gone
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"was lost ({type(error).__name__}: {lines[-1][:200] if lines else 'no message'})"


class _RankActor:
    """A rank's process, in Ray's hands."""

    def rendezvous(self) -> str:
        """Where ranks can meet on this actor's host, as torch.distributed's init_method."""
        from ray.util import get_node_ip_address

        address = get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def host(self) -> str:
        """Which of the cluster's hosts this is."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def run(self, bootstrap: RankBootstrap) -> int:
        """Until the rank is told to stop, or fails; its exit status."""
        folder = private_folder()
        remove_after_us(folder)  # Ray may end us at any moment
        config = bootstrap.config
        config = replace(config, compile=replace(config.compile, work_dir=Path(folder)))
        process = RankProcess(replace(bootstrap, config=config))
        try:
            return process.run()
        finally:
            process.close()
            shutil.rmtree(folder, ignore_errors=True)
