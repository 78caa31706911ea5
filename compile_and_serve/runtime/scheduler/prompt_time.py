"""How much longer prompts make the steps of other keys' decodes, and when a key's prompts wait because of it.

A step with prompts takes longer than one of decodes alone, however few tokens they have: it is not one CUDA graph, and the host lays it out
anew. A key whose requests begin all the time (beams, requests that are cancelled, prompt logprobs) would do that to every step. So each key
has an account of time. Steps earn a `FRACTION` of the time of a step of decodes, and what other keys' prompts make steps longer; what its
own prompts make them longer is taken from it. While it is overdrawn, and other keys decode, its prompts wait. Keys that do the same to each
other never wait.

With steps in flight, the host prepares a step while the one before runs, so the steps around one with prompts may take longer, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight

FRACTION = 0.5  # so decodes keep two thirds of their speed beside prompts of one other key, which get a third of the time
MAX_SAVED, MAX_OWED = 32.0, 8.0  # of an account, in steps of decodes
MAX_LONGER = 2.5  # steps of decodes by which one step should get longer
PROBE_STEPS, FIRST_PROBE_STEPS = 64, 8  # after so many without a step of decodes alone, prompts wait for one
_NEW_PART = 0.1  # of an average


class PromptTime:
    """The accounts of all keys. plain: seconds of a step of decodes alone; 0.0 as long as it is unknown."""

    def __init__(self) -> None:
        self.plain = 0.0
        self._saved: dict[str, float] = {}  # seconds, of keys that have not saved all they may
        self._before: dict[str, int] = {}  # keys with prompts in the step before
        self._num_longer = 0  # steps since the last of decodes alone

    @property
    def may_have_overdrawn(self) -> bool:
        """Whether a key may be overdrawn."""
        return bool(self._saved)

    def is_overdrawn(self, key: str) -> bool:
        """Whether a key's prompts must wait."""
        return self._saved.get(key, 0.0) < 0.0

    def needs_plain_step(self, *, several: bool) -> bool:
        """Whether it is not known what a step of decodes takes now. several: keys have prompts, which should wait less often."""
        return self._num_longer >= (PROBE_STEPS if self.plain else FIRST_PROBE_STEPS) * (2 if several else 1)

    def max_tokens(self, prompt_seconds: float) -> float:
        """Prompt tokens of a step, of prompt_seconds each, that make it longer by `MAX_LONGER`. No limit while times are unknown."""
        return MAX_LONGER * self.plain / prompt_seconds if self.plain and prompt_seconds else float("inf")

    def observe(self, step: StepInFlight, following: StepInFlight | None, seconds: float, weights: Mapping[str, float]) -> dict[str, float]:
        """Learn from a step's duration. → by how much each key's prompts made it longer, in steps of decodes

        following: the step that was launched before this one was over. weights: of the keys that have requests.
        """
        own = _keys(step)
        before, self._before = self._before, own
        if seconds <= 0.0 or not step.decodes:
            return {}
        causes = own
        if not causes and following is not None:
            causes = _keys(following) or before
        longer = 0.0
        if causes:
            self._num_longer += 1
            longer = min(max(0.0, seconds - self.plain), MAX_OWED * self.plain)
        else:
            self._num_longer = 0
            # One long pause is no reason to believe that steps take longer now; one short step says that they can be short.
            part = _NEW_PART if seconds > self.plain else 3 * _NEW_PART
            self.plain = self.plain + part * (min(seconds, 4 * self.plain) - self.plain) if self.plain else seconds
        if (not causes and not self._saved) or not self.plain:
            return {}
        most, least = MAX_SAVED * self.plain, -MAX_OWED * self.plain
        num_causes = sum(causes.values())
        parts = {key: longer * count / num_causes for key, count in causes.items()}
        for key in self._saved.keys() | causes.keys():
            other = max((weight for name, weight in weights.items() if name != key), default=1.0)
            earned = FRACTION * self.plain * weights.get(key, 1.0) / other
            part = parts.get(key, 0.0)
            saved = max(least, self._saved.get(key, most) + earned + (longer - part) - part)
            if saved < most:
                self._saved[key] = saved
            else:
                self._saved.pop(key, None)
        return {key: part / self.plain for key, part in parts.items()}


def _keys(step: StepInFlight) -> dict[str, int]:
    """How many prompts of each key a step computes, or parts of them."""
    found: dict[str, int] = {}
    for chunk in step.chunks:
        name = chunk.request.share.account.tenant.name
        found[name] = found.get(name, 0) + 1
    return found
