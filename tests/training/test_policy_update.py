from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures_policy import scored_group
from torch import Tensor

from grpo.maths.grpo_loss import Reduction
from grpo.records import ScoredRollout
from grpo.rollouts.collate import PassLimits
from grpo.rollouts.flat_groups import DrawnGroup, GroupVerdict, Verdict
from grpo.training import policy_update
from grpo.training.policy_update import MicroBatch, UpdateRow, plan_update, split_minibatches, update_rows
from grpo.training.settings import LossSettings, RoundSettings

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


def rows_of(chosen: list[list[ScoredRollout]], loss: LossSettings) -> list[UpdateRow]:
    drawn = [DrawnGroup(tuple(group), GroupVerdict("kept")) for group in chosen]
    return update_rows(drawn, advantages(len(chosen)), loss)


def plan(chosen: list[list[ScoredRollout]], reduction: Reduction, rows: int) -> list[MicroBatch]:
    loss = settings(reduction)
    return plan_update(rows_of(chosen, loss), groups()[0], loss, PassLimits(rows=rows))


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


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_are_those_of_the_whole_update_however_it_is_cut(reduction: Reduction, rows: int) -> None:
    micros = plan(groups(), reduction, rows)
    assert len(micros) == {1: 5, 2: 3, 4: 2, 100: 1}[rows]
    got = weights_by_rollout(micros)
    members = [member for group in groups() for member in group]
    for member, weight in zip(members, EXPECTED[reduction], strict=True):
        length = 0 if weight is None else len(member.rollout.tokens)
        assert got.get(member.rollout.key.rollout_id, []) == pytest.approx([weight] * length)


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
    assert micro.counted.sum(1).tolist() == [4]
    assert micro.weights.shape == micro.batch.mask.shape == (1, 4)
    assert micro.weights.sum(1).tolist() == pytest.approx([1.0])


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


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_processes_that_split_groups_make_the_update_of_one(
    reduction: Reduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows, two and none: a row's divisor is the whole group's, wherever its other rows are."""
    loss, shares = settings(reduction), [(True, False), (False, True), (False, False)]

    def part(share: tuple[bool, ...]) -> list[MicroBatch]:
        drawn = [DrawnGroup(tuple(group), GroupVerdict("kept"), share) for group in groups()]
        return plan_update(update_rows(drawn, advantages(3), loss), groups()[0], loss, PassLimits(rows=2))

    heard: list[list[Any]] = []
    # A process without rows goes on, since another has some.
    monkeypatch.setattr(policy_update, "all_processes", lambda v: heard[-1].append(v) or [True if v is False else v])
    for share in shares:
        heard.append([])
        part(share)
    together: dict[str, list[float]] = {}
    for share in shares:
        calls = iter(zip(*heard, strict=True))
        monkeypatch.setattr(policy_update, "all_processes", lambda _value, calls=calls: list(next(calls)))
        planned = part(share)
        assert len(planned) == 2
        assert sum(len(micro.rollout_ids) for micro in planned) == {shares[0]: 3, shares[1]: 2, shares[2]: 0}[share]
        together |= weights_by_rollout([micro for micro in planned if micro.rollout_ids])
    monkeypatch.undo()
    whole = weights_by_rollout(plan(groups(), reduction, 100))
    assert together.keys() == whole.keys()
    for name, weights in whole.items():
        assert [w / 3 for w in together[name]] == pytest.approx(weights)


def test_no_group_makes_no_update() -> None:
    assert plan([], "response_mean", 4) == []


def test_only_groups_that_are_let_in_have_rows() -> None:
    verdicts: list[Verdict] = ["kept_flat", "resampled", "kept"]
    drawn = [DrawnGroup(tuple(g), GroupVerdict(v)) for g, v in zip(groups(), verdicts, strict=True)]
    rows = update_rows(drawn, advantages(3), LossSettings(kl_on_flat_groups=False))
    first, last = (group[0].rollout.key.rollout_id for group in (groups()[0], groups()[2]))
    assert [(row.group, row.advantage, row.feels_kl) for row in rows] == [
        (first, 0.0, False),
        (first, 1.0, False),
        (last, 4.0, True),
        (last, 5.0, True),
    ]
    assert all(row.feels_kl for row in update_rows(drawn, advantages(3), LossSettings()))


def test_flat_groups_kept_out_of_the_kl_term_stay_in_the_denominators() -> None:
    drawn = [DrawnGroup(tuple(groups()[0]), GroupVerdict("kept_flat"))]
    loss = LossSettings(kl_on_flat_groups=False)
    [micro] = plan_update(update_rows(drawn, advantages(1), loss), groups()[0], loss, PassLimits(rows=100))
    assert not micro.kl_counted.any()
    assert micro.counted.sum() == 5  # of the member with an advantage; the other has no gradient and is not run
    assert micro.weights.sum() == pytest.approx(0.5)


def test_a_truncated_row_that_is_masked_leaves_loss_and_denominators() -> None:
    first, second = groups()[0]
    second = replace(second, rollout=replace(second.rollout, finish_reason="length"))
    for masked, expected in ((True, [1.0]), (False, [0.5, 0.5])):
        loss = LossSettings(mask_truncated=masked)
        [micro] = plan_update(rows_of([[first, second]], loss), groups()[0], loss, PassLimits(rows=100))
        assert micro.weights.sum(1).tolist() == pytest.approx(expected)
        assert micro.counted.sum(1).tolist() == [2] + [5] * (not masked)
        assert micro.advantages.tolist() == [0.0] + [1.0] * (not masked)


def test_what_a_tool_inserted_is_in_no_loss() -> None:
    first, second = groups()[0]
    second = replace(second, rollout=replace(second.rollout, drawn=(True, False, False, True, True)))
    [micro] = plan_update(rows_of([[first, second]], LossSettings()), groups()[0], LossSettings(), PassLimits(rows=100))
    assert micro.counted.tolist() == [[True, True, False, False, False], [True, False, False, True, True]]
    assert micro.batch.mask.sum(1).tolist() == [2, 5]
    assert micro.weights.sum(1).tolist() == pytest.approx([0.5, 0.5])


def many_rows() -> list[UpdateRow]:
    """Three a group, of seven groups."""
    chosen = [scored_group([1.0, 0.0, 0.0], name=f"p{i}") for i in range(7)]
    drawn = [DrawnGroup(tuple(group), GroupVerdict("kept")) for group in chosen]
    return update_rows(drawn, torch.arange(21.0).reshape(7, 3), LossSettings())


@pytest.mark.parametrize("split", ["groups", "rows"])
def test_minibatches_share_the_rows_out_and_redefine_no_group(split: Any) -> None:
    rows = many_rows()
    parts = split_minibatches(rows, RoundSettings(minibatches=3, minibatch_split=split), "1/0/0")
    assert len(parts) == 3
    together = sorted((row for part in parts for row in part), key=lambda row: row.advantage)
    assert together == rows  # each once, with the advantage and the group it had
    of_group = [
        {part for part, chosen in enumerate(parts) for row in chosen if row.group == g} for g in {r.group for r in rows}
    ]
    assert len(of_group) == 7
    assert all(len(found) == 1 for found in of_group) is (split == "groups")
    for part in parts:
        assert part == sorted(part, key=lambda row: row.advantage)


def test_every_pass_has_an_order_of_its_own_that_its_key_fixes() -> None:
    rows = many_rows()
    settings = RoundSettings(minibatches=3)
    first, again, other = (split_minibatches(rows, settings, key) for key in ("1/0/0", "1/0/0", "1/0/1"))
    assert first == again != other
    [whole] = split_minibatches(rows, RoundSettings(), "1/0/0")
    assert whole == rows


def test_more_minibatches_than_groups_leave_some_empty() -> None:
    parts = split_minibatches(many_rows(), RoundSettings(minibatches=9), "1/0/0")
    assert sorted(map(len, parts)) == [0, 0, 3, 3, 3, 3, 3, 3, 3]


def test_values_by_rollout_come_back_in_any_other_batch() -> None:
    rows = rows_of(groups(), LossSettings())
    values: dict[str, tuple[float, ...]] = {}
    for micro in plan_update(rows, groups()[0], LossSettings(), PassLimits(rows=2)):
        values |= micro.rows(torch.rand(micro.batch.mask.shape))
    [whole] = plan_update(rows, groups()[0], LossSettings(), PassLimits(rows=100))
    assert whole.rows(whole.tensor(values)) == values
    with pytest.raises(KeyError):
        whole.tensor({})


@pytest.mark.parametrize("rows_together", [3, 2, 1])
@pytest.mark.parametrize("split", ["groups", "rows"])
def test_minibatches_are_the_same_however_many_processes_share_the_rows(
    split: Any, rows_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole groups, and groups whose rows lie in two processes, a first row with either."""
    rows = many_rows()
    settings = RoundSettings(minibatches=3, minibatch_split=split)
    whole = [{row.rollout_id for row in part} for part in split_minibatches(rows, settings, "1/0/0")]
    shares = [[row for i, row in enumerate(rows) if i // rows_together % 2 == rank] for rank in (0, 1)]
    heard: list[list[str]] = []
    monkeypatch.setattr(policy_update, "all_processes", lambda names: heard.append(names) or [names])
    for share in shares:
        split_minibatches(share, settings, "1/0/0")
    monkeypatch.setattr(policy_update, "all_processes", lambda _: heard)
    together: list[set[str]] = [set(), set(), set()]
    for share in shares:
        for place, part in enumerate(split_minibatches(share, settings, "1/0/0")):
            together[place] |= {row.rollout_id for row in part}
    assert together == whole


def test_an_update_in_which_no_token_counts_is_none() -> None:
    cut = [[replace(m, rollout=replace(m.rollout, finish_reason="length")) for m in group] for group in groups()]
    masked = LossSettings(mask_truncated=True)
    assert plan_update(rows_of(cut, masked), groups()[0], masked, PassLimits(rows=100)) == []
    assert plan_update(rows_of(cut, LossSettings()), groups()[0], LossSettings(), PassLimits(rows=100))


@pytest.mark.parametrize(
    ("loss", "feels", "run"),
    [
        (LossSettings(kl_beta=0.0), True, [1, 3]),
        (LossSettings(kl_beta=0.1), True, [0, 1, 2, 3]),
        (LossSettings(kl_beta=0.1), False, [1, 3]),
        (LossSettings(kl_beta=0.0, entropy_bonus=0.1), True, [0, 1, 2, 3]),
    ],
)
def test_rows_without_a_gradient_are_in_the_denominators_and_not_run(
    loss: LossSettings, feels: bool, run: list[int]
) -> None:
    members = [member for group in (groups()[0], groups()[2]) for member in group]
    rows = [UpdateRow(m, [0.0, 1.0, 0.0, -1.0][i], str(i // 2), feels_kl=feels) for i, m in enumerate(members)]
    micros = plan_update(rows, members, loss, PassLimits())
    expected = {rows[i].rollout_id: [1 / 4 / len(members[i].rollout.tokens)] for i in run}
    got = weights_by_rollout(micros)
    assert {name: pytest.approx(weights[:1]) for name, weights in got.items()} == expected


def test_an_update_of_rows_without_a_gradient_is_none() -> None:
    """Its step would move the weights by the optimiser's momentum alone."""
    flat = [UpdateRow(member, 0.0, "a") for member in groups()[0]]
    assert plan_update(flat, groups()[0], LossSettings(kl_beta=0.0), PassLimits()) == []
    assert plan_update(flat, groups()[0], LossSettings(), PassLimits())


def test_without_a_shared_prompt_every_completion_has_its_own() -> None:
    rows = rows_of(groups(), LossSettings())
    [shared] = plan_update(rows, groups()[0], LossSettings(), PassLimits(100))
    [apart] = plan_update(rows, groups()[0], LossSettings(), PassLimits(100, shared_prompt=False))
    assert shared.batch.rows_per_prompt.tolist() == [2, 2, 1]
    assert apart.batch.rows_per_prompt.tolist() == [1] * 5
    assert len(apart.batch.prompts) == 5


def test_an_idle_batch_says_nothing_of_the_rollout_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has two micro-batches more: what is run beside them must not stand for a real row's numbers."""
    members = groups()[0]
    rows = [UpdateRow(member, 1.0, "a") for member in members]
    real = policy_update.all_processes
    monkeypatch.setattr(policy_update, "all_processes", lambda value: [*real(value), 3] if value == 1 else real(value))
    planned = plan_update(rows, members, LossSettings(reduction="token_mean"), PassLimits())
    assert [len(micro.rollout_ids) for micro in planned] == [len(rows), 0, 0]
    idle = planned[1]
    assert idle.rows(torch.zeros(idle.batch.mask.shape)) == {}
    assert not idle.counted.any()
    assert not idle.weights.any()
    assert torch.equal(idle.tensor({}), torch.zeros(idle.batch.mask.shape))
    with pytest.raises(KeyError):
        planned[0].tensor({rows[0].rollout_id: (0.0,)})
