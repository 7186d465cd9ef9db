from typing import Any

import pytest
import torch
from fixtures_policy import scored_group
from torch import Tensor

from grpo.maths.grpo_loss import Reduction
from grpo.records import ScoredRollout
from grpo.training import policy_update
from grpo.training.policy_update import MicroBatch, plan_update
from grpo.training.settings import LossSettings

REDUCTIONS: list[Reduction] = ["response_mean", "token_mean", "group_mean", "constant"]


def groups() -> list[list[ScoredRollout]]:
    return [
        scored_group([1.0, 0.0], [2, 5], "a", "1="),
        scored_group([1.0, None], [4, 9], "b", "12+13="),
        scored_group([0.0, 1.0], [1, 3], "c", "1+1="),
    ]


def settings(reduction: Reduction) -> LossSettings:
    return LossSettings(reduction=reduction, constant_length=10)


def advantages(count: int) -> Tensor:
    return torch.arange(2.0 * count).reshape(count, 2)


def plan(chosen: list[list[ScoredRollout]], reduction: Reduction, rows: int) -> list[MicroBatch]:
    return plan_update(chosen, advantages(len(chosen)), groups()[0], settings(reduction), rows)


def weights_by_rollout(micros: list[MicroBatch]) -> dict[str, list[float]]:
    rows = {}
    for micro in micros:
        for name, weights, counted in zip(micro.rollout_ids, micro.weights, micro.counted, strict=True):
            assert weights[~counted].abs().sum() == 0
            rows[name] = weights[counted].tolist()
    return rows


# By hand. Lengths 2, 5 | 4, unscored | 1, 3: five rows, fifteen tokens, three groups.
EXPECTED = {
    "response_mean": [1 / 5 / 2, 1 / 5 / 5, 1 / 5 / 4, None, 1 / 5 / 1, 1 / 5 / 3],
    "token_mean": [1 / 15, 1 / 15, 1 / 15, None, 1 / 15, 1 / 15],
    "group_mean": [1 / 3 / 7, 1 / 3 / 7, 1 / 3 / 4, None, 1 / 3 / 4, 1 / 3 / 4],
    "constant": [1 / 50, 1 / 50, 1 / 50, None, 1 / 50, 1 / 50],
}


@pytest.mark.parametrize("rows", [2, 4, 100])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_are_those_of_the_whole_update_however_it_is_cut(reduction: Reduction, rows: int) -> None:
    micros = plan(groups(), reduction, rows)
    assert len(micros) == {2: 3, 4: 2, 100: 1}[rows]
    got = weights_by_rollout(micros)
    members = [member for group in groups() for member in group]
    for member, weight in zip(members, EXPECTED[reduction], strict=True):
        length = 0 if weight is None else len(member.rollout.tokens)
        assert got[member.rollout.key.rollout_id] == pytest.approx([weight] * length)


def test_rows_keep_their_advantages_and_names_in_any_order() -> None:
    members = [member for group in groups() for member in group]
    expected = dict(zip((m.rollout.key.rollout_id for m in members), advantages(3).flatten().tolist(), strict=True))
    for micro in plan(groups(), "response_mean", 2):
        assert dict(zip(micro.rollout_ids, micro.advantages.tolist(), strict=True)).items() <= expected.items()
        for name, tokens, mask in zip(micro.rollout_ids, micro.batch.completions, micro.batch.mask, strict=True):
            [member] = [m for m in members if m.rollout.key.rollout_id == name]
            assert tuple(tokens[mask].tolist()) == member.rollout.tokens


def test_a_member_that_was_not_scored_counts_nowhere() -> None:
    [micro] = plan(groups()[1:2], "response_mean", 100)
    assert micro.counted.sum(1).tolist() == [4, 0]
    assert micro.weights.shape == micro.batch.mask.shape == (2, 9)
    assert micro.weights.sum(1).tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_processes_together_make_the_update_of_one(reduction: Reduction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-parallel training averages gradients, so the mean of the processes' weights must be the one update's."""
    whole = weights_by_rollout(plan(groups(), reduction, 100))
    parts = [groups()[0::2], groups()[1::2]]
    heard: list[list[Any]] = []
    monkeypatch.setattr(policy_update, "all_processes", lambda value: heard[-1].append(value) or [value])
    for part in parts:  # what each process says of itself, in the order of the calls
        heard.append([])
        plan(part, reduction, 2)
    together: dict[str, list[float]] = {}
    micros = []
    for part in parts:
        calls = iter(zip(*heard, strict=True))
        monkeypatch.setattr(policy_update, "all_processes", lambda _value, calls=calls: list(next(calls)))
        micros.append(plan(part, reduction, 2))
        together |= weights_by_rollout(micros[-1][: len(part)])
    for name, weights in whole.items():
        assert [w / 2 for w in together[name]] == pytest.approx(weights)
    # both run as often, the one with less on a batch that counts for nothing
    assert [len(part) for part in micros] == [2, 2]
    assert micros[1][1].weights.sum() == 0
    assert not micros[1][1].counted.any()


def test_no_group_makes_no_update() -> None:
    assert plan([], "response_mean", 4) == []
