"""`DeviceAdapters`: one rank's adapters, in host memory and in the slots of the model's weights.

Shape legend: R the largest rank, I and O input and output features.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from compile_and_serve.compiler.weights.adapter_sites import AdapterSite
from compile_and_serve.compiler.weights.embedding_slots import EmbeddingSite
from compile_and_serve.compiler.weights.expert_slots import ExpertSite
from compile_and_serve.custom_ops.mesh import Coordinates
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.models.spec import TensorPart
from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.peft_files import open_adapter
from compile_and_serve.runtime.lora.request import AdapterTarget, LoRARequest
from compile_and_serve.runtime.lora.timed_thread import TimedThread

logger = logging.getLogger(__name__)

READ_SECONDS = 120.0  # for one adapter
HostAdapter = dict[str, torch.Tensor]  # name of the weight → one slot's values


def adapter_targets(
    sites: Sequence[AdapterSite], weight_map: Mapping[str, str | None], parts: Mapping[str, TensorPart]
) -> dict[str, list[AdapterTarget]]:
    """What adapters may change, by names in the checkpoint; one of several targets is told by its shape.

    weight_map, parts: of the model's spec. In the names of one expert's linears, {} stands for the expert's number. The stacked
    weights of a module are found by the module's name, as PEFT saves them.
    """
    found: dict[str, list[AdapterTarget]] = {}
    stacked: dict[str, ExpertSite] = {}
    for site in sites:
        if isinstance(site, ExpertSite):
            stacked[site.module] = site
            target = AdapterTarget(site.module, site.in_features, site.out_features, num_experts=site.num_experts)
            found.setdefault(site.module.rpartition(".")[0], []).append(target)
        else:
            is_embedding = isinstance(site, EmbeddingSite)
            found[site.module] = [AdapterTarget(site.module, site.in_features, site.out_features, is_embedding)]
    for name, parameter in weight_map.items():
        module = None if parameter is None else parameter.removesuffix(".weight")
        if module in found and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = found[module]
    for name, part in parts.items():
        if part.index == 0 and part.parameter in stacked:
            site = stacked[part.parameter]
            before, _, after = name.removesuffix(".weight").rpartition(".0.")
            found[f"{before}.{{}}.{after}"] = [
                AdapterTarget(site.module, site.in_features, part.num_rows, num_experts=site.num_experts, first_row=part.first_row)
            ]
    return found


def _compute_alone(make_current: Callable[[], None]) -> None:
    """Let this thread's tensor operations use no other threads. make_current: the device."""
    make_current()
    num_threads = torch.get_num_threads()  # sets this thread's number to the default; otherwise its first operation would
    torch.set_num_threads(1)
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))  # the default of threads that begin later
    other.start()
    other.join()


class DeviceAdapters:
    """Reads adapters in a thread, and copies them into slots. Whatever is wrong with a file fails its reading and nothing else.

    weights: of the compiled model, by name. coordinates: of this rank.
    """

    def __init__(
        self,
        sites: Sequence[AdapterSite],
        targets: Mapping[str, list[AdapterTarget]],
        weights: Mapping[str, torch.Tensor],
        max_rank: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        coordinates: Coordinates,
    ) -> None:
        self.targets = targets
        self._sites = {site.module: site for site in sites}
        self._weights = weights
        self._slot_weights = tuple(dict.fromkeys(name for site in sites for name in (site.a, site.b)))
        self._max_rank = max_rank
        self._platform, self._dtype, self._coordinates = platform_of(device), dtype, coordinates
        self._host: dict[int, Future[HostAdapter]] = {}
        self._stamps: dict[int, tuple[int, int]] = {}  # of the files that were read first
        # One thread: several would only compete for the disk and for the cores of the engine.
        self._reader = TimedThread[HostAdapter]("adapters", READ_SECONDS, partial(_compute_alone, self._platform.make_current))
        self._reader.submit(dict).result()  # the thread is prepared

    def load(self, adapter: LoRARequest) -> Future[HostAdapter]:
        """Read an adapter into host memory. The result may raise `AdapterError`."""
        found = self._host.get(adapter.lora_int_id)
        if found is None:
            found = self._host[adapter.lora_int_id] = self._reader.submit(partial(self._read_checked, adapter))
        return found

    def drop(self, adapter_id: int) -> None:
        """Free an adapter's host memory; its slot stays as it is."""
        self._host.pop(adapter_id, None)

    def place(self, slot: int, adapter_id: int) -> None:
        """Copy a loaded adapter into a slot, after the steps that were launched before."""
        adapter = self._host[adapter_id].result()
        for name in self._slot_weights:
            values = adapter.get(name)
            if values is None:
                self._weights[name][slot].zero_()
            else:
                self._weights[name][slot].copy_(values, non_blocking=True)

    def _read_checked(self, adapter: LoRARequest) -> HostAdapter:
        try:
            return self._read(adapter.lora_int_id, Path(adapter.lora_path))
        except AdapterError:
            raise
        except Exception as error:
            logger.warning("Reading the adapter %s failed.", adapter.lora_path, exc_info=error)
            raise AdapterError(f"{adapter.lora_path} could not be read ({type(error).__name__}: {error!s:.200}).") from None

    def _read(self, adapter_id: int, path: Path) -> HostAdapter:
        with open_adapter(path, self.targets, self._max_rank, deadline=time.monotonic() + READ_SECONDS) as file:
            if self._stamps.get(adapter_id, file.stamp) != file.stamp:
                raise AdapterError(f"{path} has changed since it was loaded as {adapter_id}: load it with a new lora_int_id.")
            # Other stages of a pipeline have the others.
            sites = [self._sites[part.target.module] for part in file.parts if part.target.module in self._sites]
            names = list(dict.fromkeys(name for site in sites for name in (site.a, site.b)))
            # Many small pieces: while memory is pinned, the device takes no launches.
            adapter = {
                name: self._platform.host_zeros(self._weights[name][0].numel(), self._dtype).view(self._weights[name].shape[1:])
                for name in names
            }
            for part, a_RI, b_OR in file.tensors(self._dtype):
                site = self._sites.get(part.target.module)
                if site is None:
                    continue
                slots = adapter[site.a], adapter[site.b]
                if isinstance(site, ExpertSite):
                    site.fill(*slots, a_RI, b_OR, self._coordinates, part.expert, part.target.first_row)
                else:
                    site.fill(*slots, a_RI, b_OR, self._coordinates)
        self._stamps[adapter_id] = file.stamp
        return adapter
