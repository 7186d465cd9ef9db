"""The numbers of TRL's ``GRPOTrainer``, wherever its definition and ours are one. TRL's own code computes its side.

=============================  ==========================================================================
here                           TRL
=============================  ==========================================================================
``response_mean``              ``loss_type="grpo"``
``token_mean``                 ``"bnpo"`` of an update in one piece; ``"dapo"`` of one in any number
``constant``                   ``"dr_grpo"``, ``constant_length`` being ``max_completion_length``
``ratio``                      ``importance_sampling_level``
``clip_low``, ``clip_high``    ``epsilon``, ``epsilon_high``
``dual_clip``                  ``delta``, as long as that is not below ``1 + epsilon_high``
``kl_beta``, ``k3``            ``beta`` with ``use_bias_correction_kl=False``; by default TRL puts the ratio on it
``entropy_bonus``              ``entropy_coef``, for a token mean; TRL's bonus is that under every loss type
``mismatch_cap``               the ``token_truncate`` correction of samples from vLLM
``scale``, ``std_correction``  ``scale_rewards``, always with the sample std and an epsilon of 1e-4
=============================  ==========================================================================

``group_mean``, ``k1``, ``k2`` and ``kl_mask`` have no counterpart in TRL; its mask of high-entropy tokens, its
other loss types and the normalisation of each reward by itself have none here. Completions without a counted
token stay in TRL's denominators and not in ours; this and the other differences have tests of their own.
Advantages and whole runs are compared in ``test_against_trl_run.py``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.maths.grpo_loss import Reduction, mean_metrics, token_weights

# TRL reads settings of transformers by names that have since changed.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[peers]'")

from maths.trl_trainer import (  # noqa: E402 - after the skip
    LONGEST,
    ROWS,
    SAME_REDUCTION,
    WIDTH,
    GRPOTrainer,
    make_trainer,
    our_loss,
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """A trainer between two steps; what a test sets on it is taken back."""
    made = make_trainer(tmp_path_factory.mktemp("trl"), lambda completions, **_: [0.0] * len(completions))
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return made


def example(seed: int = 0) -> dict[str, Tensor]:
    """Log-probabilities some tenths of a nat apart; every row counts at least one token."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    policy = -noise(1.0).abs()
    old = policy + noise(0.4)
    return {
        "policy": policy,
        "old": old,
        "reference": policy + noise(0.4),
        "sampling": old + noise(0.4),
        "entropy": noise(1.0).abs(),
        "advantages": noise(1.0)[:, 0],
        "mask": torch.arange(WIDTH) < torch.tensor([[5], [1], [3], [4], [2], [5]]),
    }


def trl_loss(trainer: GRPOTrainer, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Loss, gradients in the log-probabilities and entropies, and metrics, by ``GRPOTrainer._compute_loss``."""
    policy, entropy = tensors["policy"].clone().requires_grad_(), tensors["entropy"].clone().requires_grad_()
    whole_update = settings.pop("whole_update", tensors["mask"])
    for name, value in settings.items():
        monkeypatch.setattr(trainer.args if name == "delta" else trainer, name, value)
    monkeypatch.setattr(trainer, "_metrics", {"train": {}, "eval": {}})
    trainer._metrics["train"] = _Recorded()
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (policy, entropy, None))
    token = torch.zeros(len(policy), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": token,
        "prompt_mask": token + 1,
        "completion_ids": torch.zeros(policy.shape, dtype=torch.long),
        "completion_mask": tensors["mask"].long(),
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": whole_update.sum(),
        # TRL works it out where it generates, as min(exp(old - sampling), cap)
        "importance_sampling_ratio": (tensors["old"] - tensors["sampling"]).exp().clamp(max=1.2),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    gradients = torch.autograd.grad(loss, [policy, entropy], materialize_grads=True)
    return loss.item(), gradients, trainer._metrics["train"].means()


class _Recorded(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])

    def means(self) -> dict[str, float]:
        return {name: values[0] for name, values in self.items()}


def assert_same(ours: Any, theirs: Any, factor: float = 1.0) -> None:
    assert ours[0] == pytest.approx(factor * theirs[0], rel=1e-12, abs=1e-14)
    for our_gradient, their_gradient in zip(ours[1], theirs[1], strict=True):
        difference = (our_gradient - factor * their_gradient).norm()
        assert difference <= 1e-12 * their_gradient.norm()


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"epsilon_low": 0.1, "epsilon_high": 0.4}, {"clip_low": 0.1, "clip_high": 0.4}),
        ({"epsilon_low": math.inf, "epsilon_high": 0.2}, {"clip_low": math.inf, "clip_high": 0.2}),
        ({"delta": 1.3}, {"dual_clip": 1.3}),
        ({"beta": 0.3}, {"kl_beta": 0.3}),
        (
            {"epsilon_low": 0.1, "epsilon_high": 0.2, "delta": 1.4, "beta": 0.04},
            {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.4, "kl_beta": 0.04},
        ),
    ],
    ids=["plain", "two sides", "one side", "second bound", "kl", "together"],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss_type", "reduction"), SAME_REDUCTION)
def test_loss_gradient_and_metrics(
    trainer: GRPOTrainer,
    monkeypatch: pytest.MonkeyPatch,
    loss_type: str,
    reduction: Reduction,
    level: Any,
    settings: dict[str, float],
    options: dict[str, float],
) -> None:
    for seed in range(3):
        tensors = example(seed)
        named = {"loss_type": loss_type, "importance_sampling_level": level, **settings}
        theirs = trl_loss(trainer, tensors, monkeypatch, **named)
        ours = our_loss(tensors, reduction=reduction, ratio=level, **options)
        assert_same(ours, theirs)
        metrics = mean_metrics([ours[2]])
        expected = theirs[2]  # its counts are float32
        assert metrics["clip_fraction_low"] == pytest.approx(expected["clip_ratio/low_mean"], rel=1e-6)
        assert metrics["clip_fraction_high"] == pytest.approx(expected["clip_ratio/high_mean"], rel=1e-6)
        assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=1e-6)
        if "beta" in settings:
            assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-6)


def test_the_entropy_bonus_of_a_token_mean(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"loss_type": "bnpo", "entropy_coef": 0.1, "_entropy_bonus_enabled": True}
    theirs = trl_loss(trainer, example(), monkeypatch, **named)
    ours = our_loss(example(), reduction="token_mean", entropy_bonus=0.1)
    assert ours[1][1].norm() > 0.01
    assert_same(ours, theirs)


def test_the_correction_is_on_the_policy_term_and_not_on_the_kl(
    trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = example()
    named = {"use_vllm": True, "vllm_importance_sampling_correction": True, "loss_type": "grpo", "beta": 0.3}
    theirs = trl_loss(trainer, tensors, monkeypatch, **named)
    ours = our_loss(tensors, kl_beta=0.3, sampling_logprobs=tensors["sampling"], mismatch_cap=1.2)
    assert_same(ours, theirs)


@pytest.mark.parametrize(("loss_type", "reduction"), SAME_REDUCTION)
def test_an_update_in_two_micro_batches(
    trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch, loss_type: str, reduction: Reduction
) -> None:
    """Equal numbers of rows, unequal numbers of tokens: ``bnpo`` takes a mean of means, the others sum to the whole."""
    tensors = example()
    monkeypatch.setattr(trainer.args, "steps_per_generation", 2)
    named = {"loss_type": loss_type, "current_gradient_accumulation_steps": 2, "whole_update": tensors["mask"]}
    weights = token_weights(tensors["mask"], reduction=reduction, constant_length=LONGEST)
    ours, theirs = [], []
    for rows in (slice(0, 3), slice(3, 6)):
        part = {name: values[rows] for name, values in tensors.items()}
        theirs.append(trl_loss(trainer, part, monkeypatch, **named))
        if loss_type == "bnpo":
            ours.append(our_loss(part, reduction=reduction))
        else:
            ours.append(our_loss(part, token_weights=weights[rows]))
    for our_part, their_part in zip(ours, theirs, strict=True):
        assert_same(our_part, their_part, factor=2.0 if loss_type == "bnpo" else 1.0)
    whole, _, _ = our_loss(tensors, reduction=reduction)
    same = sum(part[0] for part in theirs) == pytest.approx(whole, rel=1e-12)
    assert same == (loss_type != "bnpo")


@pytest.mark.parametrize(("loss_type", "reduction"), SAME_REDUCTION)
def test_a_row_without_a_token_is_in_their_denominators_alone(
    trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch, loss_type: str, reduction: Reduction
) -> None:
    tensors = example()
    tensors["mask"] = tensors["mask"] & (torch.arange(ROWS) != 2).unsqueeze(1)
    theirs = trl_loss(trainer, tensors, monkeypatch, loss_type=loss_type)
    assert_same(our_loss(tensors, reduction=reduction), theirs, 1.0 if reduction == "token_mean" else ROWS / (ROWS - 1))


def test_a_second_bound_below_the_clip_range_is_another_definition(
    trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratio 1.5, A = -1: ``delta`` bounds the ratio before the minimum, which then takes the clipped one, 1.2."""
    single = {name: torch.zeros(1, 1, dtype=torch.float64) for name in ("old", "reference", "sampling", "entropy")}
    single |= {"policy": single["old"] + math.log(1.5), "mask": torch.ones(1, 1, dtype=torch.bool)}
    single["advantages"] = torch.tensor([-1.0], dtype=torch.float64)
    assert trl_loss(trainer, single, monkeypatch, loss_type="grpo", delta=1.1)[0] == pytest.approx(1.2)
    assert our_loss(single, dual_clip=1.1)[0] == pytest.approx(1.1)


def test_the_default_kl_of_trl_is_another_definition(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ratio on it, which on the first update leaves its value and changes its gradient."""
    tensors = example()
    tensors["old"] = tensors["policy"]
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", True)
    theirs = trl_loss(trainer, tensors, monkeypatch, loss_type="grpo", beta=0.3)
    ours = our_loss(tensors, kl_beta=0.3)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    assert (ours[1][0] - theirs[1][0]).norm() > 0.01 * theirs[1][0].norm()
