"""The recipes of ``launch/``: they parse, hand signals on, tell a finished run from an interrupted one, and train."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures_policy import train_config, write_config

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
# A command that takes some seconds, or says that it was asked to end. It begins when it can be asked.
WAITS = "trap 'echo asked; exit 0' TERM; BEGIN; for _ in $(seq 50); do sleep 0.1; done"


def environment(**values: str) -> dict[str, str]:
    """This process's, with the scripts' own variables as given alone and this interpreter's tools first."""
    own = {"OUTPUT", "BRING", "SEND", "SEND_SECONDS", "GPUS", "HOSTS", "HOST_RANK", "HEAD", "PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    tools = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return kept | {"PATH": tools, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | values


def keep(folder: Path, command: str, **values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", LAUNCH / "keep.sh", "bash", "-c", command],
        cwd=folder, env=environment(**values), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_stops_at_the_first_failure(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_finished_run_and_a_failed_one_keep_their_status(tmp_path: Path) -> None:
    assert keep(tmp_path, "sleep 0.1; mkdir -p out; touch out/run.json", OUTPUT="out").returncode == 0
    assert keep(tmp_path, "exit 3", OUTPUT="out").returncode == 3


def test_a_run_that_ends_before_it_is_finished_is_to_be_tried_again(tmp_path: Path) -> None:
    """An older run's result stands there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").touch()
    time.sleep(0.1)
    done = keep(tmp_path, "true", OUTPUT="out")
    assert done.returncode == 75
    assert "the run is not finished" in done.stderr
    assert keep(tmp_path, "true", OUTPUT="out", HOST_RANK="1").returncode == 0  # another host writes it


def test_the_signal_goes_on_to_the_command(tmp_path: Path) -> None:
    command = ["bash", LAUNCH / "keep.sh", "bash", "-c", WAITS.replace("BEGIN", "echo begun")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "asked\n"
        assert process.wait(30) == 75


def test_state_is_brought_and_sent(tmp_path: Path) -> None:
    """Sent while the command runs, and once more when it has ended, however it did."""
    bucket = tmp_path / "bucket"
    (bucket / "runs").mkdir(parents=True)
    (bucket / "runs" / "state").write_text("1")
    settings = {"BRING": "cp -r bucket/runs .", "SEND": "cp -r runs bucket; echo >> sent", "SEND_SECONDS": "0.2"}
    done = keep(tmp_path, "grep -q 1 runs/state && echo 2 > runs/state; sleep 1; exit 4", **settings)
    assert done.returncode == 4, done.stderr
    assert (bucket / "runs" / "state").read_text() == "2\n"
    assert len((tmp_path / "sent").read_text()) >= 2


def test_sending_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    done = keep(tmp_path, "sleep 0.5; exit 4", SEND="false", SEND_SECONDS="0.1")
    assert done.returncode == 4
    assert "SEND failed" in done.stderr


def stub(folder: Path, name: str, text: str) -> None:
    """A program that stands in for one of the cluster's."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def slurm(folder: Path, step: str, told: signal.Signals | None) -> tuple[int, list[str]]:
    """Run the batch script against stand-ins for SLURM's programs; gives its status and what they were called with."""
    tools = folder / "tools"
    step = step.replace("BEGIN", "echo $$ > pid").replace("exit 0", "exit 75")
    stub(tools, "srun", f'echo "srun $*" >> calls; {step}')
    stub(tools, "scancel", 'echo "scancel $*" >> calls; kill -TERM "$(cat pid)"')
    stub(tools, "scontrol", 'echo "scontrol $*" >> calls; echo node0')
    variables = environment(
        SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[0-1]"
    )
    variables["PATH"] = f"{tools}{os.pathsep}{variables['PATH']}"
    with subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", "--config", "a b"], env=variables) as process:
        if told is not None:
            deadline = time.monotonic() + 30
            while not (folder / "pid").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            process.send_signal(told)
        status = process.wait(60)
    return status, (folder / "calls").read_text().splitlines()


def test_slurm_puts_a_job_back_before_its_time_is_up(tmp_path: Path) -> None:
    status, calls = slurm(tmp_path, WAITS, signal.SIGUSR1)
    assert status == 75
    assert calls[-2:] == ["scancel --signal=TERM 7", "scontrol requeue 7"]


def test_slurm_leaves_a_job_that_is_done_or_was_cancelled(tmp_path: Path) -> None:
    """A pre-empted job is put back by SLURM itself."""
    status, calls = slurm(tmp_path, "true", None)
    assert status == 0
    assert calls[0] == "scontrol show hostnames node[0-1]"
    assert calls[1].endswith("grpo --config a b")
    status, calls = slurm(tmp_path, WAITS, signal.SIGTERM)
    assert (status, calls[-1]) == (75, "scancel --signal=TERM 7")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def test_what_the_recipes_run_is_here() -> None:
    service, job = documents("kubernetes.yaml")
    [container] = job["spec"]["template"]["spec"]["containers"]
    named = [*container["command"][1:], *(word for word in container["args"] if "/" in word)]
    assert [path for path in named if not (REPOSITORY / path).is_file()] == []
    head = next(each["value"] for each in container["env"] if each["name"] == "HEAD")
    assert head == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    [task] = documents("skypilot.yaml")
    assert (REPOSITORY / "configs" / "profiles" / f"{task['envs']['PROFILE']}.yaml").is_file()
    for script in re.findall(r"launch/[\w.]+", task["run"] + (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")):
        assert (REPOSITORY / script).is_file()


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", {"class_path": "grpo.training.strategies.CPUDeepSpeedStrategy"}])
def test_torchrun_trains_by_the_script(strategy: Any, tmp_path: Path) -> None:
    """Two processes on this machine's processors."""
    config = train_config(tmp_path, rounds=2, groups_per_round=4, validation_problems=2)
    config["trainer"] |= {"devices": 1, "strategy": strategy}
    done = subprocess.run(
        ["bash", LAUNCH / "torchrun.sh", "--config", write_config(tmp_path / "train.yaml", config)],
        env=environment(GPUS="2", PORT="29517", OUTPUT=str(tmp_path / "output"), DS_ACCELERATOR="cpu"),
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    written = sorted(path.name for path in (tmp_path / "output" / "record" / "updates").iterdir())
    assert written == [f"round-{r:05d}-rank-{rank}.parquet" for r in range(2) for rank in range(2)]
