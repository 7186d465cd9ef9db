"""Draws the pictures of these pages, from the functions that training uses.

``python docs/examples/draw.py`` writes them beside this file. The same version of matplotlib gives the same bytes.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from grpo.maths.group_advantages import group_advantages
from grpo.maths.grpo_loss import grpo_loss, token_weights

# Told apart in print and by the colour-blind: Okabe and Ito's blue, vermilion and green, and a grey.
BLUE, VERMILION, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a8a8a"
STYLE = {
    "svg.hashsalt": "grpo",
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(folder: Path) -> None:
    """Every picture as an SVG file in ``folder``."""
    pictures = {
        "clipped_objective": clipped_objective,
        "token_weights": weights_by_length,
        "kl_estimators": kl_estimators,
        "advantage_by_successes": advantage_by_successes,
        "flat_share": flat_share,
    }
    for name, picture in pictures.items():
        with matplotlib.rc_context(STYLE):
            picture().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


def clipped_objective() -> Figure:
    """What one token adds to the objective, against its ratio; straight between the corners of the clip range."""
    figure, (better, worse) = _panels(2)
    for axes, sign in ((better, 1.0), (worse, -1.0)):
        corners = [0.01, 0.8, 1.0, 1.2, 2.0]
        axes.axvspan(0.8, 1.2, color="#eeeeee", linewidth=0)
        axes.plot(corners, [sign * ratio for ratio in corners], color=GREY, linestyle=":")
        axes.plot(corners, [_objective(ratio, sign) for ratio in corners], color=BLUE, linewidth=2)
        axes.set_xlim(0, 2)
        axes.set_xlabel("ratio ρ (no unit)")
    better.set_ylim(0, 2.1)
    worse.set_ylim(-2.1, 0)
    better.set_title("A > 0: better than its group")
    worse.set_title("A < 0: worse than its group")
    better.set_ylabel("objective of the token, in units of |A|")
    better.text(1.25, 1.05, "cut: no gradient", color=BLUE)
    better.text(1.58, 1.72, "ρ A", color=GREY, ha="right")
    worse.text(0.04, -0.97, "cut: no gradient", color=BLUE)
    worse.text(0.42, -0.3, "ρ A", color=GREY)
    worse.text(1.93, -1.2, "never cut\non this side", color=BLUE, ha="right")
    for axes in (better, worse):
        axes.text(1.0, axes.get_ylim()[0] + 0.06, "1 ± 0.2", color=GREY, ha="center", fontsize=8)
    return figure


def weights_by_length() -> Figure:
    """What a token and a response count in an update of two responses, 2 and 8 tokens long."""
    figure, (one, whole) = _panels(2)
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    weights = {
        "response_mean": token_weights(mask, reduction="response_mean"),
        "token_mean": token_weights(mask, reduction="token_mean"),
        "constant": token_weights(mask, reduction="constant", constant_length=8),
    }
    for axes, values in (
        (one, [w[:, 0].tolist() for w in weights.values()]),
        (whole, [w.sum(dim=1).tolist() for w in weights.values()]),
    ):
        for row, (colour, label) in enumerate(((BLUE, "2 tokens long"), (VERMILION, "8 tokens long"))):
            places = [place + (row - 0.5) * 0.36 for place in range(3)]
            bars = axes.bar(places, [pair[row] for pair in values], 0.34, color=colour, label=label)
            axes.bar_label(bars, fmt=lambda weight: str(Fraction(weight).limit_denominator(100)), fontsize=8, padding=1)
        axes.set_xticks(range(3), weights)
        axes.tick_params(axis="x", length=0)
        axes.margins(y=0.12)
    one.set_title("one token")
    whole.set_title("the whole response")
    one.set_ylabel("weight in the update (no unit)")
    one.legend(frameon=False)
    return figure


def kl_estimators() -> Figure:
    """The three estimates against the log-ratio of one token."""
    figure, (axes,) = _panels(1)
    d = torch.linspace(-2.0, 2.0, 81, dtype=torch.float64)
    for name, colour in (("k1", GREY), ("k2", VERMILION), ("k3", BLUE)):
        estimates = [_kl(float(value), name) for value in d]
        axes.plot(d, estimates, color=colour, linewidth=2)
        axes.text(2.06, estimates[-1], name, color=colour, va="center")
    axes.axhline(0.0, color="#d0d0d0", linewidth=0.8, zorder=0)
    axes.set_xlabel("log-ratio d = log π_ref − log π of the token (nats)")
    axes.set_ylabel("estimate of the KL divergence (nats)")
    return figure


def advantage_by_successes() -> Figure:
    """What a success and a failure get, by how many of the eight succeeded."""
    figure, (axes,) = _panels(1)
    counts = list(range(1, 8))
    advantages = group_advantages(torch.tensor([[1.0] * count + [0.0] * (8 - count) for count in counts]))
    axes.axhline(0.0, color="#d0d0d0", linewidth=0.8, zorder=0)
    axes.plot(counts, advantages[:, 0], color=BLUE, marker="o")
    axes.plot(counts, advantages[:, -1], color=VERMILION, marker="o")
    axes.text(1.45, 2.45, "each success", color=BLUE)
    axes.text(6.55, -2.6, "each failure", color=VERMILION, ha="right")
    axes.set_xticks(counts)
    axes.set_xlabel("successes among the 8 completions of the prompt")
    axes.set_ylabel("advantage (no unit)")
    return figure


def flat_share() -> Figure:
    """The chance that all completions of a prompt earn the same, by group size."""
    figure, (axes,) = _panels(1)
    sizes = [2, 4, 8, 16, 32, 64]
    for success, colour, place in (
        (0.5, GREEN, (2.2, 0.46)),
        (0.2, BLUE, (4.3, 0.41)),
        (0.05, VERMILION, (16.8, 0.45)),
        (0.01, GREY, (16.8, 0.87)),
    ):
        axes.plot(sizes, [success**g + (1 - success) ** g for g in sizes], color=colour, marker="o")
        axes.text(*place, f"{success:.0%}", color=colour)
    axes.set_title("by how often the policy solves the prompt")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(-0.04, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("group size (completions of a prompt)")
    axes.set_ylabel("chance of a flat group")
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.7 * count if count > 1 else 5.2, 3.1), layout="constrained")
    return figure, [figure.add_subplot(1, count, place + 1) for place in range(count)]


def _objective(ratio: float, advantage: float) -> float:
    policy = torch.tensor([[ratio]], dtype=torch.float64).log()
    return -grpo_loss(policy, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1)).loss.item()


def _kl(d: float, estimator: str) -> float:
    reference = torch.tensor([[d]], dtype=torch.float64)
    policy = torch.zeros(1, 1, dtype=torch.float64)
    output = grpo_loss(
        policy, policy, torch.zeros(1), torch.ones(1, 1), reference_logprobs=reference, kl_estimator=estimator
    )
    return output.metrics["kl_sum"].item()


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
