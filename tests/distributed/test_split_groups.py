"""Several processes that draw parts of every group make the groups, the advantages and the updates of one process."""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from fixtures_processes import SECONDS, STRATEGIES, environment, run, table, together, weights, written_config

from grpo.maths.group_advantages import group_advantages
from grpo.reporting.finished_run import read_run
from grpo.reporting.reconciliation import complaints
from tests.distributed import train_each as script
from tests.distributed.train_each import train_each

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LETTERS = {
    "lower_case": {"check": "fixtures_policy.starts_with_a_letter", "limit_seconds": None},
}


@dataclass(frozen=True)
class Case:
    """A training, and over how many processes its groups are split."""

    groups: int
    size: int
    processes: int = 2
    strategy: str = "ddp"
    model: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config(self, folder: Path, processes: int, split: bool) -> str:
        round_ = {"group_size": self.size, "split_groups": split} | self.model.get("round", {})
        strategy = STRATEGIES[self.strategy] if processes > 1 else "auto"
        sampling = {"max_new_tokens": 12}
        model = {"sampling": sampling} | self.model | {"round": round_}
        return written_config(folder, strategy, processes, model, data={"groups_per_round": self.groups})


def reduced(name: str, **loss: Any) -> Case:
    """Fifteen completions: eight in the one process, seven in the other, three of a group in either."""
    return Case(3, 5, model={"loss": {"reduction": name, "mask_truncated": True} | loss})


AGAIN = {"flat_groups": "resample", "max_draws": 4, "minibatches": 2, "epochs": 2}
CASES = {
    "response_mean": reduced("response_mean"),
    "token_mean": reduced("token_mean"),
    "group_mean": reduced("group_mean"),
    "constant": reduced("constant", constant_length=12),
    "one_group": Case(1, 4, model={"round": {"minibatches": 2, "minibatch_split": "rows"}}),
    "drawn_again": Case(3, 3, model={"round": AGAIN, "rewards": LETTERS, "loss": {"reduction": "group_mean"}}),
    "kept_flat": Case(2, 3, model={"round": {"flat_groups": "keep"}, "rewards": LETTERS}),
    "three_processes": Case(1, 8, processes=3, strategy="deepspeed_2", model={"optimizer": {"micro_batch_rows": 1}}),
    "more_processes_than_members": Case(1, 2, processes=3, strategy="deepspeed_3"),
}


@dataclass(frozen=True)
class Outcome:
    """Output folders: of one process with whole groups, and of several that split them."""

    one: Path
    many: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """By case; those of as many processes go through the same processes."""
    place = tmp_path_factory.mktemp("split")
    for name, case in CASES.items():
        (place / name).mkdir()
        train_each([case.config(place / name / "one", 1, split=False)])
    for processes in {case.processes for case in CASES.values()}:
        alike = {name: case for name, case in CASES.items() if case.processes == processes}
        configs = [case.config(place / name / "many", processes, split=True) for name, case in alike.items()]
        command = [sys.executable, script.__file__, *configs]
        ended = together(command, processes, place / f"printed-{processes}", SECONDS)
        assert [one.status for one in ended] == [0] * processes, "\n".join(one.output[-3000:] for one in ended)
    return {name: Outcome(place / name / "one" / "output", place / name / "many" / "output") for name in CASES}


def metrics(output: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((output / "metrics.csv").read_text().splitlines()))


def ledger(output: Path) -> Any:
    return json.loads((output / "run.json").read_text())["ledger"]


def apart(one: Path, other: Path) -> float:
    """The distance of two runs' weights, in units of how far the first has moved."""
    moved = (weights(one) - weights(one.parent)).norm()
    return float((weights(other) - weights(one)).norm() / moved)


@pytest.mark.parametrize("name", CASES)
def test_processes_that_split_groups_draw_and_compare_as_one(trained: dict[str, Outcome], name: str) -> None:
    """The same completions, scores, verdicts and advantages; every one recorded once, by the process that drew it."""
    runs = trained[name]
    alone, together = table(runs.one, "rollouts"), table(runs.many, "rollouts")
    assert together.keys() == alone.keys()
    for rollout, row in alone.items():
        for column in ("completion_tokens", "reward", "group_id", "member", "draw"):
            assert together[rollout][column] == row[column], column
    decided = table(runs.many, "updates")
    for rollout, row in table(runs.one, "updates").items():
        for column in ("verdict", "verdict_reason", "centred", "advantage", "loss_tokens"):
            assert decided[rollout][column] == row[column], column
    assert ledger(runs.many) == ledger(runs.one)
    assert not complaints(read_run(runs.many))


@pytest.mark.parametrize("name", CASES)
def test_processes_that_split_groups_make_the_updates_of_one(trained: dict[str, Outcome], name: str) -> None:
    runs = trained[name]
    assert apart(runs.one, runs.many) < 0.01
    for ours, theirs in zip(metrics(runs.many), metrics(runs.one), strict=True):
        assert ours.keys() == theirs.keys()
        for metric in [metric for metric in ours if ours[metric] and not metric.startswith("seconds/")]:
            assert float(ours[metric]) == pytest.approx(float(theirs[metric]), rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("name", CASES)
def test_a_groups_members_lie_in_several_processes_evenly(trained: dict[str, Outcome], name: str) -> None:
    case = CASES[name]
    files = sorted((trained[name].many / "record" / "rollouts").iterdir())
    assert len(files) == 2 * case.processes
    firsts: defaultdict[int, list[int]] = defaultdict(list)
    for file in files:
        rows = [row for row in pq.read_table(file).to_pylist() if row["draw"] == 0]
        firsts[int(file.name.split("-")[1])].append(len(rows))
    for counts in firsts.values():
        assert sum(counts) == case.groups * case.size
        assert max(counts) - min(counts) <= 1
    drawn_again = any(row["draw"] for row in table(trained[name].many, "rollouts").values())
    assert drawn_again is (name == "drawn_again")


def test_statistics_of_a_processs_own_part_would_be_others(trained: dict[str, Outcome]) -> None:
    """So that the comparison of advantages can fail."""
    folder = trained["token_mean"].many / "record"
    decided = table(folder.parent, "updates")
    parts: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for file in sorted((folder / "rollouts").iterdir()):
        for row in pq.read_table(file).to_pylist():
            parts[file.name, row["group_id"]].append(row)
    differences = []
    for rows in parts.values():
        assert 2 <= len(rows) <= 3
        own = group_advantages(torch.tensor([[row["reward"] for row in rows]], dtype=torch.float64))[0].tolist()
        recorded = [decided[row["rollout_id"]]["advantage"] for row in rows]
        differences += [abs(a - b) for a, b in zip(own, recorded, strict=True)]
    assert sum(difference > 0.1 for difference in differences) > len(differences) / 2


@pytest.mark.parametrize("other", ["response_mean", "token_mean", "constant"])
def test_the_comparison_of_weights_tells_reductions_apart(trained: dict[str, Outcome], other: str) -> None:
    assert apart(trained["group_mean"].one, trained[other].many) > 0.01


def test_fewer_groups_than_processes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    config = CASES["one_group"].config(tmp_path / "run", 2, split=False)
    printed, code = run([sys.executable, "-m", "grpo", "train", "--config", config], environment())
    assert code != 0
    assert "data.groups_per_round is 1, which 2 processes cannot share evenly: make it 2, or set" in printed
    assert "model.round.split_groups to true" in printed
