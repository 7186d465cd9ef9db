"""The worked examples: every number on the pages is what the code gives, every picture what the script draws."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
INDEX = EXAMPLES / "README.md"
PAGES = sorted(set(EXAMPLES.glob("*.md")) - {INDEX})

# A fence would be read as part of the output above it; an empty line ends that, and keeps the line numbers.
FENCE = re.compile(r"^```.*$", flags=re.MULTILINE)


def content(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_says_what_the_code_gives(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest(FENCE.sub("", content(page)), {}, page.stem, str(page), 0)
    complaints: list[str] = []
    result = doctest.DocTestRunner().run(examples, out=complaints.append)
    assert result.failed == 0, "".join(complaints)
    assert result.attempted > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_example_is_left_out(page: Path) -> None:
    assert "doctest:" not in content(page)
    fenced = "".join(re.findall(r"^```pycon\n(.*?)^```$", content(page), flags=re.MULTILINE | re.DOTALL))
    assert fenced.count(">>>") == content(page).count(">>>")


def test_a_wrong_number_would_be_found() -> None:
    page = "Two and two:\n\n```pycon\n>>> 2 + 2\n5\n```\n"
    examples = doctest.DocTestParser().get_doctest(FENCE.sub("", page), {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(examples, out=lambda _: None).failed == 1


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "draw.py"))["draw"](tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in EXAMPLES.glob("*.svg")}
    assert drawn.keys() == kept.keys()
    assert [name for name in drawn if drawn[name] != kept[name]] == [], "run `python docs/examples/draw.py`"


def test_every_picture_is_shown_and_described() -> None:
    shown = {name: alt for page in PAGES for alt, name in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", content(page))}
    assert shown.keys() == {path.name for path in EXAMPLES.glob("*.svg")}
    assert all(len(alt) > 20 for alt in shown.values())


def test_the_index_names_every_page_once() -> None:
    assert sorted(re.findall(r"\]\(([^)/]+\.md)\)", content(INDEX))) == [page.name for page in PAGES]
