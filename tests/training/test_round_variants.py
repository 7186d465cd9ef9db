"""Rounds that are not one plain draw a prompt: flat groups drawn again, groups over variants, tools."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from fixtures_policy import (
    TOKENIZER,
    leaning_policy_folder,
    share_of_lower_case,
    starts_with_a_letter,
    train_config,
    write_config,
)
from fixtures_rounds import (
    LOWER_CASE,
    Row,
    Run,
    by_group,
    gradient,
    plain_gradient,
    plain_logprobs,
    relative_difference,
    watch,
)

from grpo.__main__ import main
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import AtLimit, OnlyFlatGroups
from grpo.rollouts.policies import load_policy
from grpo.rollouts.prompts import PromptTemplate
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import SamplingSettings
from grpo.rollouts.tools import Tool, ToolSettings
from grpo.training import grpo_module, round_update
from grpo.training.settings import LossSettings, RoundSettings

# Flat groups that are drawn again

RESAMPLE = RoundSettings(group_size=4, flat_groups="resample", max_draws=3)


class Scripted:
    """Rewards that are laid down in advance, for problem after problem and draw after draw, four to a draw."""

    def __init__(self, script: dict[str, list[list[float]]]) -> None:
        self.script = {name: [reward for draw in draws for reward in draw] for name, draws in script.items()}

    def __call__(self, problem: Problem, completion: str) -> Score:
        return Score(self.script[problem.id].pop(0))


def scripted_run(folder: Path, at_limit: AtLimit) -> tuple[Run, tuple[str, str, str]]:
    """One problem is mixed in its second draw, one in none of three, one in its first; their names in this order."""
    plan = Run(folder)
    plan.data.setup("fit")
    second, never, first = (group.problem.id for group in plan.data.train_rounds[0].groups)
    rewards = Scripted(
        {
            second: [[0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 0.0]],
            never: [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
            first: [[0.0, 0.0, 0.0, 1.0]],
        }
    )
    settings = replace(RESAMPLE, at_limit=at_limit)
    data = {"validation_problems": 0}
    run = Run(folder, {"scripted": RewardComponent(rewards)}, round=settings, rounds=1, data=data)
    return run, (second, never, first)


def draws_of(rows: list[Row], problem: str) -> dict[int, list[Row]]:
    draws: dict[int, list[Row]] = {}
    for row in rows:
        if row["problem_id"] == problem:
            draws.setdefault(row["draw"], []).append(row)
    return draws


@pytest.mark.parametrize(("at_limit", "verdict", "in_update"), [("skip", "skipped_flat", 2), ("keep", "kept_flat", 3)])
def test_a_flat_group_is_drawn_again_whole_until_it_is_mixed_or_the_limit_is_met(
    tmp_path: Path, at_limit: AtLimit, verdict: str, in_update: int
) -> None:
    run, (second, never, first) = scripted_run(tmp_path, at_limit)
    run.go()
    rows = run.joined()
    assert {name: len(draws_of(rows, name)) for name in (second, never, first)} == {second: 2, never: 3, first: 1}

    verdicts = {
        (name, draw): {(row["verdict"], row["verdict_reason"]) for row in members}
        for name in (second, never, first)
        for draw, members in draws_of(rows, name).items()
    }
    assert verdicts == {
        (second, 0): {("resampled", "all 4 scored members earned 0.5; draw 1 of at most 3")},
        (second, 1): {("kept", "")},
        (never, 0): {("resampled", "all 4 scored members earned 1.0; draw 1 of at most 3")},
        (never, 1): {("resampled", "all 4 scored members earned 0.0; draw 2 of at most 3")},
        (never, 2): {(verdict, "all 4 scored members earned 0.0; draw 3 of at most 3, the last")},
        (first, 0): {("kept", "")},
    }

    # draws are groups of their own
    assert len(rows) == 24
    assert len({row["rollout_id"] for row in rows}) == 24
    groups = by_group(rows)
    assert len(groups) == 6
    for group in groups.values():
        assert len({(row["problem_id"], row["draw"]) for row in group}) == 1
        assert [row["member"] for row in group] == [0, 1, 2, 3]
    for name in (second, never):
        tokens = [{tuple(row["completion_tokens"]) for row in members} for members in draws_of(rows, name).values()]
        assert all(not tokens[0] & other for other in tokens[1:])

    # [1, 1, 1, 0]: mean 3/4, std sqrt(3)/4; [0, 0, 0, 1] the other way round
    assert [row["advantage"] for row in draws_of(rows, second)[1]] == pytest.approx([3**-0.5] * 3 + [-(3**0.5)])
    assert [row["advantage"] for row in draws_of(rows, first)[0]] == pytest.approx([-(3**-0.5)] * 3 + [3**0.5])
    assert [row["centred"] for row in draws_of(rows, first)[0]] == pytest.approx([-0.25] * 3 + [0.75])
    for row in rows:
        if row["verdict"] == "resampled":
            assert (row["centred"], row["advantage"], row["loss_tokens"]) == (None, None, 0)
            assert (row["reference_logprobs"], row["reference_version"]) == (None, None)
        elif row["problem_id"] == never:
            assert (row["centred"], row["advantage"]) == (0.0, 0.0)

    [metrics] = run.metrics
    assert metrics["reward/mean"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)  # of the first draws
    assert metrics["groups/mixed"] == pytest.approx(1 / 3)
    assert metrics["groups/draws"] == 2.0
    assert metrics["groups/in_update"] == in_update
    assert metrics["loss/rows"] == 4 * in_update
    kept = [row for row in rows if row["loss_tokens"]]
    assert metrics["tokens/in_loss"] == metrics["loss/tokens"] == sum(len(row["completion_tokens"]) for row in kept)
    assert metrics["advantage/effective_problems"] == pytest.approx(2.0)


def test_a_round_with_draws_of_its_own_has_the_gradient_of_the_groups_that_count(tmp_path: Path) -> None:
    run, _ = scripted_run(tmp_path, "skip")
    found = gradient(run)
    counted = [row for row in run.joined() if row["verdict"] == "kept"]
    assert Counter(row["draw"] for row in counted) == {0: 4, 1: 4}
    assert relative_difference(found, plain_gradient(load_policy(tmp_path / "policy").model.double(), counted)) < 1e-5


def test_a_run_that_may_not_go_on_without_a_mixed_group_stops_behind_the_record(tmp_path: Path) -> None:
    run, (_, never, _) = scripted_run(tmp_path, "fail")
    with pytest.raises(
        OnlyFlatGroups, match=rf"1 groups stayed flat, first that of problem {never} \(all 4 .* is fail"
    ):
        run.go()
    rows = run.table("rollouts")
    assert Counter(row["draw"] for row in rows) == {0: 12, 1: 8, 2: 4}
    decided = run.table("updates")
    assert {row["rollout_id"] for row in decided} == {row["rollout_id"] for row in rows}
    assert Counter(row["verdict"] for row in decided) == {"kept": 8, "resampled": 12, "failed_flat": 4}
    assert {row["loss_tokens"] for row in decided} == {0}
    before = torch.cat([p.flatten() for p in load_policy(tmp_path / "policy").model.parameters()])
    assert torch.equal(run.weights(), before)


RARE = {"letter": RewardComponent(starts_with_a_letter)}


def test_the_ledger_of_a_resampling_run_reconciles_with_its_record(tmp_path: Path) -> None:
    run = Run(tmp_path, RARE, round=RESAMPLE, rounds=8).go()
    rows = [row for number in range(8) for row in run.joined(number)]
    groups = by_group(rows)
    verdicts = Counter(group[0]["verdict"] for group in groups.values())
    assert verdicts["kept"] >= 8
    assert verdicts["resampled"] >= 2
    assert verdicts.keys() <= {"kept", "resampled", "skipped_flat"}
    ledger = run.module.ledger
    assert {name: ledger[f"groups_{name}"] for name in verdicts} == verdicts
    assert (ledger["rounds"], ledger["groups"], ledger["rollouts"]) == (8, len(groups), len(rows))
    assert ledger["tokens_sampled"] == sum(len(row["completion_tokens"]) for row in rows)
    assert ledger["tokens_in_loss"] == sum(row["loss_tokens"] for row in rows)
    assert ledger["updates"] == run.trainer.global_step == 8
    for number, metrics in enumerate(run.metrics):
        first = [row["reward"] for row in rows if row["round"] == number and row["draw"] == 0]
        assert len(first) == 12
        assert metrics["reward/mean"] == pytest.approx(fmean(first))
    for group in groups.values():
        assert len(group) == 4
        assert max(row["draw"] for row in group) < 3
        flat = len({row["reward"] for row in group}) == 1
        assert flat is (group[0]["verdict"] != "kept")


def test_the_first_draw_is_the_one_of_a_run_that_never_draws_again(tmp_path: Path) -> None:
    resampled = Run(tmp_path / "a", RARE, round=RESAMPLE, rounds=1).go().table("rollouts")
    plain = Run(tmp_path / "b", RARE, round=RoundSettings(group_size=4), rounds=1).go().table("rollouts")
    assert {row["draw"] for row in plain} == {0}
    tokens = {row["rollout_id"]: row["completion_tokens"] for row in resampled if row["draw"] == 0}
    assert tokens == {row["rollout_id"]: row["completion_tokens"] for row in plain}


# Groups over variants of a prompt

OVER_VARIANTS = RoundSettings(group_size=4, group_unit="problem_over_variants", flat_groups="keep")
ASKED = PromptTemplate("asked", "Q: {question}\nA:")


def run_over_variants(folder: Path, **settings: Any) -> Run:
    data = {"prompt_variants": [ASKED], "group_unit": "problem_over_variants", "group_size": 4}
    return Run(folder, LOWER_CASE, round=OVER_VARIANTS, data=data, **settings)


def test_the_variants_of_a_prompt_share_one_group_evenly(tmp_path: Path) -> None:
    run = run_over_variants(tmp_path).go()
    for number in range(2):
        rows = run.joined(number)
        groups = by_group(rows)
        assert len(groups) == 3
        assert len({row["rollout_id"] for row in rows}) == 12
        for group in groups.values():
            assert len({row["problem_id"] for row in group}) == 1
            assert [(row["template_id"], row["member"]) for row in group] == [
                ("bare", 0),
                ("bare", 1),
                ("asked", 0),
                ("asked", 1),
            ]
            bare, asked = group[0]["prompt_text"], group[2]["prompt_text"]
            assert [row["prompt_text"] for row in group] == [bare, bare, asked, asked]
            assert asked == f"Q: {bare}\nA:"
            rewards = [row["reward"] for row in group]
            assert len({tuple(row["completion_tokens"]) for row in group}) > 2
            for row in group:  # compared with all four, not with the two of its own template
                advantage = (row["reward"] - fmean(rewards)) / (pstdev(rewards) + 1e-8)
                assert row["advantage"] == pytest.approx(advantage)
    assert [row["groups/in_update"] for row in run.metrics] == [3, 3]
    # a validation asks with the policy's own template alone
    assert {row["template_id"] for row in run.table("validation")} == {"bare"}


def test_every_completion_of_a_group_over_variants_is_trained_behind_its_own_prompt(tmp_path: Path) -> None:
    run = run_over_variants(tmp_path, loss=LossSettings(kl_beta=0.0), rounds=1)
    found = gradient(run)
    rows = run.joined()
    model = load_policy(tmp_path / "policy").model
    for row in rows:
        with torch.no_grad():
            assert plain_logprobs(model, row)[0].tolist() == pytest.approx(row["old_logprobs"], abs=1e-4)
    assert run.metrics[0]["loss/mismatch_max"] < 1e-4
    assert relative_difference(found, plain_gradient(model.double(), rows)) < 1e-5


def test_the_mean_over_groups_counts_a_group_over_variants_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = watch(monkeypatch, round_update, "grpo_loss")
    run = run_over_variants(tmp_path, loss=LossSettings(reduction="group_mean"), rounds=1).go()
    expected = []
    for group in by_group(run.joined()).values():
        tokens = sum(len(row["completion_tokens"]) for row in group)
        expected += [1 / 3 / tokens] * tokens
    found = [weight for call in losses for weight in call["token_weights"][call["mask"]].tolist()]
    assert sorted(found) == pytest.approx(sorted(expected))


VARIANTS = [{"id": "asked", "text": "Q: {question}"}]


@pytest.mark.parametrize(
    ("unit", "variants", "group_size", "message"),
    [
        ("problem", VARIANTS, 4, "data.prompt_variants is given, but model.round.group_unit is problem"),
        ("problem_over_variants", [], 4, "group_unit is problem_over_variants, but data.prompt_variants is empty"),
        ("problem_over_variants", VARIANTS, 5, "model.round.group_size is 5, which the 2 variants of a prompt"),
        (
            "problem_over_variants",
            [{"id": "bare", "text": "Q: {question}"}],
            4,
            "have the ids ['bare', 'bare']: give each template one of its own",
        ),
        ("problem_over_variants", [{"id": "asked", "text": "Q:"}], 4, "{question}"),
        (
            "problem_over_variants",
            [{"id": "asked", "text": "{context} {question}"}],
            4,
            "has no context, and template 'asked' has a place for one",
        ),
    ],
)
def test_a_unit_and_variants_that_do_not_fit_are_refused_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unit: str,
    variants: list[dict[str, str]],
    group_size: int,
    message: str,
) -> None:
    config = train_config(tmp_path, prompt_variants=variants)
    config["model"]["round"] = {"group_size": group_size, "group_unit": unit}
    config["model"]["optimizer"]["micro_batch_rows"] = 8
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(sys, "argv", ["grpo", "train", "--config", write_config(tmp_path / "train.yaml", config)])
    monkeypatch.setattr(grpo_module, "load_policy", lambda _: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


# Tools


class Twice(Tool):
    """The argument, twice."""

    version = "2"

    def __call__(self, argument: str) -> str:
        return argument + argument


TOOLS = ToolSettings(
    {"c": Twice(), "cc": Twice(), "ccc": Twice()}, opening="<", closing=">", result="={result};", max_calls=3
)
FINED = RewardTransform(invalid_tool_penalty=0.25)


def run_with_tools(folder: Path, **settings: Any) -> Run:
    """The policy has a liking for what calls are made of."""
    folder.mkdir(exist_ok=True)
    leaning_policy_folder(folder / "policy", "<>c:", by=5.0)
    return Run(
        folder,
        {"lower_case": RewardComponent(share_of_lower_case)},
        sampling=SamplingSettings(max_new_tokens=60, tools=TOOLS),
        round=RoundSettings(group_size=16, flat_groups="keep"),
        reward_transform=FINED,
        loss=LossSettings(kl_beta=0.0),
        rounds=1,
        **settings,
    )


def called_rows(rows: list[Row]) -> list[Row]:
    found = [row for row in rows if row["completion_drawn"] is not None]
    valid = [call["valid"] for row in found for call in row["tool_calls"]]
    assert len(found) > 3
    assert 0 < sum(valid) < len(valid)
    return found


def test_what_a_tool_put_in_is_in_the_context_and_not_in_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = watch(monkeypatch, round_update, "grpo_loss")
    run = run_with_tools(tmp_path)
    found = gradient(run)
    rows = run.joined()
    model = load_policy(tmp_path / "policy").model
    for row in called_rows(rows):
        drawn = row["completion_drawn"]
        assert not all(drawn)
        assert row["loss_tokens"] == sum(drawn) < len(row["completion_tokens"])
        put_in = [t for t, is_drawn in zip(row["completion_tokens"], drawn, strict=True) if not is_drawn]
        texts = "".join(TOOLS.result.replace("{result}", call["result"]) for call in row["tool_calls"])
        assert texts.startswith(TOKENIZER.decode(put_in))  # the last answer may be cut off by the length
        with torch.no_grad():
            logprobs = plain_logprobs(model, row)[0].tolist()
        for is_drawn, recorded, again in zip(drawn, row["old_logprobs"], logprobs, strict=True):
            assert recorded == (pytest.approx(again, abs=1e-4) if is_drawn else 0.0)
    assert sum(int(call["mask"].sum()) for call in losses) == sum(row["loss_tokens"] for row in rows)
    assert run.module.ledger["tokens_sampled"] == run.module.ledger["tokens_in_loss"]
    assert run.metrics[0]["loss/tokens"] == sum(row["loss_tokens"] for row in rows)
    assert relative_difference(found, plain_gradient(model.double(), rows)) < 1e-5


def test_an_invalid_call_is_fined_once_each_and_the_fine_enters_the_comparison(tmp_path: Path) -> None:
    rows = run_with_tools(tmp_path).go().joined()
    called_rows(rows)
    assert len({sum(not call["valid"] for call in row["tool_calls"]) for row in rows}) > 2
    for row in rows:
        invalid = sum(not call["valid"] for call in row["tool_calls"])
        assert row["reward_steps"] == {
            "weighted_sum": pytest.approx(row["reward_raw"]["lower_case"]),
            "tool_penalty": -0.25 * invalid,
        }
        assert row["reward"] == pytest.approx(row["reward_raw"]["lower_case"] - 0.25 * invalid)
    for group in by_group(rows).values():
        rewards = [row["reward"] for row in group]
        for row in group:
            assert row["centred"] == pytest.approx(row["reward"] - fmean(rewards))


def test_the_calls_of_a_completion_are_those_that_its_drawn_text_makes(tmp_path: Path) -> None:
    for row in called_rows(run_with_tools(tmp_path).go().table("rollouts")):
        for call in row["tool_calls"]:
            if call["valid"]:
                assert call["name"] in ("c", "cc", "ccc")
                assert call["result"] == 2 * call["argument"]
            else:
                assert call["result"].startswith("error: ")
        assert len(row["tool_calls"]) <= 3
        assert row["tools"] == '{"c": "2", "cc": "2", "ccc": "2"}'
