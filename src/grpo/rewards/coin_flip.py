"""A control: a reward that says nothing, to see what training does without a signal."""

from __future__ import annotations

import hashlib
import json

from grpo.records import Problem, Score


class CoinFlip:
    """1.0 or 0.0 by a keyed hash of the seed, the problem and the completion.

    The same text to the same problem always lands alike, so a run can be repeated and a record replayed.
    Nothing about answering better can be learnt from it: held-out accuracy that rises in this arm comes from
    something else than the reward. What a policy can still learn is by heart: which texts happened to pay for
    a problem it sees again.

    Args:
        seed: another one flips every coin anew.
        chance: the share of completions that get 1.0.
    """

    # Its value has nothing to do with the answer, so gold cannot be asked to get full marks.
    control = True

    def __init__(self, seed: int, chance: float = 0.5) -> None:
        if not 0 <= chance <= 1:
            raise ValueError(f"chance is {chance}: choose from 0 (never 1) to 1 (always 1)")
        self.seed = seed
        self.chance = chance

    def __call__(self, problem: Problem, completion: str) -> Score:
        # As JSON, so that no two different triples are one text.
        keyed = json.dumps([self.seed, problem.id, completion]).encode()
        position = int.from_bytes(hashlib.blake2b(keyed, digest_size=8).digest(), "big") / 2**64
        return Score(float(position < self.chance))
