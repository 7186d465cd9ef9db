import math
import time
from dataclasses import replace

import pytest
from fixtures_policy import scored_group

from grpo.records import Score, ScoredRollout
from grpo.training.round_metrics import PhaseClock, rollout_metrics


def cut(member: ScoredRollout) -> ScoredRollout:
    return replace(member, rollout=replace(member.rollout, finish_reason="length"))


def test_lengths_and_truncation_agree() -> None:
    # lengths 2 (ended), 5 (not ended at a limit of 5), 5 (its fifth token is the end)
    first, second, third = scored_group([1.0, 0.0, 0.0], [2, 5, 5])
    metrics = rollout_metrics([[first, cut(second), third]])
    assert metrics["length/truncated"] == pytest.approx(1 / 3)
    assert metrics["length/finished_mean"] == 3.5
    assert metrics["length/mean"] == 4.0


def test_a_metric_without_data_is_absent_and_never_nan() -> None:
    none_finished = rollout_metrics([[cut(m) for m in scored_group([1.0, 0.0])]])
    assert "length/finished_mean" not in none_finished
    none_scored = rollout_metrics([scored_group([None, None])])
    assert none_scored["reward/unscored"] == 1.0
    assert not {"reward/mean", "reward/std_batch", "groups/mixed"} & none_scored.keys()
    for metrics in (none_finished, none_scored):
        assert all(math.isfinite(value) for value in metrics.values())


def test_the_spread_within_groups_is_told_from_that_of_the_batch() -> None:
    metrics = rollout_metrics([scored_group([5.0, 5.0]), scored_group([-5.0, -5.0])])
    assert metrics["reward/std_within_groups"] == 0.0
    assert metrics["reward/std_batch"] == 5.0
    assert metrics["groups/mixed"] == 0.0


def test_mixed_groups_are_counted_among_those_with_a_score() -> None:
    groups = [scored_group([1.0, 1.0]), scored_group([1.0, 0.0]), scored_group([None, None])]
    metrics = rollout_metrics(groups)
    assert metrics["groups/mixed"] == 0.5
    assert metrics["reward/unscored"] == pytest.approx(1 / 3)
    assert metrics["reward/mean"] == 0.75


def test_equal_groups_mixed_by_a_quarter_each() -> None:
    pairs = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert rollout_metrics([scored_group(list(pair)) for pair in pairs])["groups/mixed"] == 0.5


def test_copies_within_a_group_are_counted() -> None:
    one, other, third, fourth = scored_group([0.0] * 4)
    same = replace(other, rollout=replace(other.rollout, tokens=one.rollout.tokens, text=one.rollout.text))
    metrics = rollout_metrics([[one, same, third, fourth], [one]])
    assert metrics["groups/duplicates"] == pytest.approx(1 / 5)
    assert metrics["groups/distinct"] == 2.0


def test_components_keep_their_means_where_they_cancel() -> None:
    [one, other] = scored_group([1.0, 1.0])
    rows = [
        replace(one, components={"a": Score(1.0), "b": Score(0.0)}),
        replace(other, components={"a": Score(0.0), "b": Score(1.0), "c": Score.not_applicable("no")}),
    ]
    metrics = rollout_metrics([rows])
    assert (metrics["reward/a"], metrics["reward/b"]) == (0.5, 0.5)
    assert "reward/c" not in metrics


def test_phases_add_up_within_the_round() -> None:
    clock = PhaseClock()
    for name in ("rollout", "update", "rollout"):
        with clock.phase(name):
            time.sleep(0.01)
    metrics = clock.metrics()
    assert metrics["seconds/rollout"] >= 0.02
    assert metrics["seconds/update"] >= 0.01
    assert metrics["seconds/rollout"] + metrics["seconds/update"] <= metrics["seconds/round"]
