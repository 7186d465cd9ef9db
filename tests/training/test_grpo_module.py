"""Real rounds with a policy of random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import share_of_lower_case
from fixtures_rounds import LOWER_CASE, Run, gradient, watch

from grpo.maths import grpo_loss as maths
from grpo.records import Problem, RolloutKey, Score
from grpo.rewards import RewardComponent
from grpo.rollouts.policies import load_policy
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.training import round_update
from grpo.training.grpo_module import GRPOModule
from grpo.training.settings import AdvantageSettings, LossSettings, OptimizerSettings, RoundSettings
from grpo.training.strategies import NonFiniteGradient


def flat(_: Problem, completion: str) -> Score:
    return Score(1.0 if completion is not None else 0.0)


def fails_on_odd_lengths(_: Problem, completion: str) -> Score:
    if len(completion) % 2:
        raise RuntimeError("odd")
    return share_of_lower_case(_, completion)


def test_one_update_a_round_has_ratio_one_and_clips_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path).go()
    for row in run.metrics:
        assert (row["loss/ratio_mean"], row["loss/ratio_min"], row["loss/ratio_max"]) == (1.0, 1.0, 1.0)
        assert (row["loss/clip_fraction_low"], row["loss/clip_fraction_high"]) == (0.0, 0.0)
        # the sampler computed the same numbers in another way
        assert 0 < row["loss/mismatch_max"] < 1e-4
        assert row["loss/gradient_norm"] > 0
    assert run.metrics[0]["loss/kl"] == pytest.approx(0.0, abs=1e-9)
    assert run.metrics[1]["loss/kl"] > 1e-9
    assert run.trainer.global_step == 2


def test_without_kl_no_reference_is_loaded_and_no_kl_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, loss=LossSettings(kl_beta=0.0)).go()
    own = sum(p.numel() for p in load_policy(tmp_path / "policy").model.parameters())
    assert sum(p.numel() for p in run.module.parameters()) == own
    assert not any("kl" in name for row in run.metrics for name in row)
    assert all(row["reference_logprobs"] is None for row in run.table("updates"))
    with_reference = Run(tmp_path).go()
    assert sum(p.numel() for p in with_reference.module.parameters()) == 2 * own


def test_the_optimizer_has_the_policy_and_not_the_reference(tmp_path: Path) -> None:
    run = Run(tmp_path).go()
    [optimizer] = run.trainer.optimizers
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert run.module.reference is not None
    assert held == {id(weight) for weight in run.module.policy.parameters()}
    assert not held & {id(weight) for weight in run.module.reference.parameters()}


def test_the_reference_stays_what_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path).go()
    original = load_policy(tmp_path / "policy").model.state_dict()
    assert run.module.reference is not None
    kept = run.module.reference.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in original.items())
    moved = run.module.policy.state_dict()
    assert not all(torch.equal(moved[name], value) for name, value in original.items())


@pytest.mark.parametrize("reduction", ["response_mean", "token_mean", "group_mean", "constant"])
def test_the_size_of_micro_batches_does_not_matter(tmp_path: Path, reduction: Any) -> None:
    loss = LossSettings(reduction=reduction, constant_length=6)
    parts = [
        gradient(
            Run(
                tmp_path,
                fails,
                round=RoundSettings(group_size=4, max_failure_share=1.0),
                loss=loss,
                rounds=1,
                optimizer=OptimizerSettings(micro_batch_rows=rows),
            )
        )
        for rows in (4, 8, 100)
    ]
    assert parts[0].norm() > 1e-3
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], atol=1e-6, rtol=1e-4)


fails = {"odd": RewardComponent(fails_on_odd_lengths)}


def test_micro_batches_give_the_same_weights(tmp_path: Path) -> None:
    one, other = (
        Run(tmp_path, optimizer=OptimizerSettings(learning_rate=1e-3, micro_batch_rows=rows)).go().weights()
        for rows in (4, 100)
    )
    torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_members_without_a_score_take_no_part(tmp_path: Path) -> None:
    run = Run(tmp_path, fails, round=RoundSettings(group_size=4, max_failure_share=1.0), rounds=1).go()
    rollouts = {row["rollout_id"]: row for row in run.table("rollouts")}
    updates = run.table("updates")
    unscored = [row for row in updates if rollouts[row["rollout_id"]]["reward"] is None]
    assert 0 < len(unscored) < len(updates)
    for row in unscored:
        assert (row["advantage"], row["centred"], row["loss_tokens"]) == (None, None, 0)
        assert rollouts[row["rollout_id"]]["unscored_reason"].startswith("odd: RuntimeError: odd")
    assert run.metrics[0]["loss/tokens"] == sum(row["loss_tokens"] for row in updates)
    assert run.metrics[0]["loss/rows"] == sum(row["loss_tokens"] > 0 for row in updates)


def test_too_many_failures_stop_the_run_after_they_are_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path, fails, round=RoundSettings(group_size=4, max_failure_share=0.0))
    with pytest.raises(RuntimeError, match=r"component 'odd' failed on \d+, first with: RuntimeError: odd"):
        run.go()
    assert len(run.table("rollouts")) == 12


@pytest.mark.parametrize(("flat_groups", "in_update"), [("skip", 2), ("keep", 3)])
def test_flat_groups_are_in_the_denominators_only_where_they_are_kept(
    tmp_path: Path, flat_groups: Any, in_update: int
) -> None:
    run = Run(tmp_path, round=RoundSettings(group_size=4, flat_groups=flat_groups), rounds=1)
    [first] = [group.problem.id for group in _first_round(run)[:1]]
    rewards = {"r": RewardComponent(lambda p, text: Score(0.5) if p.id == first else share_of_lower_case(p, text))}
    whole = Run(tmp_path, rewards, round=run.module.round, rounds=1, loss=LossSettings(kl_beta=0.0))
    norm = float(gradient(whole).norm())
    assert whole.metrics[0]["loss/rows"] == 8  # without a KL term a flat group has no gradient, and is not run
    assert whole.metrics[0]["groups/in_update"] == in_update
    assert whole.metrics[0]["groups/mixed"] == pytest.approx(2 / 3)
    verdicts = {row["verdict"] for row in whole.table("updates")}
    assert verdicts == {"kept", "skipped_flat" if flat_groups == "skip" else "kept_flat"}
    # a kept flat group adds nothing to the sum and a third to what it is divided by
    if flat_groups == "keep":
        skipping = Run(tmp_path, rewards, round=RoundSettings(group_size=4), rounds=1, loss=LossSettings(kl_beta=0.0))
        assert norm == pytest.approx(float(gradient(skipping).norm()) * 2 / 3, rel=1e-4)


def _first_round(run: Run) -> Any:
    run.data.setup("fit")
    return run.data.train_rounds[0].groups


def test_a_round_of_flat_groups_makes_no_step(tmp_path: Path) -> None:
    run = Run(tmp_path, {"flat": RewardComponent(flat)}).go()
    assert run.trainer.global_step == 0
    assert torch.equal(
        run.weights(), torch.cat([p.flatten() for p in load_policy(tmp_path / "policy").model.parameters()])
    )
    assert len(run.metrics) == 2
    for row in run.metrics:
        assert row["groups/mixed"] == 0.0
        assert row["groups/in_update"] == 0
        assert not any(name.startswith("loss/") for name in row)
    assert {row["verdict"] for row in run.table("updates")} == {"skipped_flat"}
    assert {row["loss_tokens"] for row in run.table("updates")} == {0}


def _poison(update: int) -> Callable[..., Any]:
    calls = [0]

    def poisoned(*args: Any, **kwargs: Any) -> maths.LossOutput:
        calls[0] += 1
        output = maths.grpo_loss(*args, **kwargs)
        factor = float("nan") if calls[0] == update else 1.0
        return maths.LossOutput(output.loss * factor, output.metrics)

    return poisoned


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_update, "grpo_loss", _poison(update=3))
    run = Run(tmp_path, rounds=5)
    with pytest.raises(NonFiniteGradient, match=r"norm is nan at update 3: .*model\.optimizer\.learning_rate"):
        run.go()
    assert run.weights().isfinite().all()
    assert torch.equal(run.weights(), Run(tmp_path, rounds=2).go().weights())


@pytest.mark.parametrize("old_logprobs", ["recomputed", "recorded"])
def test_a_second_update_is_held_against_the_policy_that_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_logprobs: Any
) -> None:
    calls = watch(monkeypatch, round_update, "grpo_loss")
    loss = LossSettings(old_logprobs=old_logprobs)
    run = Run(tmp_path, round=RoundSettings(group_size=4, epochs=2), rounds=1, loss=loss).go()
    assert run.trainer.global_step == 2
    first, second = calls
    mask, old = first["mask"], first["old_logprobs"]
    assert torch.equal(second["old_logprobs"], old)
    recorded = sorted(value for row in run.table("rollouts") for value in row["old_logprobs"])
    if old_logprobs == "recorded":
        assert sorted(old[mask].tolist()) == recorded
        torch.testing.assert_close(first["policy_logprobs"][mask], old[mask], atol=1e-4, rtol=0)
    else:
        assert sorted(old[mask].tolist()) == pytest.approx(recorded, abs=1e-4)
        assert torch.equal(first["policy_logprobs"][mask], old[mask])
    assert (second["policy_logprobs"][mask] - old[mask]).abs().max() > 1e-3


def test_the_loss_counts_every_drawn_token_and_no_padding(tmp_path: Path) -> None:
    run = Run(tmp_path, round=RoundSettings(group_size=4, flat_groups="keep")).go()
    for number, metrics in enumerate(run.metrics):
        drawn = [row["completion_tokens"] for row in run.table("rollouts") if row["round"] == number]
        assert metrics["loss/tokens"] == sum(map(len, drawn))
        assert metrics["length/mean"] == pytest.approx(sum(map(len, drawn)) / len(drawn))
    assert len({len(row["completion_tokens"]) for row in run.table("rollouts")}) > 1


def test_the_record_is_complete_and_can_be_drawn_again(tmp_path: Path) -> None:
    run = Run(tmp_path, rounds=3).go()
    rollouts, updates = run.table("rollouts"), run.table("updates")
    assert len(rollouts) == len(updates) == 3 * 3 * 4
    assert len({row["rollout_id"] for row in rollouts}) == 36
    assert {row["rollout_id"] for row in rollouts} == {row["rollout_id"] for row in updates}
    for row in updates:
        tokens = next(r["completion_tokens"] for r in rollouts if r["rollout_id"] == row["rollout_id"])
        assert row["loss_tokens"] in (0, len(tokens))
        assert len(row["reference_logprobs"] or ()) == row["loss_tokens"]
    assert [row["policy_version"] for row in rollouts] == [0] * 12 + [1] * 12 + [2] * 12
    _draw_again(run, [row for row in rollouts if row["round"] == 0])


def _draw_again(run: Run, rows: list[dict[str, Any]]) -> None:
    """Each rollout from its key alone, under the weights that the run started from."""
    policy = load_policy(run.folder / "policy")
    groups = {(group.problem.id, group.occurrence): group for group in _first_round(run)}
    sampler = Sampler(policy.model, policy.tokenizer, policy.end_token_ids, run.module.sampling)
    for row in rows:
        key = RolloutKey(1, row["purpose"], row["round"], row["problem_id"], row["template_id"], row["occurrence"])
        [members] = sampler.sample([groups[row["problem_id"], row["occurrence"]]], [key], 4)
        again = members[row["member"]]
        assert again.key.rollout_id == row["rollout_id"]
        assert list(again.tokens) == row["completion_tokens"]
        assert again.logprobs == pytest.approx(row["old_logprobs"], abs=1e-5)


def test_validation_is_scored_apart_and_leaves_the_training_draws_alone(tmp_path: Path) -> None:
    with_validation = Run(tmp_path).go()
    last = with_validation.metrics[-1]
    assert 0 <= last["validation/reward/mean"] <= 1
    assert last["validation/length/mean"] <= 6
    recorded = with_validation.table("validation")
    assert len(recorded) == 2 * 2  # problems, and completions of each
    assert last["validation/reward/mean"] == pytest.approx(sum(row["reward"] for row in recorded) / 4)
    without = Run(tmp_path)
    without.data.validation_problems = 0
    without.go()
    assert not any(name.startswith("validation") for row in without.metrics for name in row)
    assert torch.equal(without.weights(), with_validation.weights())


def test_two_fits_from_one_seed_are_one_and_from_two_seeds_are_two(tmp_path: Path) -> None:
    first, second = Run(tmp_path).go().weights(), Run(tmp_path).go().weights()
    assert torch.equal(first, second)
    assert not torch.equal(first, Run(tmp_path, seed=2).go().weights())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoundSettings(group_size=1), r"round\.group_size is 1: .* at least 2"),
        (lambda: RoundSettings(epochs=0), r"round\.epochs is 0"),
        (lambda: RoundSettings(max_failure_share=1.5), r"round\.max_failure_share is 1\.5"),
        (lambda: RoundSettings(validation_samples=0), r"round\.validation_samples is 0"),
        (lambda: AdvantageSettings(std_correction=2), r"advantages\.std_correction is 2"),
        (lambda: AdvantageSettings(epsilon=0.0), r"advantages\.epsilon is 0\.0"),
        (lambda: LossSettings(kl_beta=-0.1), r"loss\.kl_beta is -0\.1"),
        (lambda: LossSettings(reduction="constant"), r"loss\.constant_length is None"),
        (lambda: LossSettings(clip_low=0.0), r"loss\.clip_low is 0\.0"),
        (lambda: LossSettings(dual_clip=1.0), r"loss\.dual_clip is 1\.0"),
        (lambda: OptimizerSettings(learning_rate=0.0), r"optimizer\.learning_rate is 0\.0"),
        (lambda: OptimizerSettings(learning_rate=float("inf")), r"optimizer\.learning_rate is inf"),
        (lambda: OptimizerSettings(learning_rate=1e30), r"optimizer\.learning_rate is 1e\+30"),
        (lambda: OptimizerSettings(learning_rate=float("nan")), r"optimizer\.learning_rate is nan"),
        (lambda: OptimizerSettings(end_factor=float("nan")), r"optimizer\.end_factor is nan"),
        (lambda: OptimizerSettings(betas=(0.9, 1.0)), r"optimizer\.betas are \[0\.9, 1\.0\]"),
        (lambda: OptimizerSettings(betas=(float("nan"), 0.9)), r"optimizer\.betas are \[nan, 0\.9\]"),
        (lambda: OptimizerSettings(weight_decay=float("inf")), r"optimizer\.weight_decay is inf"),
        (lambda: OptimizerSettings(weight_decay=-0.1), r"optimizer\.weight_decay is -0\.1"),
        (lambda: OptimizerSettings(max_gradient_norm=float("nan")), r"optimizer\.max_gradient_norm is nan"),
        (lambda: OptimizerSettings(max_gradient_norm=-1.0), r"optimizer\.max_gradient_norm is -1\.0"),
        (lambda: OptimizerSettings(micro_batch_rows=0), r"optimizer\.micro_batch_rows is 0"),
        (lambda: OptimizerSettings(micro_batch_tokens=0), r"optimizer\.micro_batch_tokens is 0: .* null"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_gradient_of_any_length_passes_where_the_clip_is_off(tmp_path: Path) -> None:
    settings = [OptimizerSettings(learning_rate=1e-3, max_gradient_norm=norm) for norm in (float("inf"), 1e9)]
    one, other = (Run(tmp_path, optimizer=each).go().weights() for each in settings)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": SamplingSettings(temperature=0.0)}, r"sampling\.temperature is 0: .* positive temperature"),
        ({"sampling": SamplingSettings(max_rows=4)}, r"sampling\.max_rows is 4, less than round\.group_size = 8"),
        ({"rewards": {}}, "rewards is empty"),
        ({"round": RoundSettings(at_limit="fail")}, r"round\.at_limit is fail, which has an effect only where"),
        ({"round": RoundSettings(max_draws=9)}, r"round\.max_draws is 9, which has an effect only where"),
        ({"loss": LossSettings(kl_on_flat_groups=False)}, r"loss\.kl_on_flat_groups is False, .* flat groups are kept"),
        (
            {"loss": LossSettings(mismatch_cap=2.0, old_logprobs="recorded")},
            r"loss\.mismatch_cap is 2\.0, .* loss\.old_logprobs is recomputed",
        ),
        (
            {"advantages": AdvantageSettings(baseline="none"), "round": RoundSettings(flat_groups="keep")},
            r"advantages\.scale is group_std with advantages\.baseline none: .* none or batch_std",
        ),
    ],
)
def test_what_cannot_train_is_refused_before_a_model_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOModule(Path("no/such/policy"), **({"rewards": LOWER_CASE} | settings))
