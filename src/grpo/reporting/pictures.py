"""The report's pictures: the same numbers give the same bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from grpo.answer_metrics import Estimate
from grpo.reporting.comparison import SliceComparison
from grpo.reporting.curves import Curves
from grpo.reporting.group_statistics import GroupStatistics
from grpo.reporting.markdown import one_line

# Told apart in print and by the colour-blind: Okabe and Ito's blue and vermilion, and a grey.
BASE, TRAINED, OTHER = "#8a8a8a", "#0072b2", "#d55e00"
_RELATIONS = {"trained_on": "", "other_setting": " (not trained on)", "other_task": " (other task)"}


def draw_pictures(
    overall: SliceComparison,
    slices: Sequence[SliceComparison],
    curves: Curves,
    groups: Sequence[GroupStatistics],
    components: Sequence[str],
) -> dict[str, bytes]:
    """Every picture as PNG bytes, by file name; those without data are left out."""
    pictures = {
        "held_out.png": held_out([overall, *slices]),
        "learning.png": learning(curves, components),
        "groups.png": group_signal(curves, groups),
        "update.png": update_health(curves),
    }
    return {name: _png(figure) for name, figure in pictures.items() if figure is not None}


def held_out(comparisons: Sequence[SliceComparison]) -> Figure:
    """Sampled accuracy before and after, with intervals, a row a slice."""
    figure = Figure(figsize=(8.0, 1.3 + 0.5 * len(comparisons)), layout="constrained")
    axes = figure.add_subplot()
    for row, one in enumerate(comparisons):
        accuracy = one.metrics["sampled"]["accuracy"]
        _interval(axes, accuracy.base, row - 0.14, BASE, "base" if row == 0 else None)
        _interval(axes, accuracy.trained, row + 0.14, TRAINED, "trained" if row == 0 else None)
    names = [f"{_label(one.name)}{_RELATIONS[one.relation]}, n = {one.problems}" for one in comparisons]
    axes.set_yticks(range(len(comparisons)), names)
    axes.set_ylim(len(comparisons) - 0.5, -0.5)
    axes.axhline(0.5, color="#d0d0d0", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("correct when sampled, with intervals over problems")
    _plain(axes, grid="x")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def learning(curves: Curves, components: Sequence[str]) -> Figure | None:
    """The reward and its components by round, in training and in validation."""
    panels = [
        ("reward, mean", ["reward/mean"], ["validation/reward/mean"]),
        *((_label(name.replace("_", " ")), [f"reward/{name}"], [f"validation/reward/{name}"]) for name in components),
    ]
    panels = [(title, curves.present(own), curves.present(other)) for title, own, other in panels]
    panels = [panel for panel in panels if panel[1] or panel[2]]
    if not panels:
        return None
    figure, all_axes = _panels(len(panels), curves)
    for axes, (title, own, other) in zip(all_axes, panels, strict=True):
        _line(axes, curves, own, TRAINED, "training rollouts")
        _line(axes, curves, other, OTHER, "validation problems")
        axes.set_title(title, loc="left", fontsize="medium")
        if axes.get_ylim()[0] > 0:
            axes.set_ylim(bottom=0)
    handles, labels = max((axes.get_legend_handles_labels() for axes in all_axes), key=lambda found: len(found[0]))
    figure.legend(handles, labels, loc="outside lower right", ncols=2, frameon=False)
    return figure


def group_signal(curves: Curves, groups: Sequence[GroupStatistics]) -> Figure:
    """Which groups could teach anything, and what share of the signal each slice gave."""
    figure, (left, right) = _panels(2, curves)
    for column, color, label in (
        ("groups/mixed", TRAINED, "groups with unequal rewards"),
        ("groups/duplicates", OTHER, "repeated completions"),
    ):
        _line(left, curves, curves.present([column]), color, label)
    left.set_ylim(0, 1.04)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_title("share by round", loc="left", fontsize="medium")
    if left.lines:
        left.legend(frameon=False, fontsize="small")
    slices = [(one.slice, one) for one in groups if one.slice is not None]
    shares = [one.advantage_share for _, one in slices]
    # By place and not by name, or two names that are shortened alike would share a bar.
    bars = right.barh(range(len(slices)), shares, 0.55, color=TRAINED)
    right.set_yticks(range(len(slices)), [_label(name) for name, _ in slices])
    right.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3, fontsize="small")
    right.invert_yaxis()
    right.set_xlim(0, 1.15 * max([*shares, 0.01]))
    right.xaxis.set_visible(False)
    right.yaxis.grid(visible=False)
    right.tick_params(left=False)
    right.spines["bottom"].set_visible(False)
    right.set_title("part of the signal, the sum of |advantage|", loc="left", fontsize="medium")
    return figure


def update_health(curves: Curves) -> Figure | None:
    """What to look at when a run goes wrong: distance from the reference, gradient, lengths, endings."""
    titles = {
        "loss/kl": "KL from the reference, nats a token",
        "loss/gradient_norm": "gradient norm, before clipping",
        "length/mean": "completion length, tokens",
        "length/truncated": "share cut off at the budget",
    }
    present = curves.present(list(titles))
    if not present:
        return None
    figure, all_axes = _panels(len(present), curves)
    for axes, column in zip(all_axes, present, strict=True):
        _line(axes, curves, [column], TRAINED, column)
        axes.set_title(titles[column], loc="left", fontsize="medium")
        axes.set_ylim(bottom=0)
        if column == "length/truncated":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def _label(name: str, longest: int = 32) -> str:
    """A name from the data, short enough to leave room for the picture and never read as mathematics."""
    flat = one_line(name)
    return (flat if len(flat) <= longest else flat[: longest - 1] + "…").replace("$", r"\$")


def _panels(count: int, curves: Curves) -> tuple[Figure, list[Axes]]:
    """Small panels over the same rounds, up to three side by side, else two a row."""
    columns = count if count <= 3 else 2
    rows = -(-count // columns)
    figure = Figure(figsize=(max(3.4 * columns, 8.8), 0.3 + 2.5 * rows), layout="constrained")
    numbers = [int(row["round"]) for row in curves.rounds]
    edge = 0.04 * max(1, numbers[-1] - numbers[0])
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    for one in axes:
        _plain(one, grid="y")
        one.set_xlabel("round")
        one.set_xlim(numbers[0] - edge, numbers[-1] + edge)
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _line(axes: Axes, curves: Curves, columns: Sequence[str], color: str, label: str) -> None:
    for column in columns:
        rounds, values = curves.line(column)
        axes.plot(rounds, values, color=color, label=label, marker="o", markersize=3.5, linewidth=1.4)


def _interval(axes: Axes, one: Estimate, height: float, color: str, label: str | None) -> None:
    if one.value is None:
        return
    if one.low is not None and one.high is not None:
        axes.plot([one.low, one.high], [height, height], color=color, linewidth=2.2, solid_capstyle="round")
    # Not clipped: at 0 the axis would hide half of the dot.
    axes.plot([one.value], [height], "o", color=color, markersize=6, clip_on=False, zorder=3, label=label)


def _plain(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the font lacks: its letters show as boxes, and the page has them.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        # The file would name matplotlib's version otherwise.
        figure.savefig(sink, format="png", dpi=130, metadata={"Software": None})
    return sink.getvalue()
