"""The length of a completion as a value between 0 and 1, along a declared shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from grpo.records import Problem, Score
from grpo.rewards.exact_answer import text_end

Unit = Literal["characters", "words"]


class Length:
    """A value that depends on nothing but how long the completion is.

    It pays for length, never for what is said, so it can be met by empty phrases: give it a small weight, and
    look at what its arm of an ablation writes. Lengths in tokens belong to the reward transform.

    Args:
        shape: points of length and value, the lengths rising, the values between 0 and 1. Between points the
            value runs straight; before the first and after the last it stays. ``[[200, 1], [400, 0]]`` gives
            full marks up to 200 and nothing from 400; with a negative weight, ``[[200, 0], [400, 1]]`` is a penalty.
        unit: words, separated by white space; or characters, white space not counted, so that blank lines are
            no length. Trailing end marks never count.
    """

    def __init__(self, shape: Sequence[tuple[int, float]], unit: Unit = "words") -> None:
        if not shape:
            raise ValueError("shape is empty: give points [length, value], such as [[200, 1], [400, 0]]")
        for length, value in shape:
            if length < 0 or not 0 <= value <= 1:
                raise ValueError(f"shape holds [{length}, {value}]: lengths start at 0, values lie between 0 and 1")
        for (length, _), (after, _) in pairwise(shape):
            if length >= after:
                raise ValueError(f"shape has length {after} after {length}: lengths must rise from point to point")
        self.lengths = [length for length, _ in shape]
        self.values = [value for _, value in shape]
        self.unit = unit

    def __call__(self, problem: Problem, completion: str) -> Score:
        words = completion[: text_end(completion)].split()
        length = len(words) if self.unit == "words" else sum(map(len, words))
        return Score(float(np.interp(length, self.lengths, self.values)), parts={self.unit: length})
