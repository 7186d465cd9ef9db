import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.training.run_folder import RunInUse, only_trainer, rounds_without_update

HOLD = """
import sys, time
from pathlib import Path
from grpo.training.run_folder import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_training_of_the_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with only_trainer(tmp_path / "run"):
        with pytest.raises(RunInUse, match=r"another process, in .*run: wait for it"), only_trainer(tmp_path / "run"):
            pass
        with only_trainer(tmp_path / "other"):
            pass
    with only_trainer(tmp_path / "run"):
        pass


def test_a_killed_process_gives_the_run_back(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(RunInUse), only_trainer(tmp_path / "run"):
                pass
        finally:
            os.kill(process.pid, signal.SIGKILL)
    with only_trainer(tmp_path / "run"):
        pass


def test_rounds_without_an_update_are_those_that_counted_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("round,loss/updates\n0,1.0\n1,\n2,2.0\n3,\n")
    assert rounds_without_update(tmp_path) == [1, 3]
    (tmp_path / "metrics.csv").write_text("round,reward/mean\n0,0.5\n")
    assert rounds_without_update(tmp_path) == [0]
