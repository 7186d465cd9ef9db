"""Nothing here needs a compiler: the commands import, and every DeepSpeed stage trains, where none is to be found."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from fixtures_processes import OFFLOADED_2, STRATEGIES, environment, run, written_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

COMPILER = re.compile(r"(.*-)?(cc|c\+\+|c89|c99|cpp|gcc|g\+\+|clang|clang\+\+|ld|nvcc|hipcc|icx|icpx|ninja)(-[\d.]+)?")
SHARDED = {name: value for name, value in (STRATEGIES | OFFLOADED_2).items() if name.startswith("deepspeed")}
IMPORTS = """
import importlib, shutil
assert not [name for name in ("cc", "c++", "gcc", "g++", "clang", "nvcc", "ninja") if shutil.which(name)]
import deepspeed
from grpo.__main__ import COMMANDS
for module in COMMANDS.values():
    importlib.import_module(module)
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment with every program but those that compile."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for tool in sorted(Path(place).glob("*")):
            if not COMPILER.fullmatch(tool.name) and not os.path.lexists(tools / tool.name):
                (tools / tool.name).symlink_to(tool)
    kept = {name: value for name, value in environment().items() if name not in ("CC", "CXX", "CUDACXX", "CUDA_PATH")}
    return kept | {"PATH": str(tools), "CUDA_HOME": str(tools)}


def test_every_command_imports(bare: dict[str, str]) -> None:
    printed, code = run([sys.executable, "-c", IMPORTS], bare)
    assert code == 0, printed[-3000:]


@pytest.mark.parametrize("strategy", SHARDED)
def test_every_stage_trains(tmp_path: Path, bare: dict[str, str], strategy: str) -> None:
    config = written_config(tmp_path / "run", SHARDED[strategy], 2)
    printed, code = run([sys.executable, "-m", "grpo", "train", "--config", config], bare)
    assert code == 0, printed[-3000:]
    assert (tmp_path / "run" / "output" / "run.json").is_file()
