"""Every configuration that ships is parsed and run for one step, with the tiny policy in place of a larger one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from grpo import evaluate, make_data, policy, prepare, report, train

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
TINY = ["--source.steps", "2", "--source.rows", "4"]
ONE_ROUND = ["--data.rounds", "1", "--data.groups_per_round", "2", "--data.validation_problems", "2"]
ONE_ROUND += ["--model.round.group_size", "2"]
DATA_CONFIG = (CONFIGS / "data.yaml").read_text(encoding="utf-8")
ONE_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto", "--trainer.precision=32-true"]
# What each says about itself, in the record of the run.
METHODS = {
    "calculator": ("sampling.tools.available.calculator.class_path", "grpo.rollouts.tools.Calculator"),
    "grpo_original": ("round.flat_groups", "keep"),
    "dr_grpo": ("loss.reduction", "constant"),
    "dapo": ("round.flat_groups", "resample"),
    "gspo": ("loss.ratio", "sequence"),
}


def _two_processes(strategy: str, **settings: object) -> list[str]:
    sharded = {"class_path": f"grpo.training.strategies.{strategy}", "init_args": settings}
    return [
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.precision=32-true",
        f"--trainer.strategy={json.dumps(sharded)}",
    ]


ON_CPU = "CPUDeepSpeedStrategy"
TWO_PROCESSES = {
    "eight_gpu_fsdp": _two_processes("FullyShardedStrategy"),
    "eight_gpu_zero2": _two_processes(ON_CPU, stage=2),
    "eight_gpu_zero3": _two_processes(ON_CPU, stage=3),
    "eight_gpu_zero3_offload": _two_processes(ON_CPU, stage=3, offload_optimizer=True, offload_parameters=True),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's configs and data with a tiny policy and prepared problems, in a folder of their own."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(CONFIGS, folder / "configs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_data.main(["--config", "configs/data.yaml"])
        prepare.main(["--config", "configs/prepare.yaml"])
        policy.main(["--config", "configs/policy.yaml", "--config", "configs/examples/tiny_policy.yaml", *TINY])
    return folder


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return workplace


def train_arguments(profile: str) -> list[str]:
    return ["--config", "configs/train.yaml", "--config", f"configs/profiles/{profile}.yaml", *ONE_ROUND]


def test_each_config_stands_in_a_test() -> None:
    examples = {"tiny_policy", "hub_policy", "folder_policy", "gsm8k", "humaneval", *METHODS}
    examples |= {"gsm8k_evaluate", "humaneval_evaluate"}  # tests/test_evaluate.py
    stages = {"data", "prepare", "policy", "train", "rewards", "evaluate", "report"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == stages
    assert {path.stem for path in (CONFIGS / "examples").glob("*.yaml")} == examples


def test_the_scorer_that_prepare_proves_is_the_one_that_evaluates() -> None:
    prepared, evaluated = (yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("prepare", "evaluate"))
    assert prepared["scorer"] == evaluated["scorer"]


def test_the_data_config_makes_the_versioned_problems(workplace: Path) -> None:
    """The bytes under version control are those that the config makes."""
    versioned = REPOSITORY / "data" / "problems.jsonl"
    if not versioned.is_file():
        pytest.skip("data/ is not here: `make data` fetches it")
    if not {json.loads(line)["slice"] for line in versioned.read_text(encoding="utf-8").splitlines()} & set(
        yaml.safe_load(DATA_CONFIG)["slices"]
    ):
        pytest.skip("data/ is not made by configs/data.yaml: it holds none of its slices")
    assert (workplace / "data" / "problems.jsonl").read_bytes() == versioned.read_bytes()


@pytest.mark.parametrize("profile", sorted(path.stem for path in (CONFIGS / "profiles").glob("*.yaml")))
def test_a_profile_trains_for_a_round(profile: str, inside: Path) -> None:
    train.main([*train_arguments(profile), *ONE_CPU, "--output", f"build/{profile}"])
    rollouts = pq.read_table(inside / "build" / profile / "record" / "rollouts")
    assert rollouts.num_rows == 2 * 2
    config = yaml.safe_load((inside / "build" / profile / "policy" / "resolved_config.yaml").read_text())
    assert config["model"]["loss"]["kl_beta"] == 0.04


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_for_a_round(method: str, inside: Path) -> None:
    extra = ["--config", f"configs/examples/{method}.yaml", "--output", f"build/{method}"]
    train.main([*train_arguments("one_cpu"), *extra])
    record = inside / "build" / method / "record"
    rollouts = {row["rollout_id"] for row in pq.read_table(record / "rollouts").to_pylist()}
    assert rollouts == {row["rollout_id"] for row in pq.read_table(record / "updates").to_pylist()}
    config = yaml.safe_load((inside / "build" / method / "policy" / "resolved_config.yaml").read_text())
    path, value = METHODS[method]
    found = config["model"]
    for part in path.split("."):
        found = found[part]
    assert found == value


@pytest.mark.distributed
@pytest.mark.parametrize("profile", TWO_PROCESSES)
def test_a_large_profile_trains_for_a_round_on_two_processes(profile: str, inside: Path) -> None:
    command = [sys.executable, "-m", "grpo", "train", *train_arguments(profile), *TWO_PROCESSES[profile]]
    done = subprocess.run(
        [*command, "--output", f"build/{profile}"], cwd=inside, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rollouts = pq.read_table(inside / "build" / profile / "record" / "rollouts").to_pylist()
    assert len(rollouts) == 2 * 2
    assert len({row["rollout_id"] for row in rollouts}) == 4


def test_both_policies_are_evaluated_and_reported(inside: Path) -> None:
    train.main([*train_arguments("one_cpu"), "--output", "build/train"])
    common = ["--config", "configs/evaluate.yaml", "--samples_per_problem", "1", "--pass_at_k", "[1]"]
    common += ["--intervals.resamples", "100"]
    for name, folder in (("base", "build/policy"), ("trained", "build/train/policy")):
        evaluate.main([*common, "--policy", folder, "--name", name])
    report.main(["--config", "configs/report.yaml"])
    page = (inside / "report" / "report.md").read_text()
    base = json.loads((inside / "report" / "evaluation" / "base.json").read_text())
    assert base["overall"]["problems"] > 200
    assert "kl_beta" in page
    for picture in (inside / "report" / "pictures").glob("*.png"):
        assert f"pictures/{picture.name}" in page
