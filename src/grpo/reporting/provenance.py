"""The page's last sections: by what method, from how much, and with what limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from grpo.answer_readings import STRICT
from grpo.reporting.cautions import problems_called
from grpo.reporting.files import ReportError
from grpo.reporting.finished_run import FinishedRun, drawn_tokens
from grpo.reporting.inputs import ReportInputs
from grpo.reporting.markdown import code, table
from grpo.reporting.reconciliation import complaints

# Complaints that an error lists; the others it counts.
SHOWN = 5

VERDICTS = {
    "kept": "prompt groups in the update",
    "kept_flat": "prompt groups in the update though flat (equal rewards, advantage 0)",
    "resampled": "draws of prompt groups set aside as flat, and drawn again",
    "failed_flat": "prompt groups that stayed flat and ended the run",
    "skipped_flat": "prompt groups skipped as flat (equal rewards)",
    "unscored": "prompt groups left out for lack of scores",
}
LIMITS_SECTION = """\
## What these numbers cannot say

- Not a frontier result: a small model, short procedural tasks, a short run. It shows that the method as configured \
moves this policy on these tasks, and reproduces no published score.
- Reward is not correctness. The policy was optimised for the reward; the numbers above come from a scorer declared \
apart from it, which can still share a blind spot with it. Read the samples.
- The strict reading asks for a bare answer, so part of a strict gain may be learnt form. The lenient reading and \
the rows on answered completions tell the two apart, as far as they can.
- Intervals are over problems: how much would change with other problems of the same kind. They say nothing of other \
training seeds; that takes several runs.
- Intervals are one by one. Of many slices and metrics, some will differ by chance alone.
- A gain on the slices trained on is no gain elsewhere. The slices that were not trained on stand in the tables \
whatever they say."""


def limits_section(inputs: ReportInputs) -> str:
    """What no reader may conclude; the strict reading of an evaluation may ask for more than a bare answer."""
    form = "a bare answer" if inputs.base.identity["reading"] == STRICT.path else "an answer of one form"
    return LIMITS_SECTION.replace("a bare answer", form)


def method_section(config: Mapping[str, Any]) -> str:
    """The settings as a table."""
    rows = [[code(key), code(value)] for key, value in method_settings(config)]
    return "## The settings that made the method\n\n" + table(["Setting", "Value"], rows, left=2)


def method_settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The resolved settings of seed, model and data that decide the result, by dotted name; no folders."""
    found = [("seed_everything", str(config.get("seed_everything")))]
    for section in ("model", "data"):
        found += [(key, value) for key, value in _flattened(section, config.get(section, {})) if "/" not in value]
    trainer = config.get("trainer", {})
    found += [(f"trainer.{key}", str(trainer[key])) for key in ("precision", "strategy", "devices") if key in trainer]
    return found


def _flattened(name: str, node: object) -> list[tuple[str, str]]:
    if isinstance(node, Mapping):
        return [pair for key, part in node.items() for pair in _flattened(f"{name}.{key}", part)]
    if isinstance(node, list):
        return [(name, ", ".join(str(part) for part in node))]
    return [(name.replace(".init_args", ""), "null" if node is None else str(node))]


def counts_section(inputs: ReportInputs) -> str:
    """What was drawn and what became of it."""
    rows = [*record_counts(inputs), *_flattened_counts(inputs.run.ledger)]
    text = (
        "From the record of every rollout that was drawn, and from the ledger that the run kept as it went: "
        "the two must agree."
    )
    return f"## What was counted\n\n{text}\n\n" + table(["", "Count"], [[name, f"{count:,}"] for name, count in rows])


def refuse_unreconciled(run: FinishedRun) -> None:
    """Raise where a run's record, decisions, curves, ledger and configuration say different things: one then lies."""
    found = complaints(run)
    if found:
        shown = "; ".join(found[:SHOWN]) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        raise ReportError(f"the training's files do not agree: {shown}. Run the stage train again")


def record_counts(inputs: ReportInputs) -> list[tuple[str, int]]:
    """Rollouts, tokens, and groups by what became of them."""
    run, updates = inputs.run, inputs.run.updates
    groups = {
        (row["round"], row["problem_id"], row["occurrence"], row["draw"]): updates[row["rollout_id"]]
        for row in run.rollouts
    }
    verdicts = Counter(str(update["verdict"]) for update in groups.values())
    return [
        ("rounds", len({row["round"] for row in run.rollouts})),
        ("prompt groups sampled", len(groups)),
        *((VERDICTS.get(verdict, f"prompt groups: {verdict}"), verdicts[verdict]) for verdict in sorted(verdicts)),
        ("training rollouts", len(run.rollouts)),
        ("tokens sampled in training", sum(map(drawn_tokens, run.rollouts))),
        ("tokens in the loss", sum(update["loss_tokens"] for update in run.decisions)),
        (f"{problems_called(inputs.split)} completions", len(inputs.base.answers) + len(inputs.trained.answers)),
    ]


def _flattened_counts(ledger: object) -> list[tuple[str, int]]:
    """Counts alone: a ledger may hold times too, which differ from run to run."""
    return [
        (f"ledger: {key.removeprefix('.').replace('_', ' ').replace('.', ', ')}", int(value))
        for key, value in _flattened("", ledger)
        if value.isdigit()
    ]


def identity_section(inputs: ReportInputs) -> str:
    """What exactly was compared."""
    before, after = inputs.base.identity, inputs.trained.identity
    rows = [
        ["run", str(inputs.run.run["run_id"])],
        ["base policy", before["policy_sha256"][:16]],
        ["trained policy", after["policy_sha256"][:16]],
        [f"{problems_called(inputs.split)} problems", before["problems_sha256"][:16]],
        ["evaluation seed", str(before["seed"])],
        *([name, version] for name, version in sorted(before["versions"].items())),
    ]
    return "## What was compared\n\n" + table(["", "Identity"], [[name, code(value)] for name, value in rows], left=2)
