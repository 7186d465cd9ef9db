"""Every option, and every combination of options, against numbers worked out one at a time in plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from maths.loss_examples import loss_of, random_update, tensors_of
from maths.plain_advantages import plain_advantages
from maths.plain_loss import Options, Rows, Update, plain_loss, plain_metrics
from torch import Tensor

from grpo.maths.group_advantages import group_advantages
from grpo.maths.grpo_loss import mean_metrics

# Both are allowed, and are tested with the warnings themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:kl_estimator 'k1'"),
    pytest.mark.filterwarnings("ignore:clip_high .* is below clip_low"),
]

BASELINES = ("mean", "leave_one_out", "batch_mean", "none")
SCALES = ("group_std", "batch_std", "none")
RATIOS = ("token", "sequence")
REDUCTIONS = ("response_mean", "token_mean", "group_mean", "constant")
ESTIMATORS = ("k1", "k2", "k3")


# Advantages

# As checkers give them, and as a reward model does.
reward_values = st.one_of(
    st.sampled_from([-1.0, 0.0, 0.1, 0.3, 1.0]),
    st.floats(-100, 100).map(lambda value: round(value, 3)),
)


@st.composite
def scored_rewards(draw: st.DrawFn) -> tuple[list[list[float]], list[list[bool]]]:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 6))

    def table(values: st.SearchStrategy[float] | st.SearchStrategy[bool]) -> list[list[float]]:
        return draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=groups, max_size=groups))

    scored = draw(st.sampled_from([None, st.booleans()]))
    return table(reward_values), [[True] * size] * groups if scored is None else table(scored)


@settings(max_examples=60)
@given(example=scored_rewards(), epsilon=st.sampled_from([1e-8, 1e-4, 0.5]))
def test_advantages_under_every_combination(
    example: tuple[list[list[float]], list[list[bool]]], epsilon: float
) -> None:
    rewards, scored = example
    assume(any(flag for row in scored for flag in row))
    # what is not scored may hold anything
    holes = torch.tensor(rewards, dtype=torch.float64).masked_fill(~torch.tensor(scored), math.nan)
    for baseline, scale, correction in itertools.product(BASELINES, SCALES, (0, 1)):
        options = {"baseline": baseline, "scale": scale, "std_correction": correction, "epsilon": epsilon}
        actual = group_advantages(holes, scored=torch.tensor(scored), **options)
        assert_close(actual, plain_advantages(rewards, scored, **options), 1e-12)


# The loss

CLIPPINGS = (
    {"clip_low": 0.2},
    {"clip_low": 0.1, "clip_high": 0.4},
    {"clip_low": math.inf, "clip_high": 0.2},
    {"clip_low": 0.2, "clip_high": math.inf},
)
DUAL_CLIPS = ({}, {"dual_clip": 1.3})
KL_TERMS = (
    {"given": set()},
    {"given": {"reference"}},  # measured only
    *({"given": {"reference"}, "kl_beta": 0.3, "kl_estimator": estimator} for estimator in ESTIMATORS),
)
KL_MASKS = ({"given": set()}, {"given": {"kl_mask"}})
ENTROPIES = (
    {"given": set()},
    {"given": {"entropy"}},
    {"given": {"entropy"}, "entropy_bonus": 0.1},
)
MISMATCHES = (
    {"given": set()},
    {"given": {"sampling"}},
    {"given": {"sampling"}, "mismatch_cap": 1.2},
)
REMAINING = list(itertools.product(CLIPPINGS, DUAL_CLIPS, KL_TERMS, KL_MASKS, ENTROPIES, MISMATCHES))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "given weights"])
def test_loss_gradient_and_metrics_under_every_combination(ratio: str, reduction: str) -> None:
    first = {"ratio": ratio}
    first |= {"given": {"weights"}} if reduction == "given weights" else {"reduction": reduction, "given": set()}
    updates = [random_update(seed) for seed in range(7)]
    for update, parts in zip(itertools.cycle(updates), REMAINING, strict=False):
        assert_same_loss(update, combined(first, *parts))


@st.composite
def loss_options(draw: st.DrawFn) -> Options:
    """Any combination, and any size of each number."""
    sides = st.one_of(st.floats(0.01, 1.5), st.just(math.inf))
    sampling, reference = draw(st.booleans()), draw(st.booleans())
    entropy = draw(st.booleans())
    others = draw(st.sets(st.sampled_from(["weights", "kl_mask"])))
    given_inputs = {"sampling": sampling, "reference": reference, "entropy": entropy}
    return Options(
        ratio=draw(st.sampled_from(RATIOS)),
        reduction=draw(st.sampled_from(REDUCTIONS)),
        constant_length=draw(st.integers(1, 20)),
        clip_low=draw(sides),
        clip_high=draw(st.none() | sides),
        dual_clip=draw(st.none() | st.floats(1.01, 5.0)),
        kl_beta=draw(st.floats(0.0, 2.0)) if reference else 0.0,
        kl_estimator=draw(st.sampled_from(ESTIMATORS)),
        entropy_bonus=draw(st.floats(0.0, 1.0)) if entropy else 0.0,
        mismatch_cap=draw(st.none() | st.floats(0.5, 5.0)) if sampling else None,
        given=frozenset(others | {name for name, is_given in given_inputs.items() if is_given}),
    )


@settings(max_examples=300)
@given(
    options=loss_options(),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 6),
    width=st.integers(1, 6),
    far=st.booleans(),
)
def test_loss_gradient_and_metrics_of_any_update(options: Options, seed: int, rows: int, width: int, far: bool) -> None:
    assert_same_loss(random_update(seed, rows, width, far=far), options)


def test_the_plain_gradient_is_the_slope_of_the_plain_loss() -> None:
    """The second opinion itself, by central differences."""
    step = 1e-6
    for seed, parts in zip(range(len(REMAINING)), REMAINING[::7], strict=False):
        options = combined({"ratio": RATIOS[seed % 2], "reduction": REDUCTIONS[seed % 4], "given": set()}, *parts)
        update = random_update(seed)
        gradient = plain_loss(update, options).policy_gradient
        for i, t in [(i, t) for i, row in enumerate(update.mask) for t, counts in enumerate(row) if counts]:
            above, below = (plain_loss(moved(update, i, t, by), options).loss for by in (step, -step))
            assert gradient[i][t] == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8)


def combined(*parts: dict) -> Options:
    merged = {name: value for part in parts for name, value in part.items() if name != "given"}
    inputs: set[str] = set().union(*(part.get("given", ()) for part in parts))
    return Options(**merged, given=frozenset(inputs))


def moved(update: Update, i: int, t: int, by: float) -> Update:
    policy = [list(row) for row in update.policy]
    policy[i][t] += by
    return Update(**{**vars(update), "policy": policy})


def assert_same_loss(update: Update, options: Options) -> None:
    expected = plain_loss(update, options)
    assert expected.clearance > 1e-12, "at a kink the gradient has no one value: take another seed"
    tensors = tensors_of(update)
    inputs = [tensors["policy"].requires_grad_(), tensors["entropy"].requires_grad_()]
    output = loss_of(tensors, options)
    policy_gradient, entropy_gradient = torch.autograd.grad(output.loss, inputs, materialize_grads=True)
    # the terms may cancel: what is left is then as exact as they were
    scale = math.fsum(map(abs, expected.terms))
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-12, abs=1e-15 * scale), options
    assert_close(policy_gradient, expected.policy_gradient, 1e-10)
    assert_close(entropy_gradient, expected.entropy_gradient, 1e-10)
    assert mean_metrics([output]) == pytest.approx(plain_metrics(expected, update), rel=1e-12, abs=1e-15), options


def assert_close(actual: Tensor, expected: Rows, tolerance: float) -> None:
    """By the norm: the difference is at most ``tolerance`` of what is expected; zeros must be zeros."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert (actual.detach() - wanted).norm() <= tolerance * wanted.norm()
