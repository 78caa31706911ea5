"""`RayRanks`: ranks as actors of a Ray cluster, one in each bundle of a placement group.

The placement group uses one host if the ranks fit there, otherwise several. The engine connects to the cluster that
RAY_ADDRESS or this host's Ray names, or starts one on this host alone. Ray starts the ranks and reports when one is gone.
Commands and answers go over ZMQ and TCP, encrypted and authenticated with keys that Ray hands to the ranks. Ray's own
messages and the collectives are not: use it only on a network that nobody else can reach.
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

from compile_and_serve.custom_ops.device_names import BUILT_IN_DEVICES
from compile_and_serve.runtime.child_process import describe_exit, private_folder, remove_after_exit
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.rank_process import RankBootstrap, RankProcess, rank_environment
from compile_and_serve.runtime.distributed.socket_keys import EngineKeys

_PLACEMENT_SECONDS = 60.0


class RayRanks:
    """A `RankHost` on a Ray cluster.

    Construction reserves resources for the ranks. It raises `ValueError` if Ray is not installed, or if the cluster has no
    room for them within a minute.
    """

    cause_seconds = 0.5

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
            from ray.util import get_node_ip_address, placement_group
        except ImportError as error:
            raise ValueError(
                "The executor backend 'ray' needs Ray, which is not installed: pip install 'compile-and-serve[ray]'."
            ) from error
        self._ray = ray
        self.keys: EngineKeys | None = EngineKeys()
        self._hides_devices = config.device in BUILT_IN_DEVICES
        self._runs: list[Any] = []
        self._actors: list[Any] = []
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            # Replicas could not find a cluster that one of them started, and would all take the same devices.
            address = "auto" if config.parallel.data_parallel_size > 1 else None
            try:
                ray.init(address=address, include_dashboard=False, logging_level="warning")
            except ConnectionError as error:
                raise ValueError(
                    "Replicas with the executor backend 'ray' need a Ray cluster to share, and none was found: run 'ray start "
                    "--head' first, or name a cluster in RAY_ADDRESS."
                ) from error
        resources = ray.cluster_resources()
        has_gpus = config.device == "cuda" or (config.device == "auto" and resources.get("GPU", 0) > 0)
        wanted = {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
        self._group = placement_group([wanted] * config.mesh.size, strategy="PACK")
        try:
            if not self._group.wait(_PLACEMENT_SECONDS):
                raise ValueError(
                    f"Ray could not reserve {' and '.join(f'1 {kind}' for kind in wanted)} for each of {config.mesh.size} ranks "
                    f"within {_PLACEMENT_SECONDS:g} seconds. The cluster has {resources.get('CPU', 0):g} CPU and "
                    f"{resources.get('GPU', 0):g} GPU in all: add hosts or lower --tensor-parallel-size."
                )
            self._actors = [self._actor(index, wanted) for index in range(config.mesh.size)]
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
        """0, because Ray lets an actor see only its own GPU. Of a plug-in's platform, the ranks of a host take its devices in order."""
        return 0 if self._hides_devices else self._hosts[:rank].count(self._hosts[rank])

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """See `ranks_on_host`."""
        num_hosts = sum(node["Alive"] for node in self._ray.nodes())
        return ranks_on_host(self._hosts, rank, num_processes=config.num_processes, num_hosts=num_hosts)

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """Start the ranks."""
        self._runs = [actor.run.remote(bootstrap) for actor, bootstrap in zip(self._actors, bootstraps, strict=True)]

    def ended(self) -> dict[int, str]:
        """The ranks whose actors have returned or died."""
        if not self._runs:
            return {}
        ended, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        return {self._runs.index(run): self._describe_end(run) for run in ended}

    def stop(self, seconds: float) -> None:
        """Wait `seconds` for the ranks to end, kill the rest, and release the resources."""
        ray = self._ray
        if not ray.is_initialized():
            return
        if self._runs and seconds > 0:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=seconds)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        ray.util.remove_placement_group(self._group)
        if self._started_ray:
            ray.shutdown()

    def _actor(self, index: int, wanted: dict[str, int]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        variables = {name: os.environ.get(name, value) for name, value in rank_environment().items()}
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return (
            self._ray.remote(_RankActor)
            .options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                runtime_env={"env_vars": variables},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            )
            .remote()
        )

    def _describe_end(self, run: Any) -> str:
        try:
            return describe_exit(self._ray.get(run))
        except self._ray.exceptions.RayError as error:  # the actor's process or host is gone
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"was lost ({type(error).__name__}: {lines[-1][:200] if lines else 'no message'})"


def ranks_on_host(hosts: Sequence[str], rank: int, *, num_processes: int, num_hosts: int) -> int:
    """Estimate how many ranks, of all replicas, share the host of `rank`.

    It is the number of this engine's ranks there, or the mean over all hosts if that is larger, since the hosts of other
    replicas are unknown. hosts: host of each of this engine's ranks. num_processes: ranks of all replicas.
    """
    return max(hosts.count(hosts[rank]), math.ceil(num_processes / num_hosts))


class _RankActor:
    """The rank in a process that Ray starts."""

    def rendezvous(self) -> str:
        """An init_method of torch.distributed with a free port on this actor's host."""
        from ray.util import get_node_ip_address

        address = get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def host(self) -> str:
        """Ray's id of this actor's host."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def run(self, bootstrap: RankBootstrap) -> int:
        """Run the rank until it is told to stop or fails. Returns its exit status."""
        folder = private_folder()
        remove_after_exit(folder)  # Ray may kill this process at any moment
        config = bootstrap.config
        config = replace(config, compile=replace(config.compile, work_dir=Path(folder)))
        process = RankProcess(replace(bootstrap, config=config))
        try:
            return process.run()
        finally:
            process.close()
            shutil.rmtree(folder, ignore_errors=True)
