"""Advantages one reward at a time, in exact fractions: the second opinion of the tests.

Slow and obvious on purpose, and with nothing of the package in it.
"""

from __future__ import annotations

import math
from fractions import Fraction


def plain_advantages(
    rewards: list[list[float]],
    scored: list[list[bool]],
    *,
    baseline: str,
    scale: str,
    std_correction: int,
    epsilon: float,
) -> list[list[float]]:
    groups = [
        [Fraction(reward) for reward, is_scored in zip(row, flags, strict=True) if is_scored]
        for row, flags in zip(rewards, scored, strict=True)
    ]
    batch = [reward for group in groups for reward in group]
    advantages = []
    for row, flags, group in zip(rewards, scored, groups, strict=True):
        advantages.append([0.0] * len(row))
        for member, reward in enumerate(row):
            if not flags[member] or len(group) < 2:
                continue  # unscored, or nobody to compare with
            centred = float(Fraction(reward) - plain_baseline(Fraction(reward), group, batch, baseline))
            if scale == "none":
                advantages[-1][member] = centred
            else:
                std = plain_std(group if scale == "group_std" else batch, std_correction)
                advantages[-1][member] = 0.0 if std == 0.0 else centred / (std + epsilon)
    return advantages


def plain_baseline(reward: Fraction, group: list[Fraction], batch: list[Fraction], baseline: str) -> Fraction:
    if baseline == "mean":
        return sum(group, Fraction()) / len(group)
    if baseline == "leave_one_out":
        return (sum(group, Fraction()) - reward) / (len(group) - 1)
    if baseline == "batch_mean":
        return sum(batch, Fraction()) / len(batch)
    assert baseline == "none"
    return Fraction()


def plain_std(rewards: list[Fraction], std_correction: int) -> float:
    mean = sum(rewards, Fraction()) / len(rewards)
    squares = sum(((reward - mean) ** 2 for reward in rewards), Fraction())
    return math.sqrt(squares / (len(rewards) - std_correction))
