"""The loss against numbers worked out by hand, and the laws it obeys."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo.maths.grpo_loss import (
    LOG_RATIO_BOUND,
    LossOutput,
    Reduction,
    grpo_loss,
    mean_metrics,
    token_weights,
)

REDUCTIONS: tuple[Reduction, ...] = ("response_mean", "token_mean", "group_mean", "constant")
NAN, INF = math.nan, math.inf


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_token(ratio: float, advantage: float, **options: Any) -> LossOutput:
    """The loss of a single token whose ratio is given; ``.loss`` then is that token's term."""
    new = table([[math.log(ratio)]])
    return grpo_loss(new, torch.zeros_like(new), table([[advantage]])[0], torch.ones_like(new), **options)


# Token weights, by hand: rows of 1, 3 and 0 counted tokens; the last row must count nowhere

MASK = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("reduction", "first_row", "second_row"),
    [
        ("response_mean", 1 / 2, 1 / 6),
        ("token_mean", 1 / 4, 1 / 4),
        ("group_mean", 1 / 2, 1 / 6),  # rows 0 and 2 are a group of one token, row 1 one of three
        ("constant", 1 / 20, 1 / 20),  # two rows times ten
    ],
)
def test_token_weights(reduction: Reduction, first_row: float, second_row: float) -> None:
    weights = token_weights(MASK, reduction=reduction, group_ids=torch.tensor([7, 3, 7]), constant_length=10)
    expected = table([[first_row, 0, 0], [second_row] * 3, [0, 0, 0]])
    torch.testing.assert_close(weights, expected, rtol=1e-15, atol=0)


def test_group_mean_takes_the_token_mean_within_each_group() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    weights = token_weights(mask, reduction="group_mean", group_ids=torch.tensor([0, 0, 1, 2]))
    # group 0 has four tokens, group 1 two, group 2 none and so is no group: 1/2 * 1/4 and 1/2 * 1/2
    torch.testing.assert_close(weights, table([[1 / 8] * 3, [1 / 8, 0, 0], [1 / 4, 1 / 4, 0], [0, 0, 0]]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_nothing_are_zero(reduction: Reduction) -> None:
    weights = token_weights(torch.zeros(2, 3), reduction=reduction, group_ids=torch.tensor([0, 1]), constant_length=5)
    assert weights.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("reduction", "expected"), [("response_mean", 6.0), ("token_mean", 20 / 6), ("constant", 1.0)])
def test_each_mean_weighs_a_long_answer_differently(reduction: Reduction, expected: float) -> None:
    # losses of 2 on each of five tokens, and of 10 on a single one
    losses = table([[2, 2, 2, 2, 2], [10, 0, 0, 0, 0]])
    weights = token_weights(losses != 0, reduction=reduction, constant_length=10)
    assert (weights * losses).sum().item() == pytest.approx(expected, abs=1e-12)


# The first step: the value is no sign of life, the gradient is


def test_a_first_step_has_loss_zero_but_a_gradient() -> None:
    policy = table([[-1.0, -2.0], [-0.5, -3.0]]).requires_grad_()
    output = grpo_loss(policy, policy.detach(), table([[1, -1]])[0], torch.ones(2, 2))
    torch.autograd.backward(output.loss)
    assert abs(output.loss.item()) < 1e-12
    assert policy.grad is not None
    # two rows of two tokens: every weight is 1/4, the gradient is -A/4
    assert policy.grad.tolist() == [[-0.25, -0.25], [0.25, 0.25]]
    metrics = mean_metrics([output])
    assert (metrics["ratio_min"], metrics["ratio_mean"], metrics["ratio_max"]) == (1.0, 1.0, 1.0)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.0, 0.0)


@pytest.mark.parametrize(("reduction", "expected"), [("response_mean", 0.0), ("token_mean", 0.5)])
def test_unequal_lengths_make_the_first_loss_depend_on_the_mean(reduction: Reduction, expected: float) -> None:
    # A = 1 on one token, A = -1 on three, ratio 1: token mean (-1 + 3) / 4
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    output = grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, reduction=reduction)
    assert output.loss.item() == pytest.approx(expected, abs=1e-7)


# Clipping


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "expected"),
    [
        (1.5, 1.0, {}, -1.2),
        (1.5, -1.0, {}, 1.5),  # a bad token that rose is pulled back in full
        (0.5, 1.0, {}, -0.5),  # a good token that fell is raised in full
        (0.5, -1.0, {}, 0.8),
        (1.1, 2.0, {}, -2.2),
        # the upper side falls back to the lower one
        (1.25, 1.0, {"clip_low": 0.2}, -1.2),
        (1.25, 1.0, {"clip_low": 0.2, "clip_high": 0.28}, -1.25),
        (1.5, 1.0, {"clip_low": 0.2, "clip_high": 0.28}, -1.28),
        # one side alone
        (1.5, 1.0, {"clip_low": INF, "clip_high": 0.2}, -1.2),
        (1.5, -1.0, {"clip_low": INF, "clip_high": 0.2}, 1.5),
        (0.5, -1.0, {"clip_low": INF, "clip_high": 0.2}, 0.5),
        (9.0, 1.0, {"clip_high": INF}, -9.0),
        (0.5, -1.0, {"clip_high": INF}, 0.8),
        # the second bound, for negative advantages alone
        (10.0, -1.0, {}, 10.0),
        (10.0, -1.0, {"dual_clip": 4.0}, 4.0),
        (10.0, -0.5, {"dual_clip": 4.0}, 2.0),
        (3.0, -1.0, {"dual_clip": 4.0}, 3.0),
        (10.0, 1.0, {"dual_clip": 4.0}, -1.2),
    ],
)
def test_clipping(ratio: float, advantage: float, options: dict[str, Any], expected: float) -> None:
    assert one_token(ratio, advantage, **options).loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "dual"),
    [
        (1.5, 1.0, 0.0, 1.0, 0.0),
        (1.5, -1.0, 0.0, 0.0, 0.0),  # outside the range, but the minimum took the other side
        (0.5, 1.0, 0.0, 0.0, 0.0),
        (0.5, -1.0, 1.0, 0.0, 0.0),
        (1.5, 0.0, 0.0, 0.0, 0.0),
        (5.0, -1.0, 0.0, 0.0, 1.0),
        (5.0, 1.0, 0.0, 1.0, 0.0),
    ],
)
def test_clip_fractions_count_where_the_gradient_is_cut(
    ratio: float, advantage: float, low: float, high: float, dual: float
) -> None:
    policy = table([[math.log(ratio)]]).requires_grad_()
    output = grpo_loss(policy, table([[0.0]]), table([[advantage]])[0], torch.ones(1, 1), dual_clip=4.0)
    metrics = mean_metrics([output])
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (low, high)
    assert metrics["dual_clip_fraction"] == dual
    torch.autograd.backward(output.loss)
    assert policy.grad is not None
    assert (policy.grad.item() == 0.0) == (low + high + dual > 0 or advantage == 0.0)


# Sequence ratio (GSPO)


def test_sequence_ratio_is_the_geometric_mean_over_counted_tokens() -> None:
    # log-ratios 0.1 and 0.3, a masked one of 9: exp(0.2) on the whole row
    policy = table([[0.1, 0.3, 9.0]]).requires_grad_()
    mask = torch.tensor([[1, 1, 0]])
    output = grpo_loss(policy, torch.zeros(1, 3), torch.tensor([2.0]), mask, ratio="sequence", clip_low=0.5)
    torch.autograd.backward(output.loss)
    assert output.loss.item() == pytest.approx(-2.0 * math.exp(0.2), abs=1e-12)
    assert policy.grad is not None
    # d exp(mean) / d token = exp(0.2) / 2
    torch.testing.assert_close(policy.grad, table([[-math.exp(0.2), -math.exp(0.2), 0.0]]))


def test_sequence_ratio_counts_clipping_by_row() -> None:
    policy = table([[0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    metrics = mean_metrics([grpo_loss(policy, torch.zeros(3, 3), torch.ones(3), mask, ratio="sequence")])
    assert (metrics["rows"], metrics["tokens"]) == (2, 4)
    assert metrics["clip_fraction_high"] == 1 / 2
    assert metrics["ratio_mean"] == pytest.approx((math.exp(0.5) + 1) / 2, abs=1e-12)


# KL


@pytest.mark.parametrize(
    ("policy", "reference", "estimator", "expected"),
    [
        (-1.0, -1.0, "k3", 0.0),
        (-1.0, -2.0, "k3", 0.367879),  # exp(-1) + 1 - 1
        (-2.0, -1.0, "k3", 0.718282),  # exp(1) - 1 - 1
        (-1.0, -1.5, "k3", 0.106531),  # exp(-1/2) + 1/2 - 1
        (-1.0, -2.0, "k1", 1.0),
        (-2.0, -1.0, "k1", -1.0),
        (-1.0, -3.0, "k2", 2.0),
    ],
)
@pytest.mark.filterwarnings("ignore:kl_estimator 'k1'")
def test_kl_of_one_token(policy: float, reference: float, estimator: Any, expected: float) -> None:
    logprobs = table([[policy]])
    options: dict[str, Any] = {"reference_logprobs": table([[reference]]), "kl_estimator": estimator}
    output = grpo_loss(logprobs, logprobs, torch.zeros(1), torch.ones(1, 1), kl_beta=0.5, **options)
    assert mean_metrics([output])["kl"] == pytest.approx(expected, abs=1e-6)
    assert output.loss.item() == pytest.approx(0.5 * expected, abs=1e-6)


def test_k3_is_never_negative_in_float32() -> None:
    zero = torch.zeros(1, 1)
    for distance in [sign * 10**power for sign in (1, -1) for power in np.linspace(-9, 1, 300)]:
        reference = torch.full((1, 1), distance)
        output = grpo_loss(zero, zero, zero[0], torch.ones(1, 1), reference_logprobs=reference)
        assert output.metrics["kl_sum"].sum() >= 0
        # and near 0, where exp(d) - d - 1 has no digit left in float32, it still is d^2 / 2
        if 1e-6 < abs(distance) < 1e-2:
            assert output.metrics["kl_sum"].item() == pytest.approx(distance**2 / 2, rel=0.2)


def test_kl_is_not_averaged_over_padding() -> None:
    # k2 of distances sqrt(0.2) and sqrt(0.6): 0.1 and 0.3; two padded positions
    reference = table([[math.sqrt(0.2), math.sqrt(0.6), 50.0, NAN]])
    output = grpo_loss(
        torch.zeros(1, 4, dtype=torch.float64),
        torch.zeros(1, 4),
        torch.zeros(1),
        torch.tensor([[1, 1, 0, 0]]),
        reference_logprobs=reference,
        kl_beta=1.0,
        kl_estimator="k2",
        kl_mask=torch.ones(1, 4),
    )
    assert mean_metrics([output])["kl"] == pytest.approx(0.2, abs=1e-12)
    assert output.loss.item() == pytest.approx(0.2, abs=1e-12)


def test_steps_on_the_kl_alone_bring_the_policy_to_the_reference() -> None:
    reference = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64).log_softmax(dim=1)
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    distances = []
    for _ in range(30):
        policy = logits.log_softmax(dim=1)
        output = grpo_loss(
            policy, policy.detach(), torch.zeros(1), torch.ones(1, 3), reference_logprobs=reference, kl_beta=0.1
        )
        assert output.loss.item() >= 0.0
        distances.append(mean_metrics([output])["kl"])
        (gradient,) = torch.autograd.grad(output.loss, logits)
        logits = (logits - 5.0 * gradient).detach().requires_grad_()
    assert all(later < earlier for earlier, later in itertools.pairwise(distances))
    assert distances[-1] < 0.01 * distances[0]


def test_a_flat_group_feels_the_kl_unless_it_is_masked_out() -> None:
    def gradient(kl_mask: Tensor | None) -> Tensor:
        policy = table([[-1.0], [-1.0], [-1.0]]).requires_grad_()
        output = grpo_loss(
            policy,
            policy.detach(),
            torch.zeros(3),
            torch.ones(3, 1),
            reference_logprobs=table([[-2.0]] * 3),
            kl_beta=0.04,
            kl_mask=kl_mask,
        )
        return torch.autograd.grad(output.loss, policy)[0]

    # d k3 / d policy = 1 - exp(-1), three rows
    slope = 0.04 * (1 - math.exp(-1)) / 3
    torch.testing.assert_close(gradient(None), table([[slope]] * 3))
    # the third row keeps its weight: the denominator is still three
    torch.testing.assert_close(gradient(torch.tensor([[0], [0], [1]])), table([[0.0], [0.0], [slope]]))
    assert gradient(torch.zeros(3, 1)).tolist() == [[0.0]] * 3


def test_without_beta_a_reference_is_measured_and_does_not_pull() -> None:
    policy = table([[-1.0, -2.0]]).requires_grad_()
    plain = grpo_loss(policy, policy.detach(), torch.ones(1), torch.ones(1, 2))
    measured = grpo_loss(
        policy, policy.detach(), torch.ones(1), torch.ones(1, 2), reference_logprobs=table([[-2.0, -2.0]])
    )
    assert measured.loss.item() == plain.loss.item()
    assert mean_metrics([measured])["kl"] == pytest.approx(0.5 * math.exp(-1), abs=1e-12)
    assert "kl" not in mean_metrics([plain])
    # not even where the reference rules a token out
    impossible = table([[-INF, -1.0]])
    ruled_out = grpo_loss(policy, policy.detach(), torch.ones(1), torch.ones(1, 2), reference_logprobs=impossible)
    assert ruled_out.loss.item() == plain.loss.item()


# Entropy, and the mismatch between the engine that sampled and the one that trains


def test_entropy_bonus_is_taken_off() -> None:
    entropy = table([[0.5, 1.5, NAN]]).requires_grad_()
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    output = grpo_loss(zeros, zeros, torch.zeros(1), torch.tensor([[1, 1, 0]]), entropy=entropy, entropy_bonus=0.1)
    torch.autograd.backward(output.loss)
    assert output.loss.item() == pytest.approx(-0.1, abs=1e-12)
    assert mean_metrics([output])["entropy"] == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(entropy.grad, table([[-0.05, -0.05, 0.0]]))


def test_mismatch_is_measured_and_corrected_up_to_the_cap() -> None:
    # old - sampling: log 1/2, log 3, and a masked position
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    sampling = table([[math.log(2), -math.log(3), NAN]])
    mask = torch.tensor([[1, 1, 0]])
    policy = zeros.clone().requires_grad_()
    measured = grpo_loss(policy, zeros, torch.ones(1), mask, sampling_logprobs=sampling)
    assert measured.loss.item() == -1.0
    metrics = mean_metrics([measured])
    assert metrics["mismatch"] == pytest.approx((math.log(2) + math.log(3)) / 2, abs=1e-12)
    assert metrics["mismatch_max"] == pytest.approx(math.log(3), abs=1e-12)
    assert "mismatch_capped_fraction" not in metrics

    corrected = grpo_loss(policy, zeros, torch.ones(1), mask, sampling_logprobs=sampling, mismatch_cap=2.0)
    torch.autograd.backward(corrected.loss)
    assert corrected.loss.item() == pytest.approx(-(0.5 + 2.0) / 2, abs=1e-12)
    torch.testing.assert_close(policy.grad, table([[-0.25, -1.0, 0.0]]))
    assert mean_metrics([corrected])["mismatch_capped_fraction"] == 0.5
    both = grpo_loss(policy, zeros, torch.ones(1), mask, sampling_logprobs=sampling, mismatch_cap=0.4)
    assert mean_metrics([both])["mismatch_capped_fraction"] == 1.0


def test_the_correction_touches_the_policy_term_alone() -> None:
    ones = torch.ones(1, 1, dtype=torch.float64)
    output = grpo_loss(
        -ones,
        -ones,
        torch.zeros(1),
        ones,
        reference_logprobs=-2 * ones,
        kl_beta=1.0,
        entropy=ones,
        entropy_bonus=1.0,
        sampling_logprobs=-5 * ones,
        mismatch_cap=3.0,
    )
    assert output.loss.item() == pytest.approx(math.exp(-1) - 1.0, abs=1e-12)


# Its derivative


def random_batch(seed: int, rows: int = 6, width: int = 5) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    names = ("policy", "old", "reference", "sampling")
    batch = {name: generator.normal(-1.5, 0.5, (rows, width)) for name in names}
    lengths = generator.permutation(np.arange(rows) % (width + 1))  # one row counts no token at all
    return batch | {
        "mask": np.arange(width) < lengths[:, None],
        "advantages": generator.normal(0, 1, rows),
        "groups": np.arange(rows) // 2,
        "entropy": generator.uniform(0, 2, (rows, width)),
    }


def torch_options(batch: dict[str, np.ndarray], rows: slice = slice(None)) -> tuple[list[Tensor], dict[str, Any]]:
    tensors = {name: torch.from_numpy(array[rows]) for name, array in batch.items()}
    positional = [tensors[name] for name in ("policy", "old", "advantages", "mask")]
    return positional, {
        "reference_logprobs": tensors["reference"],
        "sampling_logprobs": tensors["sampling"],
        "entropy": tensors["entropy"],
        "group_ids": tensors["groups"],
    }


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradient_agrees_with_finite_differences(ratio: Any) -> None:
    (policy, old, advantages, mask), tensors = torch_options(random_batch(7))

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        options = {**tensors, "entropy": entropy}
        return grpo_loss(logprobs, old, advantages, mask, ratio=ratio, kl_beta=0.04, entropy_bonus=0.01, **options).loss

    torch.autograd.gradcheck(loss, (policy.requires_grad_(), tensors["entropy"].requires_grad_()))


# What does not count has no influence; what is extreme stays finite


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
def test_masked_positions_have_no_influence(ratio: Any, reduction: Reduction, rubbish: float) -> None:
    batch = random_batch(3)
    spoilt = dict(batch)
    for name in ("policy", "old", "reference", "sampling", "entropy"):
        spoilt[name] = np.where(batch["mask"], batch[name], rubbish)
    spoilt["advantages"] = np.where(batch["mask"].any(axis=1), batch["advantages"], rubbish)
    results = []
    for arrays in (batch, spoilt):
        positional, tensors = torch_options(arrays)
        positional[0].requires_grad_()
        output = grpo_loss(
            *positional,
            **tensors,
            # weights handed over may hold anything there too
            token_weights=torch.ones(6, 5) if reduction == "constant" else None,
            reduction=reduction,
            ratio=ratio,
            kl_beta=0.04,
            entropy_bonus=0.01,
            mismatch_cap=1.2,
        )
        torch.autograd.backward(output.loss)
        results.append((output.loss.item(), positional[0].grad, mean_metrics([output])))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_counted_gives_zero_loss_zero_gradients_and_no_metrics(ratio: Any, reduction: Reduction) -> None:
    positional, tensors = torch_options(random_batch(0))
    positional[0].requires_grad_()
    positional[3] = torch.zeros_like(positional[3])
    output = grpo_loss(
        *positional,
        **tensors,
        ratio=ratio,
        reduction=reduction,
        constant_length=8,
        kl_beta=0.04,
        entropy_bonus=0.01,
        mismatch_cap=1.2,
    )
    torch.autograd.backward(output.loss)
    assert output.loss.item() == 0.0
    assert positional[0].grad is not None
    assert positional[0].grad.tolist() == [[0.0] * 5] * 6
    assert mean_metrics([output]) == {"tokens": 0.0, "rows": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [19.0, 21.0, 90.0, 1000.0])
def test_far_log_probabilities_stay_finite_and_are_reported(dtype: torch.dtype, distance: float) -> None:
    policy = torch.tensor([[0.0, -distance]], dtype=dtype, requires_grad=True)
    other = torch.tensor([[-distance, 0.0]], dtype=dtype)
    output = grpo_loss(policy, other, torch.tensor([-1.0]), torch.ones(1, 2), reference_logprobs=other, kl_beta=0.1)
    torch.autograd.backward(output.loss)
    assert output.loss.dtype == torch.float32
    assert output.loss.isfinite()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert policy.grad[0, 0] > 1e7  # a bad token far too likely is still pushed down, by the policy term
    assert policy.grad[0, 1] < 0  # and one far below the reference is still pulled up
    metrics = mean_metrics([output])
    beyond = 0.5 if distance > LOG_RATIO_BOUND else 0.0
    assert (metrics["ratio_bounded_fraction"], metrics["kl_bounded_fraction"]) == (beyond, beyond)


def test_low_precision_is_worked_out_in_float32_and_float64_stays() -> None:
    # -1.0078125 + 1 is exact in bfloat16, but exp of it is not
    new, old = torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.0078125]], dtype=torch.bfloat16)
    output = grpo_loss(new, old, torch.ones(1), torch.ones(1, 1))
    assert output.loss.item() == pytest.approx(-math.exp(0.0078125), abs=1e-7)
    assert grpo_loss(new.double(), old.double(), torch.ones(1), torch.ones(1, 1)).loss.dtype == torch.float64


def test_tensors_from_inference_mode_can_be_used() -> None:
    policy = torch.from_numpy(random_batch(1)["policy"]).requires_grad_()
    with torch.inference_mode():
        (_, old, advantages, mask), tensors = torch_options(random_batch(1))
        others = [tensor.clone() for tensor in (old, advantages, mask, token_weights(mask))]
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    output = grpo_loss(policy, *others[:3], token_weights=others[3], **tensors, kl_beta=0.04, mismatch_cap=2.0)
    torch.autograd.backward(output.loss)
    assert policy.grad is not None
    assert policy.grad.abs().sum() > 0


def test_gradient_reaches_the_policy_alone() -> None:
    positional, tensors = torch_options(random_batch(2))
    inputs: list[Tensor] = [positional[1], positional[2], tensors["reference_logprobs"], tensors["sampling_logprobs"]]
    for tensor in (positional[0], *inputs):
        tensor.requires_grad_()
    torch.autograd.backward(grpo_loss(*positional, **tensors, kl_beta=0.04, mismatch_cap=2.0).loss)
    assert positional[0].grad is not None
    assert all(tensor.grad is None for tensor in inputs)


# Metrics


def test_metric_names_depend_on_the_options_alone() -> None:
    positional, tensors = torch_options(random_batch(0))
    full = grpo_loss(*positional, **tensors).metrics
    positional[3] = torch.zeros_like(positional[3])
    assert list(grpo_loss(*positional, **tensors).metrics) == list(full)
    assert not any(value.requires_grad for value in full.values())


def test_a_micro_batch_without_tokens_does_not_spoil_the_others() -> None:
    counted = one_token(1.5, 1.0)
    zero = torch.zeros(1, 1)
    empty = grpo_loss(zero, zero, zero[0], zero)
    assert mean_metrics([empty, counted, empty]) == mean_metrics([counted])
    assert mean_metrics([]) == {}


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 0.0}, "clip_low is 0.0: it must be positive, or inf"),
        ({"clip_high": NAN}, "clip_high is nan: it must be positive, or inf"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0: it must be above 1"),
        ({"dual_clip": INF}, "dual_clip is inf: it must be above 1 and finite"),
        ({"ratio": "group"}, "ratio is 'group': choose 'token' or 'sequence'"),
        ({"reduction": "mean"}, "reduction is 'mean': choose 'response_mean'"),
        ({"reduction": "constant"}, "constant_length is None: .* needs a number of tokens"),
        ({"reduction": "constant", "constant_length": 0}, "constant_length is 0"),
        ({"reduction": "group_mean"}, "group_ids is None: .* needs the group of each row"),
        ({"reduction": "group_mean", "group_ids": torch.zeros(3)}, r"group_ids has shape \(3,\): it must be \(2,\)"),
        ({"kl_beta": 0.1}, "reference_logprobs is None, but kl_beta is 0.1: .* set kl_beta to 0"),
        ({"kl_beta": -0.1}, "kl_beta is -0.1: it must be finite and at least 0"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4': choose 'k1', 'k2' or 'k3'"),
        ({"entropy_bonus": 0.1}, "entropy is None, but entropy_bonus is 0.1: .* set entropy_bonus to 0"),
        ({"entropy_bonus": NAN}, "entropy_bonus is nan: it must be finite"),
        ({"mismatch_cap": 2.0}, "sampling_logprobs is None, but mismatch_cap is 2.0: .* set mismatch_cap to None"),
        ({"mismatch_cap": 0.0}, "mismatch_cap is 0.0: it must be positive"),
        ({"entropy": torch.zeros(2)}, r"entropy has shape \(2,\): it must be \(2, 3\)"),
        ({"token_weights": torch.zeros(3, 2)}, r"token_weights has shape \(3, 2\): it must be \(2, 3\)"),
        ({"kl_mask": torch.full((2, 3), 0.5), "reference_logprobs": torch.zeros(2, 3)}, "kl_mask holds values other"),
        ({"mask": torch.full((2, 3), 0.5)}, "mask holds values other than 0 and 1: .* token_weights"),
        ({"mask": torch.ones(2)}, r"mask has shape \(2,\): it must be \(2, 3\)"),
        ({"advantages": torch.ones(2, 1)}, r"advantages has shape \(2, 1\): it must be \(2,\)"),
        ({"old_logprobs": torch.ones(2, 4)}, r"old_logprobs has shape \(2, 4\): it must be \(2, 3\)"),
        ({"policy_logprobs": torch.ones(0, 3)}, r"policy_logprobs has shape \(0, 3\): .* mask one out"),
        ({"policy_logprobs": torch.ones(3)}, r"policy_logprobs has shape \(3,\): it must be \[rows, tokens\]"),
    ],
)
def test_mistakes_name_argument_value_and_remedy(options: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {
        "policy_logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        grpo_loss(**(inputs | options))


def test_doubtful_choices_warn() -> None:
    with pytest.warns(UserWarning, match=r"clip_high 0.1 is below clip_low 0.2"):
        one_token(1.0, 1.0, clip_low=0.2, clip_high=0.1)
    with pytest.warns(UserWarning, match="'k1' in the loss has no expected gradient"):
        one_token(1.0, 1.0, kl_beta=0.1, kl_estimator="k1", reference_logprobs=table([[0.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_token(1.0, 1.0, clip_low=INF, clip_high=0.1)
        one_token(1.0, 1.0, kl_estimator="k1", reference_logprobs=table([[0.0]]))
