"""A small trained hybrid whose text shows a wrong state: conversations that it must answer from memory.

A turn's question is `START name body ASK`, where the body mixes letters with writes `register value`. The answer is the last value that was
written to each register, in any turn so far, and a copy of the question: `r0 v … r7 v COPY name body END`. It comes out right only if the
state and the keys and values are those of the conversation. `train_recall_model.py` made the weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "recall_model"
NUM_REGISTERS, NUM_VALUES, NUM_NAMES, NUM_LETTERS = 8, 16, 8, 24
START, ASK, COPY, END = range(4)
REGISTERS = range(4, 4 + NUM_REGISTERS)
VALUES = range(REGISTERS.stop, REGISTERS.stop + NUM_VALUES)  # the first: never written
NAMES = range(VALUES.stop, VALUES.stop + NUM_NAMES)
LETTERS = range(NAMES.stop, NAMES.stop + NUM_LETTERS)
VOCAB_SIZE = LETTERS.stop


@dataclass
class Conversation:
    """Questions with their right answers. seed: of what it says."""

    seed: int
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._registers = dict.fromkeys(REGISTERS, VALUES[0])
        self._names = self._random.sample(NAMES, NUM_NAMES)

    @property
    def turns_left(self) -> int:
        return len(self._names)

    def ask(self, length: int) -> list[int]:
        """Append a question whose body has about `length` tokens, and its answer. → the answer. At most `NUM_NAMES` times."""
        name, body = self._names.pop(), []
        while len(body) < length:
            if self._random.random() < 0.2:
                written = self._random.choice(REGISTERS), self._random.choice(VALUES[1:])
                self._registers[written[0]] = written[1]
                body += written
            else:
                body.append(self._random.choice(LETTERS))
        answer = [token for pair in self._registers.items() for token in pair]
        answer += [COPY, name, *body, END]
        self.token_ids += [START, name, *body, ASK]
        self.prompt = self.token_ids.copy()
        self.token_ids += answer
        return answer
