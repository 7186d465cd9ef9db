"""Every snippet of the page on the built-in rewards is a component that can be configured as it stands."""

import re
from pathlib import Path

import pytest
import yaml
from import_graph import REPOSITORY
from jsonargparse import ArgumentParser

from grpo.records import Problem
from grpo.rewards import BatchReward, RewardComponent, judge, validate_components

PAGE = REPOSITORY / "docs/rewards_built_in.md"
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PROBLEM = Problem("p", "1 + 1 =", "2", "s", {"task": "basic_arithmetic"})


def components(snippet: str, folder: Path) -> dict[str, RewardComponent]:
    file = folder / "rewards.yaml"
    file.write_text(snippet)
    parser = ArgumentParser()
    parser.add_argument("--rewards", type=dict[str, RewardComponent], enable_path=True)
    made: dict[str, RewardComponent] = parser.instantiate(parser.parse_args([f"--rewards={file}"])).rewards
    return made


def test_the_page_has_a_snippet_for_each_reward() -> None:
    assert len(SNIPPETS) == 7


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: next(iter(yaml.safe_load(snippet))))
def test_a_snippet_configures_a_reward(snippet: str, tmp_path: Path) -> None:
    found = components(snippet, tmp_path)
    validate_components(found)
    for component in found.values():
        if not isinstance(component.check, BatchReward):  # those would load a model or ask a server
            assert judge(component.check, PROBLEM, "2").value in (0.0, 1.0)
