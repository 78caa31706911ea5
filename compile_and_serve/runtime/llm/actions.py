"""`LLM.predict_action`: what a robot should do, without a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_and_serve.runtime.actions import ActionError, ActionSpace
from compile_and_serve.runtime.llm.prompts import Prompt
from compile_and_serve.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compile_and_serve.runtime.messages import EngineInfo


class ActionMethods(ABC):
    """The part of `LLM` for models of the OpenVLA kind."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """The engine's limits."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling_params: SamplingParams, *, use_tqdm: bool) -> Any:
        """See `LLM.generate`."""

    def predict_action(self, prompts: Prompt | Sequence[Prompt], unnorm_key: str | None = None) -> list[list[float]]:
        """The action for each prompt, in the units of the dataset `unnorm_key`, which may be left out if the model knows only one.

        prompts: as of `generate`: {"prompt": "In: What action should the robot take to …?\\nOut:", "multi_modal_data": {"image": …}}.
        Raises `ActionError`, a `ValueError`, for a key that the model does not know, and for one that gives no actions.
        """
        space = ActionSpace.of(self.info.media)
        if space is None:
            raise ActionError("This model gives no actions: load one of the OpenVLA kind.")
        many: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = SamplingParams(temperature=0.0, max_tokens=space.num_tokens(unnorm_key), ignore_eos=True)
        return [space.action(one.outputs[0].token_ids, unnorm_key) for one in self.generate(many, params, use_tqdm=False)]
