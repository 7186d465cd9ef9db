"""What is measured: a policy folder, problems, a reward, and the settings that both trainers are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.count_up import COUNT_UP, counts_right, make_count_up
from common.shop_questions import SHOP, make_shop_policy, names_the_answer, shop_problems
from grpo.problem_files import write_problems
from grpo.rewards import Reward

REWARDS: dict[str, Reward] = {COUNT_UP: counts_right, SHOP: names_the_answer}
Side = Literal["ours", "trl"]


@dataclass(frozen=True)
class Work:
    """One workload, the same for both trainers.

    Args:
        name: of the workload.
        reward: key of ``REWARDS``.
        policy: policy folder.
        problems: folder of problems.
        groups: prompts a round.
        group_size: completions of each.
        max_new_tokens: of a completion.
        learning_rate: constant.
        kl_beta: weight of the KL term; 0 loads no reference.
        rounds: for which prompts are laid out.
        seed: of the sampling and of the order of the prompts.
    """

    name: str
    reward: str
    policy: str
    problems: str
    groups: int
    group_size: int
    max_new_tokens: int
    learning_rate: float
    kl_beta: float = 0.0
    rounds: int = 64
    seed: int = 1

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Work:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Tuning:
    """What a user would tune on a machine, and what changes no result.

    Args:
        threads: of torch.
        micro_batch: completions forward and backward at a time.
        sampled_rows: completions sampled side by side (the peer always samples the whole round).
    """

    threads: int
    micro_batch: int
    sampled_rows: int

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.micro_batch} rows a micro-batch, {self.sampled_rows} sampled at once"


def tiny_work(folder: Path, fixed_length: bool = False) -> Work:
    """A warm-started Llama of 0.8 million parameters counts up: 32 prompts a round, 8 completions of each."""
    make_count_up(folder, fixed_length)
    return Work("tiny", COUNT_UP, str(folder / "policy"), str(folder / "problems"), 32, 8, 48, 1e-4)


def smollm2_work(folder: Path, source: Path, fixed_length: bool = False) -> Work:
    """SmolLM2-135M answers questions about a page of about 256 tokens: 4 prompts a round, 8 completions of each."""
    make_shop_policy(folder / "policy", source, fixed_length)
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    write_problems(folder / "problems" / "train.jsonl", shop_problems())
    write_problems(folder / "problems" / "validation.jsonl", shop_problems()[:1])  # asked for, not used
    return Work("smollm2", SHOP, str(folder / "policy"), str(folder / "problems"), 4, 8, 64, 1e-6)


def make_work(size: str, folder: Path, source: Path, *, fixed_length: bool = False, **changes: Any) -> Work:
    """The workload of that size, its files made in ``folder``."""
    folder = folder / (size + "_fixed" * fixed_length)
    work = tiny_work(folder, fixed_length) if size == "tiny" else smollm2_work(folder, source, fixed_length)
    return replace(work, **changes)


def sweep_of(work: Work, side: Side, threads: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    """The settings to try one after the other, each with its values; the first value is where the sweep starts."""
    rows = [work.rows // part for part in (1, 2, 4, 8) if work.rows // part >= work.group_size]
    micro = [rows[min(1, len(rows) - 1)], *(n for i, n in enumerate(rows) if i != 1)]
    tried: list[tuple[str, Sequence[int]]] = [("micro_batch", micro), ("threads", threads)]
    if side == "ours":
        tried.insert(1, ("sampled_rows", rows[:2]))
    return tried
