"""`DraftMethod`: a way to draft tokens, registered under its name in `speculative_config`.

The API process checks the options, and imports no torch for it. So the class that drafts on the device is imported when an engine needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from compile_and_serve.plugins import load_plugins
from compile_and_serve.runtime.drafting.host_drafter import HostDrafter
from compile_and_serve.runtime.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftMethod:
    """One way to draft, with what drafts on the host, on the device, or either.

    default_tokens: the most draft tokens of a sequence in a step, if the config does not say. host: makes what drafts in the scheduler.
    device: gives the class that drafts in the runner; a method that has both drafts there on asynchronous devices. takes_model: whether
    the config names a model. may_be_pickled: whether this model's weights may be a file of PyTorch's. max_graph_tokens: longer drafts are
    not captured as CUDA graphs: they are rarely full, and padding would cost more than a graph saves.
    """

    name: str
    default_tokens: int
    host: Callable[[SpeculativeConfig], HostDrafter] | None = None
    device: Callable[[], type[DeviceDrafts]] | None = None
    takes_model: bool = False
    may_be_pickled: bool = True
    max_graph_tokens: int = 8

    def drafts_on_device(self, *, is_asynchronous: bool) -> bool:
        """Whether the runner drafts. is_asynchronous: of the device."""
        return self.device is not None and (self.host is None or is_asynchronous)


METHODS: dict[str, DraftMethod] = {}


def register_method(method: DraftMethod) -> None:
    """Make a method known to `speculative_config`."""
    METHODS[method.name] = method


def known_methods() -> Mapping[str, DraftMethod]:
    """All methods by name, those of plug-ins included. Raises `PluginError`."""
    load_plugins("drafters")
    return METHODS


def method_of(config: SpeculativeConfig) -> DraftMethod:
    """The method that a config names."""
    return known_methods()[config.method]


def in_package(module: str, name: str) -> Callable[[], Any]:
    """`DraftMethod.device` for a class of this package."""
    return lambda: getattr(import_module(f"{__package__}.{module}"), name)
