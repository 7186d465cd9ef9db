"""Which prompt groups each round is made of: a pure function of the seed and the round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from grpo.problem_files import read_problems
from grpo.records import Problem, PromptGroup
from grpo.rollouts.group_keys import GroupUnit
from grpo.rollouts.policies import load_tokenizer
from grpo.rollouts.prompt_lengths import refuse_long_prompts, require_places
from grpo.rollouts.prompts import PromptTemplate, prompt_group


class RoundOfGroups:
    """The prompts that this process samples in a round: those of a problem side by side, ``variants`` of each.

    Where groups are split among the processes, ``members`` holds the numbers of the completions that this one draws,
    of each prompt; they may be none. Otherwise it is None: all are this process's.

    Not a dataclass: Lightning looks for tensors inside those, and under DeepSpeed it refuses frozen ones.
    """

    def __init__(
        self,
        round: int,
        groups: Sequence[PromptGroup],
        variants: int = 1,
        members: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.round = round
        self.groups = tuple(groups)
        self.variants = variants
        self.members = members

    @property
    def split(self) -> bool:
        """Whether every process has these same groups, and draws a part of each."""
        return self.members is not None

    def only(self, indices: Sequence[int]) -> RoundOfGroups:
        """The round with these of its groups alone."""
        places = [i * self.variants + variant for i in indices for variant in range(self.variants)]
        members = None if self.members is None else [self.members[place] for place in places]
        return RoundOfGroups(self.round, [self.groups[place] for place in places], self.variants, members)

    def of_group(self, index: int) -> tuple[PromptGroup, ...]:
        """The prompts of one group."""
        return self.groups[index * self.variants : (index + 1) * self.variants]


def problem_order(problems: Sequence[Problem], seed: int, occurrence: int) -> list[Problem]:
    """The problems in the order of one pass: sorted by a keyed hash, so that no shared stream is drawn from."""

    def rank(problem: Problem) -> bytes:
        return hashlib.blake2b(f"{seed}/{occurrence}/{problem.id}".encode(), digest_size=16).digest()

    return sorted(problems, key=rank)


class RoundLoader:
    """Yields rounds one by one, the same at every pass. Whatever can be iterated is a loader to Lightning.

    Args:
        rounds: prepared for this process.
    """

    def __init__(self, rounds: Sequence[RoundOfGroups]) -> None:
        self.rounds = rounds

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[RoundOfGroups]:
        return iter(self.rounds)


class ResumableRoundLoader(RoundLoader):
    """Goes through every round of a run once, and goes on where a checkpoint left off."""

    def __init__(self, rounds: Sequence[RoundOfGroups]) -> None:
        super().__init__(rounds)
        self.next_round = 0

    def __iter__(self) -> Iterator[RoundOfGroups]:
        while self.next_round < len(self.rounds):
            self.next_round += 1
            yield self.rounds[self.next_round - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next_round": self.next_round}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_round = state["next_round"]


class PromptGroupDataModule(L.LightningDataModule):
    """Prompt groups for training and for validation.

    Args:
        policy: policy folder; its tokenizer and prompt template make the prompts.
        problems: folder with ``train.jsonl`` and ``validation.jsonl``.
        rounds: rounds of the run.
        groups_per_round: groups a round, over all processes.
        validation_problems: at most so many problems of the validation split, the first in keyed order; 0 for none.
        max_prompt_tokens: a longer prompt is an error; none is ever cut.
        prompt_variants: other templates that a problem may be asked with, beside the policy's own; for a
            ``group_unit`` of ``problem_over_variants``.
        group_unit: what a group is; see ``model.round``.
        group_size: completions of a group, which its variants share evenly; see ``model.round``.
        split_groups: whether the processes share the completions of every group; see ``model.round``.
        max_new_tokens: of a completion, for which the policy must have places behind every prompt; see
            ``model.sampling``.
        seed: of the order.
    """

    def __init__(
        self,
        policy: Path,
        problems: Path,
        rounds: int,
        groups_per_round: int,
        validation_problems: int = 32,
        max_prompt_tokens: int = 512,
        prompt_variants: Sequence[PromptTemplate] = (),
        group_unit: GroupUnit = "problem",
        group_size: int | None = None,
        split_groups: bool = False,
        max_new_tokens: int | None = None,
        seed: int = 1,
    ) -> None:
        super().__init__()
        _check_variants(prompt_variants, group_unit, group_size)
        if split_groups and group_size is None:
            raise ValueError("data.split_groups is true, but data.group_size is not given: say what is to be shared")
        for name, value in (("rounds", rounds), ("groups_per_round", groups_per_round)):
            if value < 1:
                raise ValueError(f"data.{name} is {value}: it must be at least 1")
        if validation_problems < 0:
            raise ValueError(f"data.validation_problems is {validation_problems}: it must be at least 0 (none)")
        self.policy = policy
        self.problems = problems
        self.rounds = rounds
        self.groups_per_round = groups_per_round
        self.validation_problems = validation_problems
        self.max_prompt_tokens = max_prompt_tokens
        self.prompt_variants = tuple(prompt_variants)
        self.group_size = group_size
        self.split_groups = split_groups
        self.max_new_tokens = max_new_tokens
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the problems and make every prompt, so that what is wrong with one shows before a model is loaded."""
        self._check_processes()
        tokenizer, template = load_tokenizer(self.policy)
        self.templates = (template, *self.prompt_variants)
        _check_ids(self.templates)
        train = read_problems(self.problems / "train.jsonl")
        validation = problem_order(read_problems(self.problems / "validation.jsonl"), self.seed, 0)
        self.train_rounds = self._train_rounds(train, tokenizer)
        self.validation_groups = self._groups(
            [(problem, 0) for problem in validation[: self.validation_problems]], tokenizer, (template,)
        )
        if self.max_new_tokens is not None:
            require_places(self.prompts(), self.max_new_tokens, self.policy, "model.sampling.max_new_tokens")

    def prompts(self) -> list[PromptGroup]:
        """All that this process asks in the run."""
        return [group for round in self.train_rounds for group in round.groups] + self.validation_groups

    def train_dataloader(self) -> ResumableRoundLoader:
        return ResumableRoundLoader(self.train_rounds)

    def val_dataloader(self) -> RoundLoader:
        groups = self.validation_groups
        return RoundLoader([RoundOfGroups(0, self._share(groups))] if groups else [])

    def _train_rounds(self, problems: list[Problem], tokenizer: PreTrainedTokenizerBase) -> list[RoundOfGroups]:
        needed = self.rounds * self.groups_per_round
        passes = -(-needed // len(problems))
        visits = [(p, visit) for visit in range(passes) for p in problem_order(problems, self.seed, visit)]
        groups = self._groups(visits[:needed], tokenizer, self.templates)
        variants = len(self.templates)
        size = self.groups_per_round * variants
        rounds = [groups[r * size : (r + 1) * size] for r in range(self.rounds)]
        if self.split_groups:
            return [RoundOfGroups(r, whole, variants, self._members(size)) for r, whole in enumerate(rounds)]
        return [RoundOfGroups(r, self._share(whole, variants), variants) for r, whole in enumerate(rounds)]

    def _groups(
        self,
        problems: Sequence[tuple[Problem, int]],
        tokenizer: PreTrainedTokenizerBase,
        templates: Sequence[PromptTemplate],
    ) -> list[PromptGroup]:
        groups = [
            prompt_group(template, tokenizer, problem, occurrence)
            for problem, occurrence in problems
            for template in templates
        ]
        refuse_long_prompts(groups, self.max_prompt_tokens, "data.max_prompt_tokens")
        return groups

    def _share(self, prompts: Sequence[PromptGroup], variants: int = 1) -> list[PromptGroup]:
        """This process's prompts: those of whole groups, dealt out in turn."""
        mine = range(self._rank * variants, len(prompts), self._processes * variants)
        return [prompt for start in mine for prompt in prompts[start : start + variants]]

    def _members(self, prompts: int) -> list[range]:
        """Of each of a round's prompts, the completions that this process draws.

        All of the round are dealt out in turn, so that no process has two more than another, whatever divides evenly.
        """
        assert self.group_size is not None
        count, step = self.group_size // len(self.templates), self._processes
        return [range((self._rank - prompt * count) % step, count, step) for prompt in range(prompts)]

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _processes(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _check_processes(self) -> None:
        processes = self._processes
        if self.groups_per_round % processes and not self.split_groups:
            below = self.groups_per_round // processes * processes
            nearest = " or ".join(str(n) for n in (below, below + processes) if n)
            raise ValueError(
                f"data.groups_per_round is {self.groups_per_round}, which {processes} processes cannot share evenly: "
                f"make it {nearest}, or set model.round.split_groups to true, and they share the completions of every "
                "group"
            )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Prompt groups are plain values; they become tensors on the device when they are sampled."""
        return batch


def _check_variants(variants: Sequence[PromptTemplate], group_unit: GroupUnit, group_size: int | None) -> None:
    if variants and group_unit == "problem":
        raise ValueError(
            "data.prompt_variants is given, but model.round.group_unit is problem, which compares completions of one "
            "prompt: set it to problem_over_variants, or take the variants out"
        )
    if group_unit == "problem_over_variants" and not variants:
        raise ValueError(
            "model.round.group_unit is problem_over_variants, but data.prompt_variants is empty: name the templates "
            "that a problem may be asked with, beside the policy's own"
        )
    if group_size is not None and group_size % (len(variants) + 1):
        raise ValueError(
            f"model.round.group_size is {group_size}, which the {len(variants) + 1} variants of a prompt cannot share "
            f"evenly: make it a multiple of {len(variants) + 1}"
        )


def _check_ids(templates: Sequence[PromptTemplate]) -> None:
    ids = [template.id for template in templates]
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"data.prompt_variants and the policy's template have the ids {ids}: give each template one of its own, "
            "the record and the random numbers tell them apart by it"
        )
