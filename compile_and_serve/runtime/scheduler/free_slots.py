"""When batch slots that become free are given to waiting requests.

A step with few prompt tokens computes its matrix products at a lower rate than one with many, and is launched piece by piece,
while decodes alone replay one graph. So where the batch was full and more requests wait than fit, free slots are held back.
They are given away
"""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.scheduler.request import Request

GROUP_TOKENS = 2048  # once this many prompt tokens come together,
GROUP_FRACTION = 16  # or a slot in this many is free,
GROUP_STEPS = 8  # or this many steps have gone by.


class FreeSlots:
    """Holds free slots back where `SchedulerConfig.admit_in_groups` is set.

    was_full: whether all slots were taken and requests waited when there was last a budget for these.
    """

    def __init__(self, num_slots: int, *, admit_in_groups: bool) -> None:
        self.was_full = False
        self._num_slots = num_slots
        self._admit_in_groups = admit_in_groups
        self._steps_held = 0

    def are_held_back(self, num_free: int, waiting: Sequence[tuple[tuple[float, ...], Request]], budget: int, *, has_prompts: bool) -> bool:
        """Whether a step leaves its free slots empty.

        waiting: heap of requests. budget: tokens left in the step. has_prompts: whether it does not only decode.
        """
        is_due = not 0 < num_free < self._num_slots // GROUP_FRACTION or self._steps_held == GROUP_STEPS
        can_wait = self.was_full and len(waiting) > num_free and not has_prompts
        if self._admit_in_groups and can_wait and not is_due:
            # The first entries of a heap are about those that come next.
            num_tokens = sum(len(request.token_ids) for _, request in waiting[:num_free])
            if num_tokens < min(GROUP_TOKENS, budget):
                self._steps_held += 1
                return True
        self._steps_held = 0
        return False
