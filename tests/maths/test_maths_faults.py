"""Faults that users of GRPO trainers have reported, as far as the mathematics can commit them.

Those numbers are the reporters' own, so many use the sample std with epsilon 1e-4. Clipping, KL and
token means have their reported cases in ``test_grpo_loss.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo.maths.group_advantages import centred_rewards, group_advantages, group_std, tied_groups
from grpo.maths.grpo_loss import Ratio, Reduction, grpo_loss, mean_metrics, token_weights

NAN = math.nan


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(actual: Tensor, expected: list[list[float]], tolerance: float) -> None:
    torch.testing.assert_close(actual, table(expected), rtol=0, atol=tolerance)


def test_std_of_the_batch_hides_that_no_group_has_a_signal() -> None:
    rewards = table([[5, 5], [-5, -5]])
    assert group_advantages(rewards).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert tied_groups(rewards).double().mean().item() == 1.0
    assert group_std(rewards, std_correction=1).tolist() == [0.0, 0.0]
    assert group_std(rewards.reshape(1, -1), std_correction=1).item() == pytest.approx(5.77, abs=5e-3)


def test_rewards_of_one_and_zero_give_no_loss_at_first_but_a_gradient() -> None:
    advantages = group_advantages(table([[1, 0]]), std_correction=1, epsilon=1e-4).flatten()
    policy = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    output = grpo_loss(policy, policy.detach(), advantages, torch.ones(2, 2))
    (gradient,) = torch.autograd.grad(output.loss, policy)
    assert abs(output.loss.item()) < 1e-6
    assert gradient.norm() > 0.1


def test_mean_and_std_are_taken_within_the_group() -> None:
    advantages = group_advantages(table([[1, 0], [0, 0]]), std_correction=1, epsilon=1e-4)
    close(advantages, [[0.7070, -0.7070], [0.0, 0.0]], 5e-5)


def test_a_group_of_one_is_refused_instead_of_learning_nothing() -> None:
    with pytest.raises(ValueError, match="group size 1"):
        group_advantages(table([[1.0], [0.0]]))


def test_equal_rewards_that_are_not_extreme_are_flat_too() -> None:
    assert tied_groups(table([[0.4] * 4, [0.0] * 4, [0.4, 0.4, 0.4, 0.5]])).tolist() == [True, True, False]


def test_share_of_flat_groups_is_a_share_of_groups() -> None:
    assert tied_groups(table([[1, 1], [1, 0]])).double().mean().item() == 0.5
    assert (~tied_groups(table([[1, 1], [1, 0], [0, 0], [0, 1]]))).double().mean().item() == 0.5


@pytest.mark.parametrize(("size", "expected"), [(2, 0.7024), (8, 0.2007)])
def test_small_groups_are_mostly_flat_when_few_answers_are_right(size: int, expected: float) -> None:
    # every outcome of a group, weighted by its probability at a pass rate of 0.1819
    outcomes = table([[float(bits >> i & 1) for i in range(size)] for bits in range(2**size)])
    solved = outcomes.sum(dim=1)
    probability = 0.1819**solved * (1 - 0.1819) ** (size - solved)
    assert probability[tied_groups(outcomes)].sum().item() == pytest.approx(expected, abs=5e-5)


def test_division_by_the_std_can_be_switched_off() -> None:
    assert group_advantages(table([[1, 0, 0, 0]]), scale="none").tolist() == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize(("correction", "winner", "loser"), [(1, 1.4997, -0.4999), (0, 1.731651, -0.577217)])
def test_sample_and_population_std_are_told_apart(correction: int, winner: float, loser: float) -> None:
    advantages = group_advantages(table([[1, 0, 0, 0]]), std_correction=correction, epsilon=1e-4)
    close(advantages, [[winner, loser, loser, loser]], 5e-5 if correction else 5e-7)


def test_components_that_cancel_in_the_sum_teach_nothing() -> None:
    total = table([[1, 0]]) + table([[0, 1]])
    assert group_advantages(total).tolist() == [[0.0, 0.0]]


def test_a_failed_checker_is_no_reward_of_zero() -> None:
    scored = torch.tensor([[True, True, True, False]])
    from_three = group_advantages(table([[1, 0, 0]]))
    from_four = group_advantages(table([[1, 0, 0, NAN]]), scored=scored)
    close(from_four, [[*from_three[0].tolist(), 0.0]], 1e-15)
    assert centred_rewards(table([[1, 0, 0, NAN]]), scored=scored)[0, 0].item() == pytest.approx(2 / 3, abs=1e-15)


def test_a_batch_larger_than_the_group_gives_each_group_the_same_advantages() -> None:
    two, one = group_advantages(table([[1, 0, 0], [1, 1, 0]])), group_advantages(table([[1, 0, 0]]))
    assert two.isfinite().all()
    assert two[:1].tolist() == one.tolist()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("reduction", ["response_mean", "token_mean", "group_mean", "constant"])
def test_no_loss_kind_forgets_the_divisor_of_accumulation(reduction: Reduction, ratio: Ratio) -> None:
    torch.manual_seed(0)
    old, advantages = torch.randn(4, 6), torch.tensor([1.0, -1.0, 0.5, -0.5])
    mask = torch.arange(6) < torch.tensor([[6], [1], [3], [2]])
    weights = token_weights(mask, reduction=reduction, group_ids=torch.tensor([0, 0, 1, 1]), constant_length=6)

    def weights_after_a_step(micro_batches: int) -> Tensor:
        policy = (old + 0.05 * torch.arange(6.0)).requires_grad_()
        optimizer = torch.optim.SGD([policy], lr=1.0)
        for rows in torch.arange(4).chunk(micro_batches):
            inputs = (policy[rows], old[rows], advantages[rows], mask[rows])
            output = grpo_loss(*inputs, ratio=ratio, token_weights=weights[rows])
            torch.autograd.backward(output.loss)
        optimizer.step()
        return policy.detach()

    torch.testing.assert_close(weights_after_a_step(4), weights_after_a_step(1), rtol=0, atol=1e-7)
    assert (weights_after_a_step(1) - old - 0.05 * torch.arange(6.0)).abs().max() > 0.01


def test_one_and_two_processes_give_one_gradient() -> None:
    """Each process backs its rows times the process count, and the gradients are averaged, as DDP does."""
    torch.manual_seed(0)
    features, rewards = torch.randn(4, 5, 3), table([[1, 0], [0, 1]])
    advantages, mask = group_advantages(rewards).flatten(), torch.arange(5) < torch.tensor([[5], [2], [1], [4]])
    weights = token_weights(mask)

    def gradient(rows: slice, processes: int) -> Tensor:
        model = torch.ones(3, requires_grad=True)
        policy = -(features[rows] @ model).square()
        output = grpo_loss(policy, policy.detach(), advantages[rows], mask[rows], token_weights=weights[rows])
        return torch.autograd.grad(output.loss * processes, model)[0]

    averaged = (gradient(slice(0, 2), 2) + gradient(slice(2, 4), 2)) / 2
    whole = gradient(slice(0, 4), 1)
    torch.testing.assert_close(averaged, whole, rtol=0, atol=1e-6)
    assert whole.abs().max() > 0.01


def test_one_pass_over_fresh_rollouts_has_ratio_one_and_no_clipping() -> None:
    torch.manual_seed(0)
    policy = torch.randn(4, 6)
    metrics = mean_metrics([grpo_loss(policy, policy, torch.randn(4), torch.ones(4, 6), clip_low=1e-6)])
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (1.0, 1.0)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.0, 0.0)


def test_kl_only_ever_adds_to_the_loss() -> None:
    torch.manual_seed(0)
    policy, reference, advantages = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4)
    mask = torch.ones(4, 6)
    without = grpo_loss(policy, policy, advantages, mask, reference_logprobs=reference)
    charged = grpo_loss(policy, policy, advantages, mask, reference_logprobs=reference, kl_beta=0.1)
    assert charged.loss > without.loss


def test_without_kl_there_is_no_kl_metric_and_no_nan() -> None:
    zero = torch.zeros(2, 3)
    metrics = mean_metrics([grpo_loss(zero, zero, zero[:, 0], torch.ones(2, 3))])
    assert "kl" not in metrics
    assert not any(math.isnan(value) for value in metrics.values())
