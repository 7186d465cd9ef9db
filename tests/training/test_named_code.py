"""The code that a configuration names is part of what a run is made of."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from grpo.run_identity import SOURCE, file_digest
from grpo.training.named_code import named_code


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reward of one's own, with a helper in another file."""
    (tmp_path / "own_reward.py").write_text(
        "import json\n\nfrom own_helper import half\n\n\ndef reward(): return half\n"
    )
    (tmp_path / "own_helper.py").write_text("half = type('Half', (), {})\n")
    (tmp_path / "own_other.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_reward", "own_other"):
        import_module(name)
    yield tmp_path
    for name in ("own_reward", "own_helper", "own_other"):
        sys.modules.pop(name, None)


def test_a_named_file_and_what_it_imports_of_ones_own_are_told_by_their_source(own: Path) -> None:
    config = "model: {rewards: {mine: {check: own_reward.reward}}}"
    expected = {name: file_digest(own / f"{name}.py") for name in ("own_helper", "own_reward")}
    assert named_code(config, []) == expected
    (own / "own_helper.py").write_text("half = type('Other', (), {})\n")
    assert named_code(config, [])["own_helper"] != expected["own_helper"]


def test_what_another_digest_covers_is_left_out() -> None:
    import_module("grpo.scorers")
    config = "[grpo.rewards.exact_answer.exact_answer, grpo.scorers.reasoning_gym_score]"
    assert named_code(config, [SOURCE]) == {}
    assert "grpo.scorers" in named_code(config, [SOURCE / "rewards", SOURCE / "records.py"])


@pytest.mark.usefixtures("own")
def test_a_class_by_path_counts_and_other_text_does_not() -> None:
    assert list(named_code("{class_path: own_other.value}", [])) == ["own_other"]
    for text in ("own_other", "own_other.nothing", "build/policy", "'see own_other.value'", "no_such.module", "3.5"):
        assert named_code(f"text: {text}", []) == {}


def test_what_has_no_source_is_told_by_its_package() -> None:
    assert named_code("check: math.sqrt", []).keys() == {"math"}
    assert named_code("check: numpy._core._multiarray_umath.array", []).popitem()[1].startswith("numpy ")
    assert json.dumps(named_code("check: json.dumps", [])).count(":") == 1
