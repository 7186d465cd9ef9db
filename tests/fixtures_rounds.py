"""Real rounds with a policy of random weights, what they left, and what the functions in them were called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow.parquet as pq
import pytest
import torch
from fixtures_policy import fit, policy_folder, problem_folder, share_of_lower_case
from torch import Tensor
from transformers import PreTrainedModel

from grpo.rewards import RewardComponent
from grpo.rollouts.sampling import SamplingSettings
from grpo.training import round_update
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.rollout_log import RolloutLog
from grpo.training.settings import OptimizerSettings, RoundSettings

LOWER_CASE = {"lower_case": RewardComponent(share_of_lower_case)}

Row = dict[str, Any]


class Run:
    """One small training run and what it left.

    Args:
        folder: below it stand the policy, the problems and the record; the first two are made where they are missing.
        rewards: the reward's components.
        settings: of the module; ``rounds`` and ``groups`` (a round) besides, and ``data`` of the data module.
    """

    def __init__(self, folder: Path, rewards: dict[str, RewardComponent] = LOWER_CASE, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        policy = folder / "policy"
        if not policy.exists():
            policy_folder(policy)
        if not (folder / "problems").exists():
            problem_folder(folder / "problems")
        rounds = settings.pop("rounds", 2)
        groups = settings.pop("groups", 3)
        data = {"validation_problems": 2} | settings.pop("data", {})
        # In this process: a worker would import torch with the test's module before it judges the first completion.
        rewards = {name: replace(component, limit_seconds=None) for name, component in rewards.items()}
        self.module = GRPOModule(
            policy,
            rewards,
            settings.pop("sampling", SamplingSettings(max_new_tokens=6)),
            round=settings.pop("round", RoundSettings(group_size=4)),
            optimizer=settings.pop("optimizer", OptimizerSettings(learning_rate=1e-3)),
            **settings,
        )
        self.module.rollout_log = RolloutLog(folder / "record", "run", 0, rewards, self.module.round.group_unit)
        self.data = PromptGroupDataModule(policy, folder / "problems", rounds, groups, **data)
        self.folder = folder

    def go(self, *callbacks: L.Callback) -> Run:
        self.trainer = fit(self.module, self.data, self.folder, callbacks=list(callbacks))
        return self

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(self.trainer.logger.rows.values())  # type: ignore[union-attr]

    def table(self, name: str) -> list[Row]:
        return read_table(self.folder / "record", name)

    def joined(self, round_index: int = 0) -> list[Row]:
        """Each rollout of a round with what was decided about it."""
        decided = {row["rollout_id"]: row for row in self.table("updates")}
        rollouts = [row for row in self.table("rollouts") if row["round"] == round_index]
        return [row | decided[row["rollout_id"]] for row in rollouts]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.policy.parameters()])


def read_table(record: Path, name: str) -> list[Row]:
    files = sorted((record / name).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist(maps_as_pydicts="strict")]


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    return groups


def gradient(run: Run, *callbacks: L.Callback) -> Tensor:
    """The gradient of the first update, before clipping; the weights stay as they are."""
    seen: list[Tensor] = []

    def look(module: GRPOModule, _max_norm: float) -> float:
        seen.append(flat_gradient(module.policy))
        module.policy.zero_grad()
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_update, "step_optimizer", look)
        run.go(*callbacks)
    return seen[0]


def flat_gradient(model: PreTrainedModel) -> Tensor:
    parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    return torch.cat(parts).clone()


@dataclass(frozen=True)
class Call:
    """One call of a watched function: its arguments by name, defaults filled in, and what it gave."""

    arguments: dict[str, Any]
    result: Any

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """Every call of ``owner.name`` from now on, in order; the real function runs."""
    real: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(real)
    calls: list[Call] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        result = real(*args, **kwargs)
        calls.append(Call(dict(bound.arguments), result))
        return result

    patch.setattr(owner, name, watched)
    return calls


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Of the norms: that of the difference, in units of the other's."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def plain_logprobs(model: PreTrainedModel, row: Row, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies ``[tokens]`` of a recorded completion, from one pass over the whole text.

    No padding, no cache, no shared prompt: nothing of what the package does to be fast.
    """
    tokens = torch.tensor([row["prompt_tokens"] + row["completion_tokens"]])
    start = len(row["prompt_tokens"])
    logits = model(input_ids=tokens, use_cache=False).logits[0, start - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[0, start:].unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def plain_gradient(
    model: PreTrainedModel,
    rows: Sequence[Row],
    temperature: float = 1.0,
    bonus: float = 0.0,
    factor: Callable[[Row], Tensor] | None = None,
) -> Tensor:
    """The gradient of a first update as the equation says it, from the record of its round.

    The mean over responses of the mean over their drawn tokens of ``-A * ratio``, where every ratio is 1.

    Args:
        model: the weights that sampled.
        rows: those that are in the update, rollout and decision of each.
        temperature: that they were drawn at.
        bonus: of the entropy.
        factor: of each of a row's tokens in the policy term.
    """
    model.zero_grad()
    for row in rows:
        logprobs, entropy = plain_logprobs(model, row, temperature)
        drawn = torch.tensor(row["completion_drawn"] or [True] * len(logprobs))
        policy = -row["advantage"] * logprobs
        policy = policy if factor is None else policy * factor(row)
        ((policy - bonus * entropy)[drawn].mean() / len(rows)).backward()
    return flat_gradient(model)
