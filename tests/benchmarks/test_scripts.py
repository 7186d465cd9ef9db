"""The benchmarks as programs: their options, how they end, what a result file says and is called."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from import_graph import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import against_limit
import against_trl
import growth
import maths_rate
import overhead
import sandbox_rate
from common import script
from common.script import begin, result_name, write_results

SCRIPTS = (against_limit, against_trl, growth, maths_rate, overhead, sandbox_rate)


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (maths_rate, "--rows -5", "at least 1"),
        (sandbox_rate, "--programs 0", "at least 1"),
        (overhead, "--threads two", "invalid whole number value: 'two'"),
        (growth, "--width 7", "multiple of 8"),
        (growth, "--only", "expected at least one argument"),
        (against_limit, "--micro-batch 0", "at least 1"),
        (against_trl, "--rounds 0", "at least 1"),
        (against_trl, "--groups 0", "at least 1"),
        (against_trl, "--kl-beta nan", "at least 0"),
        (against_trl, "--learn 4 --target 1.5", "from 0 to 1"),
        (against_trl, "--target 0.5", "--learn, which is not given"),
        (against_trl, "--learn 4 --size smollm2", "--size tiny"),
        (against_trl, "--learn 4 --fixed-length", "not with --fixed-length"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    module: ModuleType, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = getattr(module, "parse", None) or module.make_parser().parse_args
    with pytest.raises(SystemExit) as refused:
        parse(arguments.split())
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_every_option_has_a_text_with_its_default(module: ModuleType) -> None:
    parser: argparse.ArgumentParser = module.make_parser()
    options = [action for action in parser._actions if action.dest != "help"]
    assert [action.dest for action in options if "default" not in (action.help or "")] == []


def test_rounds_hold_with_quick_too() -> None:
    assert against_trl.parse(["--quick"]).rounds == 2
    assert against_trl.parse(["--quick", "--rounds", "5"]).rounds == 5
    assert [against_trl.parse(["--size", size]).rounds for size in ("tiny", "smollm2")] == [7, 5]


@pytest.mark.parametrize(
    ("module", "arguments", "name"),
    [
        (against_trl, "--rounds 7 --folder elsewhere", "result"),
        (against_trl, "--size smollm2 --rounds 5", "result"),
        (against_trl, "--quick", "result_quick"),
        (against_trl, "--quick --rounds 2", "result_quick"),
        (against_trl, "--quick --rounds 5 --learn 40 --target 0.6", "result_quick_rounds_5_learn_40"),
        (against_trl, "--groups 4 --kl-beta 0.04 --fixed-length", "result_groups_4_kl_beta_0.04_fixed_length"),
        (against_trl, "--policy ../my/policy", "result_policy_..-my-policy"),
        (growth, "", "result"),
        (growth, "--only groups prompt --quick", "result_quick_only_groups_prompt"),
    ],
)
def test_only_a_full_run_writes_the_full_result(module: Any, arguments: str, name: str) -> None:
    assert result_name("result", module.parse(arguments.split()), module.parse) == name


def test_quick_values_are_ones_that_run() -> None:
    assert growth.QUICK_VALUES >= 3
    assert min(min(values) for _, values, _ in growth.GROWN.values()) >= 2


def test_a_result_says_how_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_BENCHMARK_RESULTS", str(tmp_path / "new"))
    monkeypatch.setattr(os, "getloadavg", lambda: (6.4, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    how = begin("a title", Namespace(rounds=3, policy=Path("build/policy")))
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    path = write_results("name", how, {"replies": []})
    found = json.loads(path.read_text())
    assert found["options"] == {"rounds": 3, "policy": "build/policy"}
    assert found["machine"]["load_at_start"] == 6.4
    assert set(found["versions"]) == {"python", "torch", "transformers", "trl", "grpo"}
    assert found["commit"]
    assert [each.name for each in path.parent.iterdir()] == ["name.json"]
    printed = capsys.readouterr()
    assert "load 6.4 on 2 cores: something else runs" in printed.err
    assert f"written: {path}" in printed.out


def test_without_trl_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_trl, "find_spec", lambda _: None)
    monkeypatch.setattr(against_trl, "begin", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["against_trl.py"])
    with pytest.raises(SystemExit, match="TRL is not installed: `make peers`"):
        against_trl.main()


# A worker that is busy, and so takes no notice of its input; it keeps a file of its own.
SLEEPER = """
import json, tempfile, time
kept = tempfile.NamedTemporaryFile()
print(json.dumps({"ready": True}), flush=True)
time.sleep(600)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from common import turns
from common.script import run, scratch_folder
turns.FOLDER = Path(sys.argv[2])

def main():
    with scratch_folder() as folder, turns.Worker("sleeper", folder / "log", 1) as worker:
        worker.process.stdout.readline()
        print(worker.process.pid, flush=True)
        worker.ask(do="round")

run(main)
"""


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_a_signal_ends_workers_and_removes_the_folder(tmp_path: Path, stop: signal.Signals, code: int) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "sleeper.py").write_text(SLEEPER)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(REPOSITORY / "benchmarks"), str(tmp_path)],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(script.ROOT / "src")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    assert list(temporary.iterdir())
    driver.send_signal(stop)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == code
    assert errors == "interrupted; nothing was written\n"
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
