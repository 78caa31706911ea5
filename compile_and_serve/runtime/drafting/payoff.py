"""Whether drafting pays, from measured step times and acceptance.

Two decisions, both from what was measured on this device with these requests:
- Per batch size (in powers of two): is a step with drafting on worth more tokens per second than one with it off? With drafting on, a
  step may have to wait for the tokens of the one before. The other mode is tried from time to time, and less often each time it loses.
- Per step: the number of draft tokens with the most expected tokens per second. Draft token j of a sequence that accepts each token with
  probability a is worth a^j tokens. Step times are measured by the number of draft tokens (in powers of two) and interpolated. They are
  no straight line: a step that is padded to a CUDA graph takes as long with one draft token as with all. So the time of a step with
  all drafts is measured, and never guessed from those of fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

_SMOOTHING = 0.1  # weight of a new measurement
_OUTLIER = 3.0  # a measurement counts as at most this multiple of the mean
_TRIAL_STEPS = 8
_FIRST_TRIAL, _LAST_TRIAL = 64, 8192  # steps between two trials of the other mode
_SETTLING_STEPS = 2  # at a change of mode, which belong to neither
_HYSTERESIS = 1.02
_SAMPLES = 2  # measurements that make a time known
_STALE_STEPS = 64  # after which a time is measured again; twice as many each time, up to _LAST_TRIAL
_PRIOR = 0.7  # acceptance that is assumed of a new request
_PRIOR_WEIGHT = 2.0
_MEMORY = 0.9  # per step, of a request's own acceptance
_FORGETTING = 0.98  # of it, per step without drafts, so that they are tried again


class Mean:
    """A moving average."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > 2 and self.value > 0:
            value = min(value, _OUTLIER * self.value)
        self.value += (value - self.value) * max(_SMOOTHING, 1.0 / self.count)


class Acceptance:
    """How likely a sequence accepts a draft token, given the one before it."""

    __slots__ = ("accepted", "checked")

    def __init__(self) -> None:
        self.accepted = self.checked = 0.0

    @property
    def rate(self) -> float:
        return (self.accepted + _PRIOR * _PRIOR_WEIGHT) / (self.checked + _PRIOR_WEIGHT)

    def add(self, drafted: int, accepted: int) -> None:
        """A step's outcome: the tokens behind the first wrong one say nothing."""
        self.accepted = self.accepted * _MEMORY + accepted
        self.checked = self.checked * _MEMORY + min(drafted, accepted + 1)

    def forget(self) -> None:
        self.accepted *= _FORGETTING
        self.checked *= _FORGETTING


@dataclass(slots=True)
class _StepTime:
    """Of steps with about as many draft tokens. last_step: `_BatchSizeStats.num_steps` when it was measured last."""

    num_drafts: Mean = field(default_factory=Mean)
    seconds: Mean = field(default_factory=Mean)
    last_step: int = 0
    stale_steps: int = _STALE_STEPS

    def add(self, num_drafts: int, seconds: float, step: int) -> None:
        """The least of the first times counts: the others may include what is done once, such as loading a kernel."""
        if 0 < self.seconds.count < _SAMPLES:
            self.seconds.value = seconds = min(seconds, self.seconds.value)
        self.num_drafts.add(num_drafts)
        self.seconds.add(seconds)
        self.last_step = step

    def forget_if_stale(self, step: int) -> None:
        if self.seconds.count and step > self.last_step + self.stale_steps:
            self.num_drafts, self.seconds = Mean(), Mean()
            self.stale_steps = min(2 * self.stale_steps, _LAST_TRIAL)


@dataclass(slots=True)
class _BatchSizeStats:
    """Measurements and the current mode of one range of batch sizes."""

    is_on: bool = True
    until_trial: int = _FIRST_TRIAL
    trial_gap: int = _FIRST_TRIAL
    trial_left: int = 0
    unsettled: int = 0
    rates: dict[bool, Mean] = field(default_factory=lambda: {True: Mean(), False: Mean()})  # tokens per second, by mode
    times: dict[int, _StepTime] = field(default_factory=dict)  # while drafting is on, by `_range_of` the draft tokens
    num_steps: int = 0  # while drafting is on

    @property
    def mode(self) -> bool:
        """Whether drafting is on now: the better mode, or the other one during a trial."""
        return self.is_on != (self.trial_left > 0)

    def record_rate(self, was_on: bool, rate: float) -> None:
        if was_on != self.mode:
            return  # the step began before the mode changed
        if self.unsettled > 0:
            self.unsettled -= 1
            return
        self.rates[was_on].add(rate)
        if self.trial_left > 0:
            self.trial_left -= 1
            if self.trial_left == 0:
                self._end_trial()
            return
        self.until_trial -= 1
        if self.until_trial <= 0:
            self.trial_left, self.unsettled = _TRIAL_STEPS, _SETTLING_STEPS
            self.rates[not self.is_on] = Mean()

    def record_time(self, num_drafts: int, seconds: float) -> None:
        self.num_steps += 1
        self.times.setdefault(_range_of(num_drafts), _StepTime()).add(num_drafts, seconds, self.num_steps)

    def is_known(self, num_drafts: int) -> bool:
        """Whether steps with about as many draft tokens have been measured."""
        time = self.times.get(_range_of(num_drafts))
        return time is not None and time.seconds.count >= _SAMPLES

    def known_times(self) -> list[tuple[float, float]]:
        """Numbers of draft tokens, ascending, and their seconds. Forgets stale ones."""
        for time in self.times.values():
            time.forget_if_stale(self.num_steps)
        known = [time for _, time in sorted(self.times.items()) if time.seconds.count >= _SAMPLES]
        return [(time.num_drafts.value, time.seconds.value) for time in known]

    def _end_trial(self) -> None:
        self.unsettled = _SETTLING_STEPS
        if self.rates[not self.is_on].value > _HYSTERESIS * self.rates[self.is_on].value:
            self.is_on = not self.is_on
            self.trial_gap = _FIRST_TRIAL
            self.unsettled = 0
        else:
            self.trial_gap = min(2 * self.trial_gap, _LAST_TRIAL)
        self.until_trial = self.trial_gap


class Payoff:
    """Call `is_on` and `draft_lengths` before a step of decodes alone, and `record` after it."""

    def __init__(self, disable_by_batch_size: int | None = None) -> None:
        self._limit = disable_by_batch_size
        self._stats: dict[int, _BatchSizeStats] = {}

    def is_on(self, num_seqs: int) -> bool:
        """Whether steps of `num_seqs` sequences should have drafts."""
        if self._limit is not None and num_seqs >= self._limit:
            return False
        return self._stats_of(num_seqs).mode

    def draft_lengths(self, num_seqs: int, drafted: Mapping[str, tuple[int, float]], max_tokens: int) -> dict[str, int]:
        """How many draft tokens of each sequence to compute, `max_tokens` at most in all.

        num_seqs: of the step, with and without drafts. drafted: sequence → number of its draft tokens, its acceptance rate.
        """
        known = self._stats_of(num_seqs).known_times()
        if not known or known[0][0] > 0:
            return {}  # measure a step without drafts
        chances = sorted(
            ((rate ** (j + 1), name) for name, (count, rate) in drafted.items() for j in range(count)), key=lambda entry: -entry[0]
        )[:max_tokens]
        best = len(chances)
        if self._stats_of(num_seqs).is_known(best):
            best, gain, best_rate = 0, float(num_seqs), num_seqs / known[0][1]
            for count, ((chance, _), seconds) in enumerate(zip(chances, _step_seconds(known), strict=False), 1):
                gain += chance
                if gain > best_rate * seconds:
                    best, best_rate = count, gain / seconds
        lengths: dict[str, int] = {}
        for _, name in chances[:best]:
            lengths[name] = lengths.get(name, 0) + 1
        return lengths

    def record(self, num_seqs: int, num_drafts: int, num_tokens: int, seconds: float, was_on: bool) -> None:
        """A step of decodes alone took `seconds` and gave `num_tokens` tokens. num_drafts: draft tokens that it computed."""
        if seconds <= 0.0:
            return
        stats = self._stats_of(num_seqs)
        stats.record_rate(was_on, num_tokens / seconds)
        if was_on:
            stats.record_time(num_drafts, seconds)

    def _stats_of(self, num_seqs: int) -> _BatchSizeStats:
        return self._stats.setdefault(num_seqs.bit_length(), _BatchSizeStats())


def _range_of(num_drafts: int) -> int:
    """Its own for 0, then one for 1, 2, 3 to 4, 5 to 8 …"""
    return 0 if num_drafts == 0 else 1 + (num_drafts - 1).bit_length()


def _step_seconds(known: list[tuple[float, float]]) -> Iterator[float]:
    """Seconds of steps with 1, 2 … draft tokens. Beyond the last known time, each token costs as much as those before it."""
    count = 1
    for (before, start), (number, end) in pairwise(known):
        while count <= number:
            yield start + (end - start) * (count - before) / (number - before)
            count += 1
    number, end = known[-1]
    slope = max(0.0, end - known[0][1]) / number
    while True:
        yield end + slope * (count - number)
        count += 1
