"""`DeviceAdapters`: one rank's adapters, in host memory and in the slots of the model's weights.

Shape legend: R the largest rank, I and O input and output features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from compile_and_serve.compiler.weights.adapter_slots import AdapterSite
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.lora.peft_files import open_adapter
from compile_and_serve.runtime.lora.request import AdapterTarget, LoRARequest

HostAdapter = dict[str, torch.Tensor]  # name of the weight → one slot's values


def adapter_targets(sites: Sequence[AdapterSite], weight_map: Mapping[str, str | None]) -> dict[str, AdapterTarget]:
    """The linears that adapters may change, by their names in the checkpoint. weight_map: of the model's spec."""
    by_module = {site.module: AdapterTarget(site.module, site.in_features, site.out_features) for site in sites}
    renamed = {
        name.removesuffix(".weight"): parameter.removesuffix(".weight")
        for name, parameter in weight_map.items()
        if parameter is not None and name.endswith(".weight")
    }
    return by_module | {name: by_module[module] for name, module in renamed.items() if module in by_module}


class DeviceAdapters:
    """Reads adapters in a thread, and copies them into slots.

    weights: of the compiled model, by name. rank: of this process among those that share the model.
    """

    def __init__(
        self, sites: Sequence[AdapterSite], targets: Mapping[str, AdapterTarget], weights: Mapping[str, torch.Tensor],
        max_rank: int, *, device: torch.device, dtype: torch.dtype, rank: int,
    ) -> None:  # fmt: skip
        self.targets = targets
        self._sites = {site.module: site for site in sites}
        self._weights = weights
        self._slot_weights = tuple(dict.fromkeys(name for site in sites for name in (site.a, site.b)))
        self._max_rank = max_rank
        self._platform, self._dtype, self._rank = platform_of(device), dtype, rank
        self._host: dict[int, Future[HostAdapter]] = {}
        # One thread: several would only compete for the disk and for the cores of the engine.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=self._platform.make_current)

    def load(self, adapter: LoRARequest) -> Future[HostAdapter]:
        """Read an adapter into host memory. The result may raise `AdapterError`."""
        found = self._host.get(adapter.lora_int_id)
        if found is None:
            found = self._host[adapter.lora_int_id] = self._reader.submit(self._read, Path(adapter.lora_path))
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

    def _read(self, path: Path) -> HostAdapter:
        file = open_adapter(path, self.targets, self._max_rank)
        sites = [self._sites[part.target.module] for part in file.parts]
        names = list(dict.fromkeys(name for site in sites for name in (site.a, site.b)))
        sizes = [math.prod(self._weights[name].shape[1:]) for name in names]
        memory = self._platform.host_zeros(sum(sizes), self._dtype)  # pinned where the device is asynchronous
        adapter = {
            name: values.view(self._weights[name].shape[1:])
            for name, values in zip(names, memory.split(sizes), strict=True)
        }
        for part, a_RI, b_OR in file.tensors():
            site = self._sites[part.target.module]
            site.fill(adapter[site.a], adapter[site.b], a_RI, b_OR, self._rank)
        return adapter
