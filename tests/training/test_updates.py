"""What reaches the optimiser, held against the equations and the record of the round it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import lightning as L
import pytest
import torch
from fixtures_policy import TEMPLATE, TOKENIZER, fit, policy_folder, share_of_lower_case, train_config, write_config
from fixtures_rounds import (
    Call,
    Row,
    Run,
    by_group,
    gradient,
    plain_gradient,
    plain_logprobs,
    read_table,
    relative_difference,
    watch,
)
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from grpo import train
from grpo.maths import grpo_loss as maths
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rollouts.policies import LoadedPolicy, load_policy, save_policy
from grpo.rollouts.sampling import SamplingSettings
from grpo.run_identity import weights_digest
from grpo.training import grpo_module, round_update
from grpo.training.checkpoints import newest_checkpoint
from grpo.training.grpo_module import GRPOModule
from grpo.training.round_update import RoundUpdate
from grpo.training.settings import LossSettings, OptimizerSettings, RoundSettings

KEEP = RoundSettings(group_size=4, flat_groups="keep")
NO_KL = LossSettings(kl_beta=0.0)


def first_groups(run: Run) -> list[str]:
    """The problems of the first round."""
    run.data.setup("fit")
    return [group.problem.id for group in run.data.train_rounds[0].groups]


def double_policy(folder: Path) -> PreTrainedModel:
    return load_policy(folder / "policy").model.double()


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies and references in float64."""
    real = load_policy

    def doubled(folder: Path) -> LoadedPolicy:
        loaded = real(folder)
        return replace(loaded, model=loaded.model.double())

    monkeypatch.setattr(grpo_module, "load_policy", doubled)


# Epochs and minibatches


def passes(backward: list[Call], losses: list[Call], field: str) -> dict[str, list[Any]]:
    """What each rollout's loss was called with, one entry a pass over it."""
    seen: dict[str, list[Any]] = {}
    for call, loss in zip(backward, losses, strict=True):
        micro = call["micro"]
        for name, row, mask in zip(micro.rollout_ids, loss[field], micro.batch.mask, strict=True):
            value = row.item() if row.ndim == 0 else row.detach()[mask].tolist()
            seen.setdefault(name, []).append(value)
    return seen


def advantages_by_hand(rows: list[Row]) -> dict[str, float]:
    expected = {}
    for group in by_group(rows).values():
        rewards = [row["reward"] for row in group]
        for row in group:
            expected[row["rollout_id"]] = (row["reward"] - fmean(rewards)) / (pstdev(rewards) + 1e-8)
    return expected


@pytest.mark.parametrize("old_logprobs", ["recomputed", "recorded"])
@pytest.mark.parametrize("split", ["groups", "rows"])
def test_every_pass_and_part_of_a_round_has_its_groups_advantages_and_the_sampling_policys_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: Any, old_logprobs: Any
) -> None:
    backward, losses = watch(monkeypatch, RoundUpdate, "_backward"), watch(monkeypatch, round_update, "grpo_loss")
    scored = watch(monkeypatch, RoundUpdate, "_logprobs_of")
    steps = replace(KEEP, epochs=2, minibatches=2, minibatch_split=split)
    run = Run(tmp_path, round=steps, rounds=1, groups=4, loss=LossSettings(old_logprobs=old_logprobs)).go()
    assert run.trainer.global_step == run.metrics[0]["loss/updates"] == 4
    assert run.module.ledger["updates"] == 4
    rows = run.joined()

    advantages = passes(backward, losses, "advantages")
    for name, expected in advantages_by_hand(rows).items():
        assert advantages[name] == pytest.approx([expected] * 2)  # in both passes: a minibatch is no new group
    assert advantages.keys() == {row["rollout_id"] for row in rows}

    old = passes(backward, losses, "old_logprobs")
    for row in rows:
        first, second = old[row["rollout_id"]]
        assert first == second
        assert first == pytest.approx(row["old_logprobs"], abs=1e-4 if old_logprobs == "recomputed" else 0)
        # The record holds what stood under the ratio, to the last bit.
        assert row["recomputed_old_logprobs"] == (first if old_logprobs == "recomputed" else None)
    by_policy = [call for call in scored if call["model"] is run.module.policy]
    assert len(by_policy) == (old_logprobs == "recomputed")
    for call in by_policy:
        assert {name: list(values) for name, values in call.result.items()} == {n: v[0] for n, v in old.items()}

    new = passes(backward, losses, "policy_logprobs")
    moved = [max(abs(a - b) for a, b in zip(new[name][1], old[name][1], strict=True)) for name in old]
    assert min(moved) > 1e-5  # the second pass runs at other weights, for every rollout


@pytest.mark.parametrize("split", ["groups", "rows"])
def test_only_a_split_by_rows_cuts_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: Any) -> None:
    parts = watch(monkeypatch, round_update, "split_minibatches")
    run = Run(tmp_path, round=replace(KEEP, epochs=2, minibatches=2, minibatch_split=split), rounds=1, groups=4).go()
    assert len(parts) == 2
    assert len({call["key"] for call in parts}) == 2
    for call in parts:
        assert [len(part) for part in call.result] == [8, 8]
        names = [row.rollout_id for part in call.result for row in part]
        assert sorted(names) == sorted(row["rollout_id"] for row in run.table("rollouts"))
        cut = {row.group for row in call.result[0]} & {row.group for row in call.result[1]}
        assert bool(cut) is (split == "rows")


@pytest.mark.parametrize(
    ("old_logprobs", "minibatches", "bound"), [("recomputed", 1, 0.0), ("recomputed", 2, 1e-5), ("recorded", 1, 1e-5)]
)
def test_the_first_step_of_a_round_has_ratio_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_logprobs: Any, minibatches: int, bound: float
) -> None:
    losses = watch(monkeypatch, round_update, "grpo_loss")
    run = Run(tmp_path, round=replace(KEEP, minibatches=minibatches), loss=LossSettings(old_logprobs=old_logprobs))
    run.go()
    assert len(losses) == 2 * minibatches
    for first in losses[::minibatches]:
        [row] = [maths.mean_metrics([first.result])]
        assert abs(row["ratio_min"] - 1) <= bound
        assert abs(row["ratio_max"] - 1) <= bound
        assert (row["clip_fraction_low"], row["clip_fraction_high"]) == (0.0, 0.0)


# Micro-batches


def unscored_where_odd(problem: Problem, completion: str) -> Score:
    return Score.unscorable("odd") if len(completion) % 2 else share_of_lower_case(problem, completion)


def gradients_of_micro_batches(folder: Path, reduction: Any, *cut: int) -> list[Tensor]:
    """Of whole groups in one, two and four micro-batches, then with groups cut into parts of so many rows."""
    found = []
    for rows, expected in ((16, 1), (8, 2), (4, 4), *((rows, None) for rows in cut)):
        run = Run(
            folder,
            {"odd": RewardComponent(unscored_where_odd)},
            round=replace(KEEP, max_failure_share=1.0),
            loss=LossSettings(reduction=reduction, constant_length=6, entropy_bonus=0.01),
            optimizer=OptimizerSettings(micro_batch_rows=rows),
            rounds=1,
            groups=4,
        )
        with pytest.MonkeyPatch.context() as patch:
            micro_batches = watch(patch, RoundUpdate, "_backward")
            found.append(gradient(run))
        assert len(micro_batches) == (expected or sum(len(call["micro"].rollout_ids) for call in micro_batches))
    assert found[0].norm() > 1e-3
    return found


@pytest.mark.parametrize("reduction", ["response_mean", "token_mean", "group_mean", "constant"])
def test_one_two_and_four_micro_batches_have_the_same_gradient(tmp_path: Path, reduction: Any) -> None:
    whole, *others = gradients_of_micro_batches(tmp_path, reduction, 1)
    for other in others:
        assert relative_difference(other, whole) <= 1e-5


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("reduction", ["response_mean", "token_mean", "group_mean", "constant"])
def test_in_double_precision_they_agree_to_ten_digits(tmp_path: Path, reduction: Any) -> None:
    whole, *others = gradients_of_micro_batches(tmp_path, reduction)
    assert whole.dtype == torch.float64
    for other in others:
        assert relative_difference(other, whole) <= 1e-10


CUTS: dict[str, dict[str, Any]] = {
    "one row": {"micro_batch_rows": 1},
    "tokens": {"micro_batch_rows": None, "micro_batch_tokens": 60},
    "apart": {"shared_prompt": False},
    "checkpointed": {"gradient_checkpointing": True},
    "all": {"micro_batch_tokens": 30, "shared_prompt": False, "gradient_checkpointing": True},
}


def gradient_of_a_cut(folder: Path, cut: dict[str, Any]) -> Tensor:
    loss = LossSettings(entropy_bonus=0.01)
    run = Run(folder, round=KEEP, loss=loss, optimizer=OptimizerSettings(**cut), rounds=1, groups=4)
    return gradient(run, ShiftedReference())


@pytest.mark.parametrize("cut", CUTS)
def test_memory_settings_leave_rollouts_and_gradient_as_they_are(tmp_path: Path, cut: str) -> None:
    whole = gradient_of_a_cut(tmp_path, {})
    rollouts = Run(tmp_path, rounds=1).table("rollouts")
    assert relative_difference(gradient_of_a_cut(tmp_path, CUTS[cut]), whole) <= 1e-5
    assert Run(tmp_path, rounds=1).table("rollouts") == rollouts


def a_layer_norm_policy(folder: Path) -> None:
    """A GPT-2: its norms are in float64 where its weights are, and those of a Llama never."""
    config = GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1, eos_token_id=0
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    save_policy(folder / "policy", LoadedPolicy(model, TOKENIZER, TEMPLATE, (0,)), {"made": "for tests"})


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("cut", CUTS)
def test_in_double_precision_memory_settings_agree_to_ten_digits(tmp_path: Path, cut: str) -> None:
    a_layer_norm_policy(tmp_path)
    whole = gradient_of_a_cut(tmp_path, {})
    assert whole.dtype == torch.float64
    assert relative_difference(gradient_of_a_cut(tmp_path, CUTS[cut]), whole) <= 1e-10


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_an_update_in_bfloat16_has_logprobs_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    losses = watch(monkeypatch, round_update, "grpo_loss")
    run = Run(tmp_path, round=KEEP, rounds=2)
    run.trainer = fit(run.module, run.data, run.folder, precision=precision)
    assert run.trainer.global_step == 2
    for call in losses:
        assert call["policy_logprobs"].dtype == torch.float32
        values = call["policy_logprobs"].detach()[call["mask"]]
        assert not torch.equal(values, values.bfloat16().float())
    assert run.weights().dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert run.weights().isfinite().all()
    assert 0 < run.metrics[0]["loss/gradient_norm"] < 100


# The gradient, from the record alone


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_a_round_follows_from_its_record(tmp_path: Path, temperature: float) -> None:
    sampling = SamplingSettings(temperature=temperature, max_new_tokens=6)
    run = Run(tmp_path, sampling=sampling, round=KEEP, loss=NO_KL, rounds=1)
    found = gradient(run)
    expected = plain_gradient(double_policy(tmp_path), run.joined(), temperature)
    assert relative_difference(found, expected) < 1e-5


@pytest.mark.usefixtures("in_double")
def test_an_entropy_bonus_adds_its_own_gradient_and_nothing_else(tmp_path: Path) -> None:
    sampling = SamplingSettings(temperature=0.7, max_new_tokens=6)
    made = []
    for bonus in (0.0, 0.25):
        loss = LossSettings(kl_beta=0.0, entropy_bonus=bonus)
        made.append(gradient(Run(tmp_path, sampling=sampling, round=KEEP, loss=loss, rounds=1)))
    run = Run(tmp_path, sampling=sampling, round=KEEP, loss=NO_KL, rounds=1).go()
    policy, rows = double_policy(tmp_path), run.joined()
    mean_entropy = [plain_logprobs(policy, row, 0.7)[1].mean() / len(rows) for row in rows]
    wanted = torch.autograd.grad(-0.25 * sum(mean_entropy, torch.zeros(())), list(policy.parameters()))
    assert relative_difference(made[1] - made[0], torch.cat([part.flatten() for part in wanted])) < 1e-5
    assert float(torch.cat([part.flatten() for part in wanted]).norm()) > 1e-2
    tokens = [value for row in rows for value in plain_logprobs(policy, row, 0.7)[1].tolist()]
    assert run.metrics[0]["loss/entropy"] == pytest.approx(fmean(tokens), rel=1e-5)


def test_an_entropy_that_is_only_measured_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = gradient(Run(tmp_path, round=KEEP, rounds=1))
    real = maths.grpo_loss
    monkeypatch.setattr(round_update, "grpo_loss", lambda *args, **kwargs: real(*args, **kwargs | {"entropy": None}))
    assert torch.equal(gradient(Run(tmp_path, round=KEEP, rounds=1)), measured)


@pytest.mark.parametrize("cap", [None, 0.75])
def test_where_a_cut_changed_what_was_sampled_the_correction_is_the_capped_mass_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: float | None
) -> None:
    policy_folder(tmp_path / "policy", spread=0.5)
    backward, losses = watch(monkeypatch, RoundUpdate, "_backward"), watch(monkeypatch, round_update, "grpo_loss")
    loss = LossSettings(kl_beta=0.0, mismatch_cap=cap, old_logprobs="recorded")
    sampling = SamplingSettings(max_new_tokens=6, top_p=0.7)
    run = Run(tmp_path, sampling=sampling, round=KEEP, loss=loss, rounds=1)
    found = gradient(run)
    rows = run.joined()

    reached = passes(backward, losses, "sampling_logprobs")
    taught = [row for row in rows if row["advantage"] != 0]  # without a KL term the others have no gradient
    assert reached == {row["rollout_id"]: [row["sampling_logprobs"]] for row in taught}
    full, cut = ({r["rollout_id"]: torch.tensor(r[f"{name}_logprobs"]) for r in rows} for name in ("old", "sampling"))
    kept = {name: (full[name] - cut[name]).exp() for name in full}
    mass = torch.cat([kept[row["rollout_id"]] for row in taught])
    assert (mass >= 0.7 - 1e-5).all()  # the smallest set that holds so much
    assert (mass <= 1 + 1e-5).all()
    model = double_policy(tmp_path)
    if cap is None:
        assert relative_difference(found, plain_gradient(model, rows)) < 1e-5
        assert "loss/mismatch_capped_fraction" not in run.metrics[0]
    else:
        factors = {name: values.clamp(max=cap) for name, values in kept.items()}
        assert relative_difference(found, plain_gradient(model, rows, factor=lambda r: factors[r["rollout_id"]])) < 1e-5
        capped = float((mass > cap).float().mean())
        assert 0.1 < capped < 0.9
        assert run.metrics[0]["loss/mismatch_capped_fraction"] == pytest.approx(capped)
    assert run.metrics[0]["loss/mismatch"] == pytest.approx(float(-mass.log().mean()), rel=1e-4)


def test_truncated_rows_leave_the_loss_and_its_denominators_and_stay_in_the_baseline(tmp_path: Path) -> None:
    policy_folder(tmp_path / "policy", spread=0.5)
    found = []
    for masked in (False, True):
        loss = LossSettings(kl_beta=0.0, mask_truncated=masked)
        sampling = SamplingSettings(max_new_tokens=16)
        run = Run(tmp_path, sampling=sampling, round=RoundSettings(group_size=8), loss=loss, rounds=1)
        found.append(gradient(run))
    rows = run.joined()
    groups = by_group(rows)
    mixed = [row for group in groups.values() if len({r["reward"] for r in group}) > 1 for row in group]
    whole = [row for row in mixed if row["finish_reason"] == "end_token"]
    assert 0 < len(whole) < len(mixed)
    for row in rows:
        counted = row in whole
        assert row["loss_tokens"] == (len(row["completion_tokens"]) if counted else 0)
        assert row["advantage"] == pytest.approx(advantages_by_hand(rows)[row["rollout_id"]])
    assert run.metrics[0]["loss/rows"] == len(whole)
    assert run.metrics[0]["loss/tokens"] == sum(len(row["completion_tokens"]) for row in whole)
    model = double_policy(tmp_path)
    assert relative_difference(found[0], plain_gradient(model, mixed)) < 1e-5
    assert relative_difference(found[1], plain_gradient(model, whole)) < 1e-5
    assert relative_difference(found[1], found[0]) > 0.01


# The reference


class ShiftedReference(L.Callback):
    """Makes the reference another policy, so that the KL term pulls from the first update on."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        assert pl_module.reference is not None
        for parameter in pl_module.reference.parameters():
            parameter.mul_(1.5)


@pytest.mark.parametrize("feels", [True, False])
def test_flat_groups_that_are_kept_feel_the_kl_term_only_where_that_is_declared(tmp_path: Path, feels: bool) -> None:
    one_value = {"flat": RewardComponent(lambda _problem, _text: Score(0.5))}
    loss = LossSettings(kl_on_flat_groups=feels)
    run = Run(tmp_path, one_value, round=KEEP, loss=loss, rounds=1).go(ShiftedReference())
    before = torch.cat([p.flatten() for p in load_policy(tmp_path / "policy").model.parameters()])
    assert run.trainer.global_step == feels  # a step without a gradient would be momentum alone
    assert torch.equal(run.weights(), before) is not feels
    assert ("loss/kl" in run.metrics[0]) is feels
    assert run.metrics[0].get("loss/rows") == (12 if feels else None)
    assert sum(row["loss_tokens"] > 0 for row in run.joined()) == 12  # they are in the denominators


def test_flat_groups_left_out_of_the_kl_term_stay_in_the_denominators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat_one = first_groups(Run(tmp_path, rounds=1))[0]

    def check(problem: Problem, completion: str) -> Score:
        return Score(0.5) if problem.id == flat_one else share_of_lower_case(problem, completion)

    calls = {}
    for feels in (True, False):
        with monkeypatch.context() as patch:
            calls[feels] = watch(patch, round_update, "grpo_loss")
            loss = LossSettings(kl_on_flat_groups=feels)
            run = Run(tmp_path, {"r": RewardComponent(check)}, round=KEEP, loss=loss, rounds=1).go(ShiftedReference())
    [left_out], [let_in] = calls[False], calls[True]
    # The flat group has no gradient and goes through no model; the others weigh what they weighed beside it.
    assert (let_in["advantages"] == 0).sum() == 4
    assert len(let_in["advantages"]) == 12
    assert not (left_out["advantages"] == 0).any()
    assert len(left_out["advantages"]) == 8
    for call in (left_out, let_in):
        assert torch.equal(call["kl_mask"], call["mask"])
        assert float(call["token_weights"].sum()) == pytest.approx(len(call["advantages"]) / 12)
    # k3 by hand, over the groups that feel it
    d = (left_out["reference_logprobs"] - left_out["policy_logprobs"].detach())[left_out["kl_mask"]].double()
    assert run.metrics[0]["loss/kl"] == pytest.approx(float((d.exp() - d - 1).mean()), rel=1e-5)
    verdicts = {row["verdict"] for row in run.joined() if row["problem_id"] == flat_one}
    assert verdicts == {"kept_flat"}


def test_without_a_kl_term_the_policy_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = watch(monkeypatch, grpo_module, "load_policy")
    assert Run(tmp_path, loss=NO_KL).go().module.reference is None
    assert len(loads) == 1
    assert Run(tmp_path).go().module.reference is not None
    assert len(loads) == 3


class WeightsAtStarts(L.Callback):
    """The policy as it is at the start of every round, before anything of the round happened."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append({name: value.clone() for name, value in pl_module.policy.state_dict().items()})


def test_a_reference_is_refreshed_from_the_policy_after_every_so_many_rounds(tmp_path: Path) -> None:
    starts = WeightsAtStarts()
    loss = LossSettings(reference_refresh_rounds=2)
    run = Run(tmp_path, round=replace(KEEP, epochs=2), loss=loss, rounds=5).go(starts)
    versions = [{row["reference_version"] for row in run.joined(number)} for number in range(5)]
    assert versions == [{0}, {0}, {4}, {4}, {8}]  # two updates a round
    assert run.module.reference is not None
    assert run.module.reference_version == 8
    kept = run.module.reference.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in starts.weights[4].items())
    assert not any(p.requires_grad for p in run.module.reference.parameters())
    assert not all(torch.equal(value, starts.weights[2][name]) for name, value in starts.weights[4].items())
    # what the record holds is what those weights say
    model = load_policy(tmp_path / "policy").model
    for number, since in ((1, 0), (3, 2)):
        model.load_state_dict(starts.weights[since])
        for row in run.joined(number):
            with torch.no_grad():
                expected = plain_logprobs(model, row)[0]
            assert row["reference_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_reference_is_the_policy_in_the_round_of_its_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = watch(monkeypatch, round_update, "grpo_loss")
    Run(tmp_path, round=KEEP, loss=LossSettings(reference_refresh_rounds=2), rounds=5).go()
    alike = [
        float((call["reference_logprobs"] - call["old_logprobs"])[call["mask"]].abs().max()) < 1e-5 for call in losses
    ]
    assert alike == [True, False, True, False, True]


# A refreshed reference goes on with its run


class Killed(BaseException):
    """As abrupt as a signal."""


def refreshing_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = train_config(folder) | {"checkpoint_every_n_updates": 3}
    config["model"] |= {"loss": {"reference_refresh_rounds": 2, "kl_beta": 1.0}}
    config["model"]["round"] |= {"flat_groups": "keep"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        train.main(["--config", write_config(folder / "train.yaml", config)])
    return folder / "output"


@pytest.fixture
def killed_in_round_three(tmp_path: Path) -> Iterator[Path]:
    real: Callable[..., Any] = RoundUpdate.run

    def dying(self: RoundUpdate, *args: Any) -> Any:
        if self.module.trainer.fit_loop.epoch_loop.batch_idx == 3:
            raise Killed
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundUpdate, "run", dying)
        with pytest.raises(Killed):
            refreshing_run(tmp_path / "killed")
    return tmp_path / "killed"


def test_a_run_that_was_killed_behind_a_refresh_ends_as_the_straight_one(
    tmp_path: Path, killed_in_round_three: Path
) -> None:
    [run_folder] = (killed_in_round_three / "runs").iterdir()
    checkpoint = newest_checkpoint(run_folder)
    assert checkpoint is not None
    assert checkpoint.name == "update-3.ckpt"
    state = torch.load(checkpoint, weights_only=False)
    assert state["reference_version"] == 2
    names = {name.partition(".")[0] for name in state["state_dict"]}
    assert names == {"policy", "reference"}
    straight, resumed = refreshing_run(tmp_path / "straight"), refreshing_run(killed_in_round_three)
    assert weights_digest(resumed / "policy") == weights_digest(straight / "policy")
    tables = [read_table(output / "record", "updates") for output in (straight, resumed)]
    assert tables[0] == tables[1]
    versions = [{row["reference_version"] for row in tables[1] if row["round"] == number} for number in range(6)]
    assert versions == [{0}, {0}, {2}, {2}, {4}, {4}]


@pytest.mark.parametrize(
    ("round_settings", "loss", "passes_of_the_policy", "passes_of_the_reference"),
    [
        # one update: its own pass gives the old log-probabilities, so there is none to score them
        ({}, {}, 3, 3),
        ({}, {"kl_beta": 0.0}, 3, 0),
        ({"epochs": 2}, {}, 6, 3),
        # several updates a pass: scored once before the first
        ({"minibatches": 3}, {}, 3 + 3, 3),
        ({"minibatches": 3}, {"old_logprobs": "recorded"}, 3, 3),
    ],
)
def test_no_pass_is_made_that_nothing_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    round_settings: dict[str, Any],
    loss: dict[str, Any],
    passes_of_the_policy: int,
    passes_of_the_reference: int,
) -> None:
    """Three groups of four, a micro-batch each."""
    calls = watch(monkeypatch, round_update, "completion_logprobs")
    run = Run(
        tmp_path,
        round=RoundSettings(group_size=4, flat_groups="keep", **round_settings),
        loss=LossSettings(**loss),
        optimizer=OptimizerSettings(micro_batch_rows=4),
        rounds=1,
    ).go()
    models = [call["model"] for call in calls]
    assert sum(model is run.module.policy for model in models) == passes_of_the_policy
    assert sum(model is run.module.reference for model in models) == passes_of_the_reference
    assert len(models) == passes_of_the_policy + passes_of_the_reference


@pytest.mark.parametrize("old", ["recorded", "recomputed"])
def test_what_enters_the_loss_beside_the_policy_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: Any
) -> None:
    """Neither of inference mode, in which validations run, nor with a gradient."""
    losses = watch(monkeypatch, round_update, "grpo_loss")
    run = Run(tmp_path, loss=LossSettings(old_logprobs=old)).go()
    assert losses
    for call in losses:
        for name in ("reference_logprobs", "advantages", "token_weights"):
            assert not call[name].is_inference(), name
            assert not call[name].requires_grad, name
        assert not call["old_logprobs"].is_inference()
        assert not call["old_logprobs"].requires_grad
    assert not any(weight.is_inference() for weight in run.module.policy.parameters())
