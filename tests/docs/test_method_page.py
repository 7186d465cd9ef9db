"""The method page: every setting stands on it with the default that it has."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo.rollouts.adapter_files import AdapterSettings
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import SamplingSettings
from grpo.training.settings import AdvantageSettings, LossSettings, OptimizerSettings, RoundSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "method.md").read_text(encoding="utf-8")
SECTIONS = {
    "sampling": SamplingSettings,
    "reward_transform": RewardTransform,
    "round": RoundSettings,
    "advantages": AdvantageSettings,
    "loss": LossSettings,
    "optimizer": OptimizerSettings,
    "adapter": AdapterSettings,
}
# | choice | `model.section.field` | `default` | ...
ROWS = re.findall(r"^\|[^|]+\| `model\.(\w+)\.(\w+)` \| `([^`|]*)` \|", PAGE, flags=re.MULTILINE)
STATED = {(section, name): default for section, name, default in ROWS}
SETTINGS = [(section, field) for section, settings in SECTIONS.items() for field in fields(settings)]


def default_of(field: Field[Any]) -> object:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    assert value is not MISSING, f"{field.name} has no default"
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("section", "field"), SETTINGS, ids=lambda part: getattr(part, "name", part))
def test_a_setting_is_stated_with_its_default(section: str, field: Field[Any]) -> None:
    assert (section, field.name) in STATED, f"docs/method.md has no row for model.{section}.{field.name}"
    assert yaml.safe_load(STATED[section, field.name]) == default_of(field)


def test_no_row_is_of_a_setting_that_is_gone() -> None:
    known = {(section, field.name) for section, field in SETTINGS}
    assert sorted(key for key in STATED if key[0] in SECTIONS and key not in known) == []


def test_no_setting_is_stated_twice() -> None:
    assert [key for key, count in Counter((section, name) for section, name, _ in ROWS).items() if count > 1] == []


def anchors(page: str) -> set[str]:
    """What the headings of a page are called in a link."""
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [DOCS / "method.md", *sorted((DOCS / "examples").glob("*.md"))], ids=lambda p: p.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_the_deviations_are_numbered_in_order() -> None:
    section = PAGE.partition("## Where this differs from the original")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section, flags=re.MULTILINE)]
    assert numbers
    assert numbers == list(range(1, len(numbers) + 1))
