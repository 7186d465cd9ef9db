"""What the README tells people to type exists, and what it links to is there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.split("#")[0].strip()
]
INLINE = re.findall(r"`((?:make|grpo|dvc) [^`]+)`", README)
COMMANDS = [*LINES, *INLINE]


def test_the_two_commands_come_first() -> None:
    assert [line.split()[:2] for line in LINES[:2]] == [["make", "repro"], ["make", "test"]]


@pytest.mark.parametrize("target", sorted({c.split()[1] for c in COMMANDS if c.startswith("make ")}))
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", "SETUP=no", target], cwd=REPOSITORY, capture_output=True, text=True)
    assert "No rule to make target" not in done.stderr


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"-S (\S+?:\S+?)=", README))))
def test_a_setting_that_is_changed_is_there(setting: str) -> None:
    path, keys = setting.split(":")
    value = yaml.safe_load((REPOSITORY / path).read_text(encoding="utf-8"))
    for key in keys.split("."):
        assert key in value, f"{path} has no {keys}"
        value = value[key]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (REPOSITORY / link).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:configs|src|docs|build|report)/[\w./]+\.\w+)`", README))))
def test_a_file_that_is_named_is_made_or_kept(name: str) -> None:
    stages = (REPOSITORY / "dvc.yaml").read_text(encoding="utf-8")
    assert (REPOSITORY / name).exists() or name in stages


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(grpo\.[\w.]+)`", README))))
def test_a_class_that_is_named_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    source = REPOSITORY / "src" / f"{module.replace('.', '/')}.py"
    assert re.search(rf"^class {name}\b|^def {name}\b", source.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("row", "metric"),
    [
        ("correct, sampled", "sampled.accuracy"),
        ("correct, greedy", "greedy.accuracy"),
        ("correct by a lenient reading, sampled", "sampled.lenient_accuracy"),
    ],
)
def test_the_result_is_the_reports(row: str, metric: str) -> None:
    """Of the committed report: a run on another machine may differ without making the README wrong."""
    shown = subprocess.run(
        ["git", "show", "HEAD:report/comparison.json"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if shown.returncode:
        pytest.skip("no committed report to compare with: this is no git checkout, or it has none")
    numbers = json.loads(shown.stdout)
    base, trained, gain, low, high = (
        100
        * next(value for key, value in numbers.items() if key.endswith(f"{metric}.{part}") and "by_slice" not in key)
        for part in ("base", "trained", "difference", "low", "high")
    )
    expected = f"| {base:.1f}% | {trained:.1f}% | {gain:+.1f} points [{low:+.1f}, {high:+.1f}] |"
    line = next(line for line in README.splitlines() if line.startswith(f"| {row}"))
    assert line.endswith(expected), (
        "the README's result table does not tell what report/comparison.json holds: where you committed a report of "
        f"your own, write its numbers there too ({expected})"
    )
