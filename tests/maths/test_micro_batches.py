"""However an update is cut into micro-batches, its gradient in the parameters of a network is the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo.maths.grpo_loss import LossOutput, Ratio, Reduction, grpo_loss, mean_metrics, token_weights

ROWS, WIDTH, VOCABULARY = 6, 5, 11
# of 6 rows in 3 groups; one row counts nothing
LENGTHS = torch.tensor([5, 2, 0, 4, 1, 3])
GROUPS = torch.tensor([4, 4, 9, 9, 1, 1])
MASK = torch.arange(WIDTH) < LENGTHS.unsqueeze(1)
REDUCTIONS: tuple[Reduction, ...] = ("response_mean", "token_mean", "group_mean", "constant")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

Cut = tuple[slice | list[int], slice]  # rows, and positions within them
EVERYTHING = slice(None)


class Policy(nn.Module):
    """Embedding, recurrence, head: each position depends on those before it, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.recurrence = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens after the first, and the entropy they were drawn under."""
        logits = self.head(self.recurrence(self.embedding(tokens[:, :-1]))[0])
        logprobs = logits.log_softmax(dim=2)
        chosen = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
        return chosen, -(logprobs.exp() * logprobs).sum(dim=2)


class Update:
    """An update of a few rollouts, some ratios and KL terms well off their neutral values."""

    def __init__(self, dtype: torch.dtype, ratio: Ratio, reduction: Reduction) -> None:
        torch.manual_seed(0)
        self.policy = Policy().to(dtype)
        self.tokens = torch.randint(VOCABULARY, (ROWS, WIDTH + 1))
        with torch.no_grad():
            policy_logprobs, _ = self.policy(self.tokens)
        self.rows = {
            "old_logprobs": policy_logprobs + 0.3 * torch.randn(ROWS, WIDTH, dtype=dtype),
            "advantages": torch.randn(ROWS, dtype=dtype),
            "mask": MASK,
            "reference_logprobs": policy_logprobs + 0.3 * torch.randn(ROWS, WIDTH, dtype=dtype),
            "sampling_logprobs": policy_logprobs + 0.3 * torch.randn(ROWS, WIDTH, dtype=dtype),
            "kl_mask": torch.rand(ROWS, WIDTH) < 0.7,
            "token_weights": token_weights(MASK, reduction=reduction, group_ids=GROUPS, constant_length=WIDTH),
        }
        self.options: dict[str, Any] = {"ratio": ratio, "clip_high": 0.3, "dual_clip": 1.5, "mismatch_cap": 1.2}
        self.options |= {"kl_beta": 0.1, "entropy_bonus": 0.01}

    def gradient(self, cuts: Iterable[Cut]) -> tuple[float, Tensor, dict[str, float]]:
        """Loss, gradient of all parameters and metrics, added up over the micro-batches."""
        self.policy.zero_grad()
        outputs = [self.micro_batch(rows, positions) for rows, positions in cuts]
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.policy.parameters()])
        return sum(output.loss.item() for output in outputs), gradient.clone(), mean_metrics(outputs)

    def micro_batch(self, rows: slice | list[int], positions: slice) -> LossOutput:
        logprobs, entropy = self.policy(self.tokens[rows])
        inputs = {
            name: values[rows] if values.ndim == 1 else values[rows][:, positions] for name, values in self.rows.items()
        }
        output = grpo_loss(logprobs[:, positions], entropy=entropy[:, positions], **inputs, **self.options)
        torch.autograd.backward(output.loss)
        return output


def runs_of_rows() -> list[list[Cut]]:
    """All 32 ways to cut six rows into runs."""
    edges = [[0, *inner, ROWS] for size in range(ROWS) for inner in itertools.combinations(range(1, ROWS), size)]
    return [[(slice(start, end), EVERYTHING) for start, end in itertools.pairwise(edge)] for edge in edges]


def equal_micro_batches(number: int) -> list[Cut]:
    return [(rows.tolist(), EVERYTHING) for rows in torch.arange(ROWS).tensor_split(number)]


SCATTERED: list[Cut] = [([5, 0], EVERYTHING), ([2], EVERYTHING), ([3, 1, 4], EVERYTHING)]
WITHIN_ROWS: list[list[Cut]] = [
    [(EVERYTHING, slice(t, t + 1)) for t in range(WIDTH)],
    [(EVERYTHING, slice(0, 2)), (EVERYTHING, slice(2, WIDTH))],
    [(slice(0, 3), slice(0, 4)), (slice(3, 6), slice(0, 1)), (slice(0, 3), slice(4, 5)), (slice(3, 6), slice(1, 5))],
    [([row], slice(t, t + 1)) for row in range(ROWS) for t in range(WIDTH)],
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_any_cut_gives_the_gradient_of_one_batch(dtype: torch.dtype, ratio: Ratio, reduction: Reduction) -> None:
    update = Update(dtype, ratio, reduction)
    cuts = [*(equal_micro_batches(number) for number in (1, 2, 4)), SCATTERED, *runs_of_rows()]
    if ratio == "token":  # a sequence's ratio needs its whole row
        cuts += WITHIN_ROWS
    assert_all_the_same(update, cuts, TOLERANCE[dtype])


def assert_all_the_same(update: Update, cuts: Sequence[Sequence[Cut]], tolerance: float) -> None:
    loss, gradient, metrics = update.gradient([(EVERYTHING, EVERYTHING)])
    assert gradient.norm() > 0.01
    for cut in cuts:
        cut_loss, cut_gradient, cut_metrics = update.gradient(cut)
        assert (cut_gradient - gradient).norm() <= tolerance * gradient.norm(), cut
        assert cut_loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
        if any(positions != EVERYTHING for _, positions in cut):
            cut_metrics["rows"] = metrics["rows"]  # a row that is cut is counted in each of its parts
        assert cut_metrics == pytest.approx(metrics, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_each_micro_batch_alone_would_give_another_gradient(reduction: Reduction) -> None:
    """Why they must be those of the whole update: the mistake that the tests above rule out is a large one."""
    update = Update(torch.float64, "token", reduction)
    _, gradient, _ = update.gradient([(EVERYTHING, EVERYTHING)])
    cut = equal_micro_batches(2)
    del update.rows["token_weights"]
    update.rows["group_ids"] = GROUPS
    update.options |= {"reduction": reduction, "constant_length": WIDTH}
    _, mistaken, _ = update.gradient(cut)
    assert (mistaken / len(cut) - gradient).norm() > 0.01 * gradient.norm()
