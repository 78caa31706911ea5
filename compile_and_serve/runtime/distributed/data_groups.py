"""What the ranks of several data groups answer, as one answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, WorkerStats


def joined_outputs(step: int, parts: list[ModelRunnerOutput]) -> ModelRunnerOutput:
    """The result of step `step`, of whose groups each has its own."""
    counted = [part.expert_tokens for part in parts if part.expert_tokens]
    return ModelRunnerOutput(
        step=step,
        sampled_token_ids={},
        logprobs={},
        prompt_logprobs={},
        errors={},
        expert_tokens=[[sum(counts) for counts in zip(*layers, strict=True)] for layers in zip(*counted, strict=True)],
        ran=next((part.ran for part in parts if part.step >= 0), parts[0].ran),  # all run alike; a step of padding has no number
        groups=parts,
    )


def joined_stats(stats: Sequence[WorkerStats]) -> WorkerStats:
    """Counters of one rank of each group. Graphs are captured and replayed by all groups at once, so those of the first are said."""
    return msgspec.structs.replace(
        stats[0],
        padded_tokens=sum(one.padded_tokens for one in stats),
        captures_due=max(one.captures_due for one in stats),
        steps_on_device=sum(one.steps_on_device for one in stats),
    )
