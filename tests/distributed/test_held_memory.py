"""What a process holds of weights, gradients and optimiser state falls as docs/scaling.md says, by counted bytes."""

from __future__ import annotations

import json
import sys

import pytest
from fixtures_policy import policy_folder, problem_folder
from fixtures_processes import TESTS, together

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STRATEGIES = ("ddp", "deepspeed_1", "deepspeed_2", "deepspeed_3")
# Bytes a weight in float32 of N processes: weights, the gradients' parts, AdamW's two moments and DeepSpeed's copy.
DIVIDES_GRADIENTS = ("deepspeed_2", "deepspeed_3")


def claimed(strategy: str, n: int) -> tuple[float, float, float]:
    return {
        "ddp": (4, 4, 8),
        "deepspeed_1": (4, 4, 12 / n),
        "deepspeed_2": (4, 8 / n, 12 / n),
        "deepspeed_3": (4 / n, 4 / n, 12 / n),
    }[strategy]


@pytest.fixture(scope="module", params=[2, 4])
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """Of each process, by strategy; an update has two backward passes in each."""
    folder = tmp_path_factory.mktemp(f"of-{request.param}")
    policy_folder(folder / "policy")
    problem_folder(folder / "problems")
    command = [sys.executable, str(TESTS / "distributed" / "held_memory.py"), str(folder), *STRATEGIES]
    ended = together(command, request.param, folder / "printed", 300)
    assert not any(one.status for one in ended), "\n".join(one.output[-2000:] for one in ended)
    ranks = range(request.param)
    return {s: [json.loads((folder / f"{s}.{rank}.json").read_text()) for rank in ranks] for s in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_process_holds_what_its_stage_promises(held: dict[str, list[dict[str, int]]], strategy: str) -> None:
    for counted in held[strategy]:
        assert counted["passes"] >= 4  # of two updates
        all_weights = counted["all_weights"]
        measured = [counted[part] / all_weights for part in ("weights", "gradients", "optimizer")]
        print(strategy, len(held[strategy]), [f"{value:.2f}" for value in measured])
        weights, gradients, optimizer = claimed(strategy, len(held[strategy]))
        assert measured[0] == pytest.approx(weights, rel=0.02)
        assert measured[2] == pytest.approx(optimizer, rel=0.02)
        if strategy in DIVIDES_GRADIENTS:
            # A weight on its way, and weights on the border of two parts, which both hold.
            passing = 3 * 4 * counted["largest_weight"] / all_weights
            assert gradients * 0.9 <= measured[1] <= gradients + passing
        else:
            assert measured[1] == pytest.approx(gradients, rel=0.02)
