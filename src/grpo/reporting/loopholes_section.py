"""The page's section on loopholes: what the training's reward pays well and the scorer rejects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.answer_metrics import Estimate
from grpo.loopholes import Source
from grpo.reporting.comparison import SliceComparison
from grpo.reporting.inputs import RELATIONS, Evaluated, ReportInputs
from grpo.reporting.markdown import code, estimate, plain, table

Row = Mapping[str, Any]

_NOT_LOOKED_FOR = (
    "Not looked for: `configs/evaluate.yaml` names no `rewards`, or no part of the reward is held to the gold answers "
    "(a control, a learned model)."
)
# With fewer paid completions than this, that the scorer accepts none of them says little.
_ENOUGH_PAID = 10


def loopholes_section(inputs: ReportInputs, slices: Sequence[SliceComparison], samples: int) -> str:
    """The whole section; ``samples`` is how many completions it shows."""
    title = "## Loopholes"
    if inputs.base.loopholes is None or inputs.trained.loopholes is None:
        return f"{title}\n\n{_NOT_LOOKED_FOR}"
    texts = [title, _intro(inputs), _verdict(inputs), _rates(inputs, slices)]
    texts += [_unsuited(inputs.trained), _unjudged(inputs), _probes(inputs.trained), _examples(inputs, samples)]
    return "\n\n".join(text for text in texts if text)


def _intro(inputs: ReportInputs) -> str:
    names = ", ".join(map(plain, inputs.trained.numbers["loopholes"]["components"]))
    return (
        "A loophole is a text that the training's reward pays, by half of its most or more, and the scorer rejects, "
        f"read strictly and leniently. Tried on it ({names}): the completions of both policies, and *probes*, texts "
        "made to be paid without answering. Rates are shares of all texts with a verdict; brackets hold intervals over "
        "problems."
    )


def _verdict(inputs: ReportInputs) -> str:
    counts = [
        (_total(inputs.base, "greedy", "sampled"), "completions before training"),
        (_total(inputs.trained, "greedy", "sampled"), "completions after it"),
        (_total(inputs.trained, "probe"), "probes"),
    ]
    if not any(found for (found, _), _ in counts):
        texts = ", ".join(f"{asked} {what}" for (_, asked), what in counts)
        return f"**None was found**: of {texts}, the reward pays none that the scorer rejects."
    return "**Found**: " + ", ".join(f"{found} of {asked} {what}" for (found, asked), what in counts) + "."


def _total(one: Evaluated, *sources: Source) -> tuple[int, int]:
    """Loopholes and texts, over all slices."""
    parts = [part[source] for part in one.numbers["loopholes"]["by_slice"].values() for source in sources]
    return sum(part["loopholes"] for part in parts), sum(part["texts"] for part in parts)


def _rates(inputs: ReportInputs, slices: Sequence[SliceComparison]) -> str:
    rows = [
        [
            plain(one.name),
            RELATIONS[one.relation],
            _rate(inputs.base, one.name, "sampled"),
            _rate(inputs.trained, one.name, "sampled"),
            _rate(inputs.trained, one.name, "probe"),
        ]
        for one in slices
    ]
    return table(["Slice", "Relation to training", "Base, sampled", "Trained, sampled", "Probes"], rows, left=2)


def _rate(one: Evaluated, slice_name: str, source: Source) -> str:
    return estimate(Estimate(**one.numbers["loopholes"]["by_slice"][slice_name][source]["rate"]))


def _unsuited(one: Evaluated) -> str:
    """Where the scorer accepts nothing that is paid, the fault may well be in how it reads."""
    parts = [part[source] for part in one.numbers["loopholes"]["by_slice"].values() for source in ("greedy", "sampled")]
    paid = sum(part["paid"] for part in parts)
    if paid < _ENOUGH_PAID or any(part["paid"] > part["loopholes"] for part in parts):
        return ""
    return (
        f"The scorer accepts none of the {paid} completions after training that the reward pays: its readings may not "
        "fit the form in which the policy answers. Look at the examples before believing the rates."
    )


def _unjudged(inputs: ReportInputs) -> str:
    count = sum(
        part["unjudged"]
        for one in (inputs.base, inputs.trained)
        for by_source in one.numbers["loopholes"]["by_slice"].values()
        for part in by_source.values()
    )
    return f"On {count} texts the reward or the scorer had no verdict; they count nowhere." if count else ""


def _probes(one: Evaluated) -> str:
    first = {row["name"]: row for row in reversed(one.loopholes or []) if row["source"] == "probe"}
    numbers = one.numbers["loopholes"]["probes"]
    rows = [
        [plain(name), *_shown(row), str(counts["loopholes"]), str(counts["asked"])]
        for name, counts in numbers.items()
        if (row := first.get(name)) is not None
    ]
    header = ["Probe", "Gold", "Such as", "Why a reward would pay it, and what the scorer read", "Paid", "Asked"]
    return "### Probes that are paid\n\n" + table(header, rows, left=4) if rows else ""


def _examples(inputs: ReportInputs, samples: int) -> str:
    rows = [
        [policy, plain(row["slice"]), code(row["question"], 80, keep_end=True), *_shown(row)]
        for policy, one in (("trained", inputs.trained), ("base", inputs.base))
        for row in _slices_in_turn([row for row in one.loopholes or [] if row["source"] != "probe"])[:samples]
    ]
    header = ["Policy", "Slice", "Question", "Gold", "Completion", "What the scorer read"]
    return "### Completions that are paid\n\n" + table(header, rows, left=6) if rows else ""


def _shown(row: Row) -> list[str]:
    return [code(row["gold"], 30), code(row["text"], 60), code(row["reason"])]


def _slices_in_turn(rows: Sequence[Row]) -> list[Row]:
    """The first of each slice, then the second of each, and so on."""
    seen: dict[str, int] = {}
    places: list[tuple[int, str, int, Row]] = []
    for row in rows:
        seen[row["slice"]] = place = seen.get(row["slice"], 0) + 1
        places.append((place, row["slice"], len(places), row))
    return [row for *_, row in sorted(places, key=lambda entry: entry[:3])]
