"""From logits and a uniform number to a token, cut or whole."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_policy import key
from scipy.stats import chisquare
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo.records import RolloutKey
from grpo.rollouts.draws import distribution_cuts, draw_cut_tokens, draw_tokens, keyed_uniforms


def test_uniforms_of_a_longer_sequence_begin_with_the_shorter() -> None:
    assert keyed_uniforms(key(), 50)[:7].tolist() == keyed_uniforms(key(), 7).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"purpose": "validation"},
        {"round": 1},
        {"problem_id": "q"},
        {"template_id": "other"},
        {"occurrence": 1},
        {"member": 1},
        {"draw": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_the_key_counts(change: dict[str, object]) -> None:
    other: RolloutKey = replace(key(), **change)  # type: ignore[arg-type]
    assert not set(keyed_uniforms(key(), 8)) & set(keyed_uniforms(other, 8))


def test_uniforms_over_many_keys_are_uniform_at_every_position() -> None:
    numbers = np.stack([keyed_uniforms(key().of_member(member), 3) for member in range(2000)])
    for position in range(3):
        counts, _ = np.histogram(numbers[:, position], bins=20, range=(0, 1))
        assert chisquare(counts).pvalue > 1e-3


def draw(logits: list[float], uniform: float, temperature: float = 1.0) -> tuple[int, float]:
    tokens, logprobs = draw_tokens(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), temperature)
    return int(tokens), float(logprobs)


def test_temperature_divides_the_logits_once() -> None:
    # softmax([4, 2, 0]): log of 1 / (1 + e^-2 + e^-4)
    assert draw([2.0, 1.0, 0.0], 0.0, 0.5) == (0, pytest.approx(-0.142932, abs=1e-6))


def test_a_very_low_temperature_stays_finite() -> None:
    assert draw([2.0, 1.0, 0.0], 0.999, 1e-4) == (0, 0.0)


def test_temperature_zero_takes_the_largest_logit() -> None:
    token, logprob = draw([0.0, 2.0, 1.0], 0.999, 0.0)
    assert token == 1
    assert logprob == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)), abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05], dtype=torch.float64)
    uniforms = torch.tensor([keyed_uniforms(key().of_member(m), 1)[0] for m in range(4000)], dtype=torch.float64)
    logits = (probabilities.log() * 0.7).float().expand(4000, -1)
    tokens, logprobs = draw_tokens(logits, uniforms, 0.7)
    counts = torch.bincount(tokens, minlength=5)
    assert counts[2] == 0
    possible = probabilities > 0
    assert chisquare(counts[possible], 4000 * probabilities[possible]).pvalue > 1e-3
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], atol=1e-6, rtol=1e-6)


JUST_BELOW_ONE = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize("size", [3, 100, 5000])
@pytest.mark.parametrize("seed", range(8))
def test_the_ends_of_the_uniform_range_never_fall_on_impossible_tokens(size: int, seed: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    possible = slice(size // 3, 2 * size // 3)
    cut = torch.full((size,), -math.inf)
    cut[possible] = logits[possible]
    first, last = size // 3, 2 * size // 3 - 1
    assert draw(cut.tolist(), 0.0)[0] == first
    assert draw(cut.tolist(), JUST_BELOW_ONE)[0] == last


def test_each_uniform_falls_in_its_tokens_share() -> None:
    logits = [math.log(0.25), math.log(0.25), math.log(0.5)]
    assert [draw(logits, u)[0] for u in (0.0, 0.2499, 0.2501, 0.4999, 0.5001, JUST_BELOW_ONE)] == [0, 0, 1, 1, 2, 2]


def test_half_precision_logits_give_single_precision_logprobs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    _, logprobs = draw_tokens(logits, torch.zeros(1, dtype=torch.float64), 0.5)
    assert logprobs.dtype == torch.float32
    assert float(logprobs) == pytest.approx(-0.142932, abs=1e-6)


def cut_probabilities(probabilities: list[float], temperature: float = 1.0, **cuts: float) -> list[float]:
    """The cut distribution, read off the shares of the uniform range that fall to each token."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float() * temperature
    numbers = (torch.arange(7000, dtype=torch.float64) + 0.5) / 7000
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cuts
    tokens, logprobs, cut = draw_cut_tokens(
        logits.expand(7000, -1),
        numbers,
        temperature,
        distribution_cuts(**settings),  # type: ignore[arg-type]
    )
    torch.testing.assert_close(logprobs.exp(), torch.tensor(probabilities)[tokens])
    shares = torch.bincount(tokens, minlength=len(probabilities)) / 7000
    torch.testing.assert_close(cut.exp(), shares[tokens], atol=2e-4, rtol=0)
    return shares.tolist()


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.91}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.24}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.26}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.76}, [0, 1, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # of the two that top-k leaves, the first has 4/7: more than top-p asks for (before top-k it had less)
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_k": 3, "min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.95, "min_p": 0.26}, [0, 4 / 9, 2 / 9, 3 / 9]),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_cut_distribution_is_the_one_worked_out_by_hand(
    cuts: dict[str, float], expected: list[float], temperature: float
) -> None:
    assert cut_probabilities([0.1, 0.4, 0.2, 0.3], temperature, **cuts) == pytest.approx(expected, abs=2e-4)


def test_equally_likely_tokens_at_the_edge() -> None:
    """Top-p keeps the lower ids, so that every machine keeps the same; top-k keeps them all."""
    even = [0.25] * 4
    assert cut_probabilities(even, top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0])
    assert cut_probabilities(even, top_k=2) == pytest.approx(even)


@pytest.mark.parametrize("cuts", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_the_cuts_are_those_of_transformers(cuts: dict[str, float]) -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)) * 2
    warpers = LogitsProcessorList()
    if "top_k" in cuts:
        warpers.append(TopKLogitsWarper(int(cuts["top_k"])))
    if "top_p" in cuts:
        warpers.append(TopPLogitsWarper(cuts["top_p"]))
    if "min_p" in cuts:
        warpers.append(MinPLogitsWarper(cuts["min_p"]))
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cuts
    ours = distribution_cuts(**settings)(torch.LongTensor(), logits)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, warpers(torch.LongTensor(), logits), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("uniform", [0.0, JUST_BELOW_ONE])
def test_a_cut_draw_always_has_positive_probability(seed: int, uniform: float) -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(seed)) * 30
    cuts = distribution_cuts(20, 0.9, 0.01)
    tokens, logprobs, cut = draw_cut_tokens(logits, torch.full((50,), uniform, dtype=torch.float64), 1.0, cuts)
    kept = cuts(torch.LongTensor(), torch.log_softmax(logits, -1))
    assert torch.isfinite(kept.gather(-1, tokens[:, None])).all()
    assert torch.isfinite(cut).all()
    assert (cut >= logprobs).all()
