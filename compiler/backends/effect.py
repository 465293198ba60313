"""What an option of another tool does that has no place in a spec. The texts are the reasons that an import gives."""

from __future__ import annotations

import enum

from .reading import Account, Outcome


class Effect(enum.Enum):
    """What such an option does."""

    NUMBERS = "it changes the numbers of a run, and a spec has no word for it"
    MEMORY = "it changes memory, time or placement, not numbers; a plan decides this itself"
    SPEED = "it chooses between implementations of the same computation"
    DATA = "data belongs to the training script"
    TOKENIZER = "the tokenizer belongs to the training script"
    CHECKPOINTS = "checkpoints belong to the training script"
    REPORTS = "logs, profiles and tests of the run belong to the training script"
    OTHER_RUN = "it belongs to inference, reinforcement learning or another kind of run"
    OTHER_MODEL = "it belongs to a model of another kind, which a spec cannot express"
    JOB = "how the job is started, watched and restarted belongs to the launcher"

    @property
    def loses_nothing(self) -> bool:
        """Whether a plan loses nothing without the option: it stays with what runs the plan."""
        return self in _NO_LOSS

    def account(self, option: str) -> Account:
        """What to say of an option that does this."""
        outcome = Outcome.NO_EFFECT if self.loses_nothing else Outcome.LOST
        return Account(option, outcome, self.value, changes=self is Effect.NUMBERS)


CARRIED_VERBATIM = frozenset({Effect.NUMBERS, Effect.MEMORY, Effect.SPEED})
"""What an import keeps for the backend that it came from."""
_NO_LOSS = frozenset(
    {Effect.SPEED, Effect.DATA, Effect.TOKENIZER, Effect.CHECKPOINTS, Effect.REPORTS, Effect.JOB},
)
