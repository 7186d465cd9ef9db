import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
import torch
from fixtures_policy import scored_group, share_of_lower_case
from fixtures_rounds import Run
from torch import Tensor

from grpo.maths.grpo_loss import grpo_loss
from grpo.records import FinishReason, Problem, Score, ScoredRollout, ToolCall
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import DrawnGroup, judge_draw, judge_group
from grpo.rollouts.reward_transform import RewardTransform, reward_of
from grpo.training.phase_clock import PhaseClock
from grpo.training.round_metrics import is_accepted, rollout_metrics, round_counts
from grpo.training.update_metrics import advantage_metrics, loss_metrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def weighing(**weights: float) -> dict[str, RewardComponent]:
    return {name: RewardComponent(lambda _problem, _text: Score(0.0), weight) for name, weight in weights.items()}


def in_slice(name: str, group: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    members = []
    for member in group:
        prompt = member.rollout.group
        prompt = replace(prompt, problem=replace(prompt.problem, slice=name))
        members.append(replace(member, rollout=replace(member.rollout, group=prompt)))
    return members


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


@pytest.mark.parametrize(
    ("scores", "accepted"),
    [
        ({"answer": Score(1.0), "form": Score(1.0)}, True),
        ({"answer": Score(1.0), "form": Score(0.5)}, False),
        # what weighs nothing or is a penalty has no say
        ({"answer": Score(1.0), "note": Score(0.0), "penalty": Score(0.0)}, True),
        ({"answer": Score(0.0), "note": Score(1.0), "penalty": Score(1.0)}, False),
        # nor has what does not apply; and nothing that applies is nothing to accept
        ({"answer": Score(1.0), "form": Score.not_applicable("no")}, True),
        ({"answer": Score.not_applicable("no"), "penalty": Score(0.0)}, None),
    ],
)
def test_accepted_is_full_marks_from_all_that_can_give_them(scores: dict[str, Score], accepted: bool | None) -> None:
    components = weighing(answer=1.0, form=0.1, note=0.0, penalty=-1.0)
    [member] = scored_group([0.25])
    member = replace(member, components=scores)
    assert is_accepted(member, components) is accepted
    assert is_accepted(replace(member, reward=None), components) is None
    metrics = rollout_metrics([[member]], components)
    assert metrics.get("reward/acceptance") == (None if accepted is None else float(accepted))


def test_flat_groups_are_split_by_acceptance() -> None:
    groups = [
        scored_group([1.0, 1.0]),
        scored_group([0.0, 0.0, None]),
        scored_group([0.0, 0.0]),
        scored_group([0.5, 0.0]),  # none accepted, yet not flat
        scored_group([None, None]),
    ]
    metrics = rollout_metrics(groups, weighing(made=1.0))
    assert metrics["groups/flat_accepted"] == 0.25
    assert metrics["groups/flat_rejected"] == 0.5
    assert metrics["groups/mixed"] == 0.25
    assert metrics["reward/acceptance"] == 2 / 8
    # equal rewards, one of them accepted: a penalty made up for it
    accepted, rejected = scored_group([0.5, 0.5])
    accepted = replace(accepted, components={"made": Score(1.0)})
    metrics = rollout_metrics([[accepted, rejected]], weighing(made=1.0))
    assert [metrics[f"groups/{name}"] for name in ("mixed", "flat_accepted", "flat_rejected")] == [0.0] * 3
    assert metrics["reward/acceptance"] == 0.5


def test_acceptance_is_absent_where_no_weights_tell_what_it_is() -> None:
    names = {"reward/acceptance", "groups/flat_accepted", "groups/flat_rejected"}
    assert not names & rollout_metrics([scored_group([1.0, 1.0])]).keys()
    assert not names & rollout_metrics([scored_group([None, None])], weighing(made=1.0)).keys()


def test_the_spread_of_the_groups_means() -> None:
    metrics = rollout_metrics([scored_group([0.0, 1.0]), scored_group([2.0, 3.0, None])])
    assert metrics["reward/std_within_groups"] == 0.5
    assert metrics["reward/std_between_groups"] == 1.0
    assert metrics["reward/std_batch"] == pytest.approx(math.sqrt(1.25))  # 0.5² + 1²


def test_steps_keep_their_means() -> None:
    members = scored_group([1.0, 0.5, None])
    steps = [{"weighted_sum": 1.0, "length_penalty": 0.0}, {"weighted_sum": 1.0, "length_penalty": -0.5}, {}]
    metrics = rollout_metrics([[replace(m, steps=own) for m, own in zip(members, steps, strict=True)]])
    assert metrics["reward/steps/weighted_sum"] == 1.0
    assert metrics["reward/steps/length_penalty"] == -0.25
    assert metrics["reward/mean"] == 0.75


def test_lengths_count_what_the_policy_drew() -> None:
    first, second = scored_group([1.0, 0.0], [6, 2])
    first = replace(first, rollout=replace(first.rollout, drawn=(True, False, False, True, True, True)))
    groups = [[first, second]]
    metrics = rollout_metrics(groups)
    assert (metrics["length/mean"], metrics["length/finished_mean"], metrics["length/max"]) == (3.0, 3.0, 4.0)
    assert metrics["tokens/sampled"] == 6.0
    drawn = [[DrawnGroup(tuple(group), judge_group(group, "skip"))] for group in groups]
    assert round_counts(drawn, tokens_in_loss=6) == {
        "groups_kept": 1,
        "rounds": 1,
        "groups": 1,
        "rollouts": 2,
        "tokens_sampled": 6,
        "tokens_in_loss": 6,
    }


def test_every_draw_of_a_group_is_counted() -> None:
    flat, mixed = (scored_group(rewards) for rewards in ([1.0, 1.0], [1.0, 0.0]))
    draws = [
        [
            DrawnGroup(tuple(flat), judge_draw(flat, "resample", 0, 4, "skip")),
            DrawnGroup(tuple(mixed), judge_draw(mixed, "resample", 1, 4, "skip")),
        ]
    ]
    counts = round_counts(draws, tokens_in_loss=6)
    assert (counts["groups"], counts["groups_resampled"], counts["groups_kept"]) == (2, 1, 1)
    assert (counts["rollouts"], counts["tokens_sampled"], counts["tokens_in_loss"]) == (4, 12, 6)


def test_endings_are_told_apart() -> None:
    ended, long, out_of_calls, stopped = scored_group([0.0] * 4, [2, 8, 8, 4])
    stopped = replace(stopped, rollout=replace(stopped.rollout, finish_reason="stop_string"))
    out_of_calls = replace(out_of_calls, rollout=replace(out_of_calls.rollout, finish_reason="tool_limit"))
    metrics = rollout_metrics([[ended, cut(long), out_of_calls, stopped]])
    assert {name: metrics[f"endings/{name}"] for name in get_args(FinishReason)} == {
        "end_token": 0.25,
        "stop_string": 0.25,
        "length": 0.25,
        "tool_limit": 0.25,
    }
    assert metrics["length/truncated"] == 0.25
    assert metrics["length/finished_mean"] == 3.0


def test_tool_calls_are_counted_where_there_are_tools() -> None:
    one, other = scored_group([0.0, 0.0])
    assert "tools/calls" not in rollout_metrics([[one, other]])
    calls = (ToolCall("sum", "1", "1"), ToolCall("sum", "?", "not a sum", False), ToolCall("sum", "", "empty", False))
    called = replace(one, rollout=replace(one.rollout, tool_calls=calls))
    metrics = rollout_metrics([[called, other]])
    assert (metrics["tools/calls"], metrics["tools/invalid_calls"]) == (1.5, 1.0)
    # tools that nobody called were still there to call
    policy = replace(one.rollout.sampling_policy, tools='{"sum": "1"}')
    idle = [replace(m, rollout=replace(m.rollout, sampling_policy=policy)) for m in (one, other)]
    metrics = rollout_metrics([idle])
    assert (metrics["tools/calls"], metrics["tools/invalid_calls"]) == (0.0, 0.0)


def test_no_groups_and_empty_groups_give_no_metrics() -> None:
    assert rollout_metrics([]) == rollout_metrics([[]]) == {}
    group = scored_group([1.0, 0.0])
    assert rollout_metrics([[], group]) == rollout_metrics([group])
    assert advantage_metrics([], [], []) == advantage_metrics([[]], [[]], [True]) == {}


def test_slices_have_the_metrics_of_their_own_groups() -> None:
    sums = [in_slice("sums", scored_group([1.0, 0.0], [2, 4])), in_slice("sums", scored_group([1.0, 1.0]))]
    words = [in_slice("words", [cut(m) for m in scored_group([0.0, None])])]
    metrics = rollout_metrics([*sums, *words], weighing(made=1.0))
    for name, groups in (("sums", sums), ("words", words)):
        alone = rollout_metrics(groups, weighing(made=1.0))
        own = {metric.removeprefix(f"slice/{name}/"): value for metric, value in metrics.items()}
        assert {metric: own[metric] for metric in alone} == alone
    assert metrics["slice/sums/groups/mixed"] == 0.5
    assert metrics["slice/sums/reward/acceptance"] == 0.75
    assert metrics["slice/words/length/truncated"] == 1.0
    assert metrics["groups/mixed"] == pytest.approx(1 / 3)


def test_one_slice_alone_is_not_told_twice() -> None:
    groups = [scored_group([1.0, 0.0]), scored_group([1.0, 1.0])]
    metrics = rollout_metrics(groups) | advantage_metrics(groups, [[1.0, -1.0], [0.0, 0.0]], [True, True])
    assert not [name for name in metrics if name.startswith("slice/")]


def test_a_slice_without_a_score_has_no_reward() -> None:
    groups = [in_slice("a", scored_group([1.0, 0.0])), in_slice("b", scored_group([None, None]))]
    metrics = rollout_metrics(groups, weighing(made=1.0))
    assert metrics["slice/a/reward/mean"] == 0.5
    assert "slice/b/reward/mean" not in metrics
    assert metrics["slice/b/length/mean"] == 3.0


def test_the_signal_is_shared_out_over_problems_and_slices() -> None:
    rewards = [1.0, 0.0]
    groups = [
        in_slice("sums", scored_group(rewards, name="p1")),
        in_slice("sums", scored_group(rewards, name="p2")),
        in_slice("sums", scored_group(rewards, name="p1")),
        in_slice("words", scored_group([1.0, None, 0.0], name="p3")),
        in_slice("words", scored_group([1.0, 1.0], name="p4")),
    ]
    advantages = [[1.0, -1.0], [1.0, -1.0], [1.0, -1.0], [1.0, 0.0, -1.0], [9.0, 9.0]]
    metrics = advantage_metrics(groups, advantages, [True, True, True, True, False])
    # p1 gave 4 of 8, p2 and p3 2 each: 1 / (1/4 + 1/16 + 1/16)
    assert metrics["advantage/largest_problem"] == 0.5
    assert metrics["advantage/effective_problems"] == pytest.approx(8 / 3)
    assert metrics["slice/sums/advantage/share"] == 0.75
    assert metrics["slice/words/advantage/share"] == 0.25


def test_equal_problems_count_whole_and_a_lone_one_is_one() -> None:
    groups = [scored_group([1.0, 0.0], name=str(number)) for number in range(4)]
    equal = advantage_metrics(groups, torch.tensor([[1.0, -1.0]] * 4), [True] * 4)
    assert (equal["advantage/largest_problem"], equal["advantage/effective_problems"]) == (0.25, 4.0)
    lone = advantage_metrics(groups, torch.tensor([[0.0, 0.0]] * 3 + [[0.5, -0.5]]), [True] * 4)
    assert (lone["advantage/largest_problem"], lone["advantage/effective_problems"]) == (1.0, 1.0)


def test_without_a_signal_there_is_nothing_to_share_out() -> None:
    groups = [in_slice("a", scored_group([1.0, 1.0])), in_slice("b", scored_group([None, None]))]
    flat = advantage_metrics(groups, torch.zeros(2, 2), [True, False])
    assert flat == {}
    none = advantage_metrics(groups, torch.ones(2, 2), [False, False])
    assert none == {}


def test_advantages_that_do_not_fit_the_groups_are_refused() -> None:
    groups = [scored_group([1.0, 0.0])]
    for advantages, in_update in (([[1.0]], [True]), ([], [True]), ([[1.0, -1.0]], [])):
        with pytest.raises(ValueError, match="zip"):
            advantage_metrics(groups, advantages, in_update)


def test_the_phases_and_the_rest_add_up_to_the_round() -> None:
    clock = PhaseClock()
    for name in ("rollout", "update", "rollout"):
        with clock.phase(name):
            time.sleep(0.01)
    time.sleep(0.02)
    metrics = clock.metrics()
    assert metrics.keys() == {"seconds/rollout", "seconds/update", "seconds/other", "seconds/round"}
    assert metrics["seconds/rollout"] >= 0.02
    assert metrics["seconds/update"] >= 0.01
    assert metrics["seconds/other"] >= 0.02
    whole = metrics.pop("seconds/round")
    assert sum(metrics.values()) == pytest.approx(whole)


class TimesSteps(L.Callback):
    """A clock of its own around each step, from outside the module."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def slowly(problem: Problem, completion: str) -> Score:
    time.sleep(0.04)
    return share_of_lower_case(problem, completion)


def test_the_phases_of_real_rounds_leave_little_of_a_step_untold(tmp_path: Path) -> None:
    """The best of four: another program may hold any one of them up."""
    clock = TimesSteps()
    run = Run(tmp_path / "run", {"slow": RewardComponent(slowly)}, rounds=4).go(clock)
    told = [sum(row[f"seconds/{name}"] for name in ("rollout", "reward", "update", "record")) for row in run.metrics]
    assert all(row["seconds/reward"] >= 12 * 0.04 for row in run.metrics)
    assert all(part <= step for part, step in zip(told, clock.seconds, strict=True))
    assert max(part / step for part, step in zip(told, clock.seconds, strict=True)) > 0.95


def test_a_phase_inside_another_would_count_twice() -> None:
    clock = PhaseClock()
    nested = pytest.raises(AssertionError, match="phase reward starts inside rollout")
    with nested, clock.phase("rollout"), clock.phase("reward"):
        pass
    with clock.phase("reward"):
        pass


def test_every_metric_is_documented_and_every_documented_one_is_there() -> None:
    of_the_module = {"groups/in_update", "groups/draws", "tokens/in_loss"}
    of_the_module |= {"loss/gradient_norm", "loss/learning_rate", "loss/updates"}
    emitted = {*everything_emitted()} | of_the_module
    by_slice = {name for name in emitted if name.startswith("slice/") and not name.endswith("/advantage/share")}
    assert documented() - {"validation/<metric>", "slice/<slice>/<metric>"} == emitted - by_slice
    told_whole = {name.split("/", 2)[2] for name in by_slice}
    assert told_whole == {name for name in emitted - by_slice - of_the_module if not is_of_the_whole_round(name)}


def is_of_the_whole_round(name: str) -> bool:
    """What the document says is not told by slice."""
    return name.startswith(("seconds/", "advantage/", "slice/"))


def documented() -> set[str]:
    """The names in the first columns of the document, for what :func:`everything_emitted` made."""
    of_a_round, _, _ = DOCUMENT.read_text(encoding="utf-8").partition("## Held-out evaluation")
    lines = of_a_round.splitlines()
    names = [name for line in lines if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    stands_for = {
        "<component>": ["made"],
        "<step>": ["weighted_sum", "clipped", "length_penalty", "format_penalty", "tool_penalty"],
        "<reason>": list(get_args(FinishReason)),
        "<phase>": ["rollout", "reward", "record", "update"],
        "<slice>": ["a", "b"],
    }
    expanded = set()
    for name in names:
        parts = [stands_for.get(part, [part]) for part in name.split("/")]
        expanded |= {name} if name.endswith("<metric>") else {"/".join(choice) for choice in product(*parts)}
    return expanded


def everything_emitted() -> set[str]:
    """Names of the metrics of a round with all that can be switched on, but for those the module adds itself."""
    transform = RewardTransform((0.0, 1.0), 1.0, 3, 1, 0.5, "made", 0.25)
    components = weighing(made=1.0)
    groups = []
    for name in ("a", "b"):
        members = in_slice(name, scored_group([1.0, 0.0]))
        for index, member in enumerate(members):
            member = replace(
                member, components={n: replace(c, parts={"answer": "1"}) for n, c in member.components.items()}
            )
            steps = transform.steps(member.components, components, length=3, invalid_tool_calls=index)
            rollout = replace(member.rollout, tool_calls=(ToolCall("sum", "?", "not a sum", False),) * index)
            members[index] = replace(member, rollout=rollout, steps=steps, reward=reward_of(steps))
        groups.append(members)
    clock = PhaseClock()
    for phase in ("rollout", "reward", "record", "update"):
        with clock.phase(phase):
            pass
    return {
        *rollout_metrics(groups, components),
        *advantage_metrics(groups, torch.ones(2, 2), [True, True]),
        *clock.metrics(),
        *loss_metrics([(["a", "b"], every_loss_metric())]),
    }


def every_loss_metric() -> dict[str, Tensor]:
    ones, mask = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
    output = grpo_loss(
        -ones,
        -ones,
        torch.ones(2),
        mask,
        reference_logprobs=-ones,
        dual_clip=3.0,
        kl_beta=0.1,
        entropy=ones,
        sampling_logprobs=-ones,
        mismatch_cap=2.0,
    )
    return output.metrics


def test_the_loss_by_slice_is_that_of_the_slices_rows_alone() -> None:
    torch.manual_seed(0)
    policy, old, reference = -torch.rand(3, 6, 4)
    advantages, mask = torch.randn(6), torch.rand(6, 4) < 0.7

    def metrics_of(rows: list[int]) -> dict[str, Tensor]:
        return grpo_loss(
            policy[rows], old[rows], advantages[rows], mask[rows], reference_logprobs=reference[rows], clip_low=0.05
        ).metrics

    together = loss_metrics([(["a", "b", "a"], metrics_of([0, 1, 2])), (["b", "b", "a"], metrics_of([3, 4, 5]))])
    for name, rows in (("a", [0, 2, 5]), ("b", [1, 3, 4])):
        alone = loss_metrics([([name] * 3, metrics_of(rows))])
        assert not [metric for metric in alone if metric.startswith("slice/")]
        own = {m.removeprefix(f"slice/{name}/"): v for m, v in together.items() if m.startswith(f"slice/{name}/")}
        assert own == pytest.approx(alone, rel=1e-12)
    assert together["loss/clip_fraction_low"] > 0
    assert together["slice/a/loss/tokens"] + together["slice/b/loss/tokens"] == together["loss/tokens"]


def test_distinct_answers_are_those_that_were_read_however_they_are_written() -> None:
    def answering(*answers: str | None) -> list[ScoredRollout]:
        members = scored_group([1.0] * len(answers))
        scores = [Score(1.0, parts={"answer": answer}) for answer in answers]
        return [replace(m, components={"made": score}) for m, score in zip(members, scores, strict=True)]

    assert rollout_metrics([answering("5", "5", "6", None)])["groups/distinct_answers"] == 2.0
    assert rollout_metrics([answering("5", "5"), answering(None, None)])["groups/distinct_answers"] == 0.5
    silent = scored_group([1.0, 0.0])
    assert "groups/distinct_answers" not in rollout_metrics([silent])
    assert rollout_metrics([silent, answering("5", "7")])["groups/distinct_answers"] == 2.0
