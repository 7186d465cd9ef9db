"""DVC does not follow imports: what a stage runs must stand in its ``deps``, or a change of it goes unnoticed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from import_graph import REPOSITORY, SOURCE, ImportGraph, read_imports, runs_code

from grpo.train import TRAINING_CODE

GRAPH = read_imports()
COMMAND = re.compile(r"-m grpo\s+([\w-]+)")
CONFIG = re.compile(r"--config[= ](\S+\.yaml)")


def read_stages(file: Path) -> dict[str, dict[str, Any]]:
    """Stage name -> definition; a matrix or foreach stage counts once, by what its cells share."""
    stages = yaml.safe_load(file.read_text(encoding="utf-8"))["stages"]
    return {name: stage.get("do", stage) for name, stage in stages.items()}


def stage_roots(stage: dict[str, Any], graph: ImportGraph, folder: Path) -> set[str]:
    """The modules a stage starts from: its command's, and those its configs name as class paths."""
    command = stage["cmd"] if isinstance(stage["cmd"], str) else "\n".join(stage["cmd"])
    roots = {f"grpo.{name.replace('-', '_')}" for name in COMMAND.findall(command)}
    for config in CONFIG.findall(command):
        if (folder / config).is_file():
            named = re.findall(r"\bgrpo\.[\w.]+", (folder / config).read_text(encoding="utf-8"))
            roots |= {module for name in named if (module := graph.module_of(name)) is not None}
    return roots


def missing_deps(stage: dict[str, Any], graph: ImportGraph, folder: Path, source: Path) -> list[str]:
    """Files that the stage runs and that no dependency covers, relative to ``folder``."""
    listed = [next(iter(dep)) if isinstance(dep, dict) else dep for dep in stage.get("deps", [])]
    deps = [(folder / dep).resolve() for dep in listed]
    files = [graph.files[module] for module in graph.closure(*stage_roots(stage, graph, folder))]
    needed = [path.resolve() for path in files if path.name != "__init__.py" or runs_code(path)]
    bare = [path for path in needed if not any(path == dep or path.is_relative_to(dep) for dep in deps)]
    return sorted(str(path.relative_to(source.resolve())) for path in bare)


STAGES = read_stages(REPOSITORY / "dvc.yaml")


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_all_it_imports(name: str) -> None:
    assert stage_roots(STAGES[name], GRAPH, REPOSITORY), f"the command of stage {name} runs no `python -m grpo <stage>`"
    assert missing_deps(STAGES[name], GRAPH, REPOSITORY, SOURCE) == []


def test_a_missing_dependency_is_seen(tmp_path: Path) -> None:
    """An import inside a function, a package with code in its ``__init__`` and a class path in a config all count."""
    files = {
        "src/grpo/__init__.py": '"""Nothing runs here."""',
        "src/grpo/train.py": "def main():\n    from grpo.maths import loss",
        "src/grpo/maths/__init__.py": "LIMIT = 1",
        "src/grpo/maths/loss.py": "from grpo import records",
        "src/grpo/records.py": "",
        "src/grpo/rewards.py": "",
        "configs/train.yaml": "reward:\n  class_path: grpo.rewards.ExactAnswer\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = read_imports(tmp_path / "src")
    stage = {"cmd": "python -m grpo train --config configs/train.yaml", "deps": ["src/grpo/train.py"]}

    def missing(*deps: str) -> list[str]:
        return missing_deps({**stage, "deps": [*stage["deps"], *deps]}, graph, tmp_path, tmp_path / "src")

    assert missing() == ["grpo/maths/__init__.py", "grpo/maths/loss.py", "grpo/records.py", "grpo/rewards.py"]
    assert missing("src/grpo/maths", "src/grpo/records.py", "src/grpo/rewards.py") == []


def test_a_run_is_told_apart_by_all_the_code_that_trains_and_no_other() -> None:
    package = SOURCE / "grpo"
    named = [package / name for name in TRAINING_CODE]
    files = {GRAPH.files[module] for module in GRAPH.closure("grpo.train") if runs_code(GRAPH.files[module])}
    assert [file for file in sorted(files) if not any(file == path or path in file.parents for path in named)] == []
    assert [path for path in named if not any(file == path or path in file.parents for file in files)] == []
