"""How much longer a key's prompts and its costly decodes make the steps of other keys, and when they wait because of it.

A step with prompts takes longer than one of decodes alone, however few tokens they have: it is not one CUDA graph, and the host lays it out
anew. So does a step with decodes that want more than a token: log-probabilities, penalties, masks, adapters (`Request.costs_extra`). A key
whose requests are of such kinds would do that to every step. So each key has an account of time. Steps earn a `FRACTION` of the time of a
step without its prompts and costly decodes, and what those of other keys make steps longer; what its own make them longer is taken from it.
While it is overdrawn, and other keys decode, its prompts wait and its costly decodes sit out: they keep what they have, and the step is one
without them. Keys that do the same to each other never wait.

All times are measured: those of steps of decodes alone by the keys that have costly decodes in them. Where a step without a key's is not
known, or has not been seen for long, they sit out until one was.

With steps in flight, the host prepares a step while the one before runs, and takes its results while the one after does, so the steps
around one with prompts or costly decodes may take longer, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight

FRACTION = 0.4  # so decodes keep five sevenths of their speed beside one other key's, which get two sevenths of the time
MAX_SAVED, MAX_OWED = 32.0, 72.0  # of an account, in steps of decodes
MAX_CHARGED = 24.0  # for one step: one long pause does not keep a key waiting for long
MAX_LONGER = 2.5  # steps of decodes by which one step should get longer
PROBE_STEPS, FIRST_PROBE_STEPS = 64, 8  # after so many without a step of decodes alone, prompts wait for one
PROBE_ROWS = 2  # times as many without one that lacks a key's costly decodes: then they sit out
MAX_SETS = 64  # of keys whose times are remembered
FIRST_STEPS = 3  # of a set, of which the shortest counts: one of them may have met a pause
_NEW_PART = 0.1  # of an average
_TOKEN_PART = 0.03

Keys = frozenset[str]
_NONE: Keys = frozenset()


class StepTime:
    """The accounts of all keys."""

    def __init__(self) -> None:
        # Seconds of steps of decodes alone, by the keys that have costly ones in them; the least recently seen first.
        self._times: OrderedDict[Keys, float] = OrderedDict()
        self._num_seen: dict[Keys, int] = {}  # of these steps, up to FIRST_STEPS
        self._token = _TokenTime()
        self._saved: dict[str, float] = {}  # seconds, of keys that have not saved all they may
        self._prompts_before: dict[str, int] = {}  # keys with prompts in the step before
        self._costly_before: dict[str, int] = {}  # and those with costly decodes; how many
        self._costly: dict[str, int] = {}  # the same of the last step, and of those around it
        self._num_longer = 0  # steps since the last of decodes alone
        self._num_with: dict[str, int] = {}  # of each of these keys, steps since the last without

    @property
    def may_hold(self) -> bool:
        """Whether a key may be overdrawn, or have costly decodes that should sit out."""
        return bool(self._saved or self._num_with)

    def is_overdrawn(self, key: str) -> bool:
        """Whether a key's prompts must wait, and its costly decodes sit out."""
        return self._saved.get(key, 0.0) < 0.0

    def saved(self, key: str) -> float:
        """Seconds that a key has saved; negative: owes. Infinite where it has all it may."""
        return self._saved.get(key, float("inf"))

    def without(self, key: str) -> float:
        """Seconds of a step of decodes alone, with what is costly now, but none of that of the key. 0.0 as long as it is unknown."""
        return self._time(self._others(key))

    def needs_plain_step(self, *, several: bool) -> bool:
        """Whether it is not known what a step of decodes takes now. several: keys have prompts, which should wait less often."""
        return self._num_longer >= (PROBE_STEPS if self._times else FIRST_PROBE_STEPS) * (2 if several else 1)

    def needs_step_without(self, key: str) -> bool:
        """Whether it is not known what a step takes now that has none of the key's costly decodes."""
        num_steps = self._num_with.get(key, 0)
        if num_steps < FIRST_PROBE_STEPS:
            return False
        return num_steps >= PROBE_ROWS * PROBE_STEPS or self._num_seen.get(self._others(key), 0) < FIRST_STEPS

    def should_sit_out(self, key: str) -> bool:
        """Whether a key's costly decodes should not be in the next step, if it has any."""
        return self.is_overdrawn(key) or self.needs_step_without(key)

    def max_tokens(self, key: str, prompt_seconds: float) -> float:
        """Prompt tokens of a key, of prompt_seconds each, that make a step longer by `MAX_LONGER`; no limit before times are known."""
        seconds = self.without(key)
        return MAX_LONGER * seconds / prompt_seconds if seconds and prompt_seconds else float("inf")

    def observe(self, step: StepInFlight, following: StepInFlight | None, seconds: float, weights: Mapping[str, float]) -> dict[str, float]:
        """Learn from a step's duration. → by how much what each key has in it made it longer, in steps of decodes

        following: the step that was launched before this one was over. weights: of the keys that have requests.
        """
        prompts, costly = _prompts(step), _costly(step)
        prompts_before, self._prompts_before = self._prompts_before, prompts
        costly_before, self._costly_before = self._costly_before, costly
        if seconds <= 0.0 or not step.decodes:
            return {}
        if following is not None:
            prompts = prompts or _prompts(following) or prompts_before
            costly = costly_before | _costly(following) | costly
        self._costly = costly
        own = frozenset(self._costly_before) if self._costly_before else _NONE
        self._note(own, seconds, has_prompts=bool(prompts))
        parts = self._parts(step, own, seconds, prompts) if prompts or costly else {}
        if not parts and not self._saved:
            return {}
        longer = sum(parts.values())
        lasts = {key: self.without(key) or seconds for key in self._saved.keys() | parts.keys()}
        for key, plain in lasts.items():
            other = max([weight for name, weight in weights.items() if name != key], default=1.0)
            part = parts.get(key, 0.0)
            earned = FRACTION * plain * weights.get(key, 1.0) / other + longer - part
            most = MAX_SAVED * plain
            saved = max(-MAX_OWED * plain, self._saved.get(key, most) + earned - part)
            if saved < most:
                self._saved[key] = saved
            else:
                self._saved.pop(key, None)
        return {key: part / lasts[key] for key, part in parts.items()}

    def _note(self, own: Keys, seconds: float, *, has_prompts: bool) -> None:
        """Learn what a step of decodes alone takes. own: keys with costly decodes in it."""
        if self._costly or self._num_with:
            keys = self._costly.keys() | self._num_with.keys() if has_prompts else self._costly.keys()  # which says nothing of the others
            self._num_with = {key: self._num_with.get(key, 0) + 1 for key in keys}
        if has_prompts:
            self._num_longer += 1
            return
        self._num_longer = 0
        if len(own) < len(self._costly):  # it may be longer because of the steps around it
            return
        before, num_seen = self._times.get(own), self._num_seen.get(own, 0)
        if before is None or num_seen < FIRST_STEPS:
            self._times[own], self._num_seen[own] = min(seconds, before or seconds), num_seen + 1
            if len(self._times) > MAX_SETS:
                del self._num_seen[self._times.popitem(last=False)[0]]
            return
        # One long pause is no reason to believe that steps take longer now; one short step says that they can be short.
        part = _NEW_PART if seconds > before else 3 * _NEW_PART
        seconds = min(seconds, 4 * before)
        self._times[own] = before + part * (seconds - before)
        self._times.move_to_end(own)

    def _parts(self, step: StepInFlight, own: Keys, seconds: float, prompts: Mapping[str, int]) -> dict[str, float]:
        """By how many seconds what each key has in a step made it longer."""
        parts: dict[str, float] = {}
        base = self._time(own)
        if prompts and base:
            longer, num_prompts = _between(seconds - base, MAX_CHARGED * base), sum(prompts.values())
            parts = {key: longer * count / num_prompts for key, count in prompts.items()}
        if step.chunks and base and not step.num_prompt_rows:
            self._token.observe(sum(chunk.end - chunk.start for chunk in step.chunks), seconds - base)
        decodes = _count(step.decodes) if self._costly else {}
        for key, count in self._costly.items():
            plain = self.without(key)
            if plain and decodes.keys() - {key}:
                # As decodes that cost nothing extra they would make the step longer, too: each about as much as a prompt token.
                as_plain = count * min(self._token.seconds, plain / (len(step.decodes) - decodes.get(key, 0)))
                longer = _between((base if prompts else seconds) - plain - as_plain, MAX_CHARGED * plain)
                parts[key] = parts.get(key, 0.0) + longer
        return parts

    def _others(self, key: str) -> Keys:
        """The keys that have costly decodes now, without this one."""
        return frozenset([one for one in self._costly if one != key]) if self._costly else _NONE

    def _time(self, costly: Keys) -> float:
        """Seconds of a step of decodes alone where these keys have costly ones; where that is unknown, the most of them for which it is
        known; 0.0 if there is none.
        """
        if (found := self._times.get(costly)) is not None:
            return found
        known = [keys for keys in self._times if keys < costly]
        return self._times[max(known, key=len)] if known else 0.0


class _TokenTime:
    """By how many seconds one prompt token more makes a step longer: of the last steps with prompts, as far as their tokens differed."""

    def __init__(self) -> None:
        self._num = self._longer = self._variance = self._covariance = 0.0

    def observe(self, num_tokens: int, longer: float) -> None:
        """Learn from a step. longer: seconds by which its prompts made it longer."""
        if not self._num:
            self._num, self._longer = float(num_tokens), longer
        more, longer = num_tokens - self._num, longer - self._longer
        self._num += _TOKEN_PART * more
        self._longer += _TOKEN_PART * longer
        self._variance += _TOKEN_PART * (more * more - self._variance)
        self._covariance += _TOKEN_PART * (more * longer - self._covariance)

    @property
    def seconds(self) -> float:
        """Of a token; 0.0 as long as it is unknown."""
        return max(0.0, self._covariance / self._variance) if self._variance > 0.5 else 0.0


def _between(value: float, most: float) -> float:
    """The value, where it is between 0 and `most`."""
    return min(max(0.0, value), most)


def _prompts(step: StepInFlight) -> dict[str, int]:
    """How many prompts of each key a step computes, or parts of them."""
    return _count([chunk.request for chunk in step.chunks]) if step.chunks else {}


def _costly(step: StepInFlight) -> dict[str, int]:
    """How many costly decodes of each key it has."""
    found = [request for request in step.decodes if request.costs_extra]
    return _count(found) if found else {}


def _count(requests: Sequence[Request]) -> dict[str, int]:
    """How many requests of each key there are."""
    found: dict[str, int] = {}
    for request in requests:
        name = request.share.account.tenant.name
        found[name] = found.get(name, 0) + 1
    return found
