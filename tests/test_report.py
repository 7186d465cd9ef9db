"""The report from a small experiment: its numbers are the inputs', and it is there whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from report_inputs import ROUNDS, answers, base_skill, evaluation, record_rows, trained_skill, write_experiment

from grpo.answer_metrics import Estimate
from grpo.held_out_answers import answers_parquet
from grpo.report import ReportSettings, main, make_report
from grpo.reporting.curves import read_curves
from grpo.reporting.group_statistics import group_statistics
from grpo.reporting.markdown import code, difference, estimate, table
from grpo.reporting.samples import best_and_worst, changed_answers
from grpo.whole_files import write_whole


@pytest.fixture
def settings(tmp_path: Path) -> ReportSettings:
    return write_experiment(tmp_path)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The report's files by name, of an experiment that the tests leave as it is."""
    settings = write_experiment(tmp_path_factory.mktemp("experiment"))
    return by_name(settings, make_report(settings))


@pytest.fixture(scope="module")
def page(report: dict[str, bytes]) -> str:
    return report["report.md"].decode()


def by_name(settings: ReportSettings, files: dict[Path, bytes]) -> dict[str, bytes]:
    return {path.relative_to(settings.output).as_posix(): data for path, data in files.items()}


def text_only(settings: ReportSettings) -> dict[str, bytes]:
    """The report's files without the pictures, which take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.report.draw_pictures", lambda *_: {})
        return by_name(settings, make_report(settings))


def row_of(page: str, start: str, after: str) -> list[str]:
    """The cells of the first table row that begins with ``start`` below the heading ``after``."""
    line = next(line for line in page.split(after, 1)[1].splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def written(settings: ReportSettings) -> list[Path]:
    """The report's own files that are there."""
    return [path for path in settings.output.rglob("*") if path.is_file() and path.parent.name != "evaluation"]


class TestPage:
    def test_the_headline_says_the_result(self, page: str) -> None:
        """Base: 6 of 80 samples (3 problems x 2). Trained: 42 of 48 of one slice, 16 of 32 of the other: 58 of 80."""
        headline = page.splitlines()[2]
        assert "Training raised the share of correct sampled answers on 20 held-out problems" in headline
        assert "7.5% before, 72.5% after, +65.0 points [" in headline

    def test_the_result_table_holds_the_inputs_numbers(self, page: str) -> None:
        for mode in ("sampled", "greedy"):
            base = evaluation("base", answers(base_skill))["overall"][mode]["accuracy"]
            trained = evaluation("trained", answers(trained_skill))["overall"][mode]["accuracy"]
            cells = row_of(page, "Correct, strict reading", f"### {mode.capitalize()}\n")
            for cell, one in zip(cells[1:3], (base, trained), strict=True):
                assert cell == f"{100 * one['value']:.1f}% [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"
            assert cells[3].startswith(f"{100 * (trained['value'] - base['value']):+.1f} [")

    def test_every_slice_stands_there_whatever_it_says(self, page: str) -> None:
        assert row_of(page, "sums_3digit", "### Sampled, strict")[1:3] == ["same task, not trained on", "6"]
        assert row_of(page, "products", "### Sampled, strict")[1:4] == ["other task", "5", "0.0% [0.0, 52.2]"]

    def test_counts_are_the_records(self, page: str) -> None:
        """4 rounds x 2 groups x 4 members, 3 tokens each; 3 groups flat, 20 rollouts of the other 5 in the loss."""
        expected = {
            "rounds": "4",
            "prompt groups sampled": "8",
            "prompt groups in the update": "5",
            "prompt groups skipped as flat (equal rewards)": "3",
            "training rollouts": "32",
            "tokens sampled in training": "96",
            "tokens in the loss": "60",
            "held-out completions": "310",
            "ledger: update steps": str(ROUNDS),
        }
        assert {name: row_of(page, name, "## What was counted")[1] for name in expected} == expected

    def test_the_method_is_the_resolved_config(self, page: str) -> None:
        for name, value in (
            ("model.loss.kl_beta", "0.04"),
            ("model.loss.clip_high", "null"),
            ("model.round.flat_groups", "skip"),
            ("model.rewards.exact_answer.check", "grpo.rewards.exact_answer.exact_answer"),
            ("seed_everything", "1"),
        ):
            assert row_of(page, f"`{name}`", "## The settings")[1] == f"`{value}`"
        assert "build/" not in page

    def test_model_text_stays_inside_its_cell(self, page: str) -> None:
        """A wrong answer of the base holds a bar, back-ticks and a line break."""
        rows = [line for line in page.splitlines() if "\\|" in line]
        assert rows
        assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 and "⏎" in row for row in rows)

    def test_pictures_that_it_shows_are_there(self, page: str, report: dict[str, bytes]) -> None:
        shown = re.findall(r"\]\((pictures/\S+)\)", page)
        assert set(shown) == {name for name in report if name.endswith(".png")}
        assert len(shown) == 4

    def test_a_run_without_a_reference_has_no_kl(self, settings: ReportSettings) -> None:
        metrics = settings.train / "metrics.csv"
        metrics.write_text("round,reward/mean\n0,0.1\n1,0.2\n")
        files = by_name(settings, make_report(settings))
        assert "nan" not in files["report.md"].decode().lower()
        assert "pictures/update.png" not in files

    @pytest.mark.parametrize(
        ("base", "trained", "verb"),
        [(trained_skill, base_skill, "lowered"), (base_skill, base_skill, "did not clearly change")],
    )
    def test_a_loss_and_a_null_are_said_too(self, tmp_path: Path, base: object, trained: object, verb: str) -> None:
        settings = write_experiment(tmp_path, base, trained)  # type: ignore[arg-type]
        assert f"**Training {verb} the share" in text_only(settings)["report.md"].decode()


class TestFiles:
    def test_comparison_holds_base_trained_and_difference(self, report: dict[str, bytes]) -> None:
        flat = json.loads(report["comparison.json"])
        headline = json.loads(report["headline.json"])
        assert set(headline) == {"sampled", "sampled_lenient", "greedy"}
        assert headline["greedy"]["difference"] == flat["greedy.accuracy.difference"]
        assert headline["sampled_lenient"]["trained"] == flat["sampled.lenient_accuracy.trained"]
        assert all(isinstance(value, float) for value in flat.values())
        assert flat["sampled.accuracy.base"] == pytest.approx(6 / 80)
        assert flat["sampled.accuracy.trained"] == pytest.approx(58 / 80)
        assert flat["sampled.accuracy.difference"] == pytest.approx(52 / 80)
        assert flat["sampled.accuracy.low"] < flat["sampled.accuracy.difference"] < flat["sampled.accuracy.high"]
        assert flat["by_slice.products.greedy.accuracy.trained"] == 0
        assert "sampled.pass_at_4.difference" in flat

    def test_what_has_no_value_is_absent(self, tmp_path: Path) -> None:
        """Nobody answers before training: no accuracy among the answered, and no difference of it."""
        settings = write_experiment(tmp_path, base=lambda *_: False)
        for name in ("base", "trained"):
            found = [
                replace(answer, strict_answer=None, correct=False, strict_score=0.0)
                for answer in answers(lambda *_: False)
            ]
            (settings.completions / name / "completions.parquet").write_bytes(answers_parquet(found))
            (settings.evaluation_numbers / f"{name}.json").write_text(json.dumps(evaluation(name, found)))
        files = text_only(settings)
        flat = json.loads(files["comparison.json"])
        assert not [name for name in flat if "among_answered" in name]
        assert row_of(files["report.md"].decode(), "Correct among those with an answer", "### Sampled")[1:] == [
            "-",
            "-",
            "-",
        ]

    def test_curves_have_no_times(self, report: dict[str, bytes]) -> None:
        lines = report["curves.csv"].decode().splitlines()
        assert lines[0].startswith("round,")
        assert "seconds" not in lines[0]
        assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2", "3"]

    def test_rows_of_one_round_are_one_row(self, tmp_path: Path) -> None:
        file = tmp_path / "metrics.csv"
        file.write_text("round,a,validation/a\n0,1,\n0,,2\n1,3,\n")
        curves = read_curves(file)
        assert curves.line("a") == ([0, 1], [1.0, 3.0])
        assert curves.line("validation/a") == ([0], [2.0])

    def test_equal_inputs_give_equal_bytes(self, report: dict[str, bytes], tmp_path: Path) -> None:
        """Times may differ and the folder too; nothing else does here, so no byte may."""
        other = write_experiment(tmp_path)
        run = json.loads((other.train / "run.json").read_text())
        (other.train / "run.json").write_text(json.dumps(run | {"seconds": {"rollout": 1.23}}))
        assert by_name(other, make_report(other)) == report

    def test_the_shipped_config_writes_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_experiment(tmp_path)
        config = Path(__file__).parents[1] / "configs" / "report.yaml"
        monkeypatch.chdir(tmp_path)
        main([f"--config={config}"])
        names = {path.name for path in written(ReportSettings())}
        assert names == {
            "report.md",
            "comparison.json",
            "headline.json",
            "curves.csv",
            "held_out.png",
            "learning.png",
            "groups.png",
            "update.png",
        }


class TestRefusals:
    @pytest.mark.parametrize(
        ("lost", "stage"),
        [
            ("build/train/metrics.csv", "train"),
            ("build/train/run.json", "train"),
            ("build/train/record/updates", "train"),
            ("build/train/policy/resolved_config.yaml", "train"),
            ("report/evaluation/base.json", "evaluate"),
            ("build/evaluation/trained/completions.parquet", "evaluate"),
        ],
    )
    def test_a_missing_input_is_named_and_nothing_written(
        self, settings: ReportSettings, tmp_path: Path, lost: str, stage: str
    ) -> None:
        path = tmp_path / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        arguments = {"train": settings.train, "completions": settings.completions, "output": settings.output}
        arguments |= {"evaluation_numbers": settings.evaluation_numbers}
        with pytest.raises(ValueError, match=rf"the report lacks {path} \(stage {stage}\): run the stages named"):
            main([f"--{name}={value}" for name, value in arguments.items()])
        assert written(settings) == []

    def test_evaluations_that_differ_in_more_than_the_policy(self, settings: ReportSettings) -> None:
        path = settings.evaluation_numbers / "base.json"
        numbers = json.loads(path.read_text())
        numbers["identity"]["max_new_tokens"] = 16
        path.write_text(json.dumps(numbers))
        with pytest.raises(ValueError, match="cannot be compared, they differ in max_new_tokens: 16 and 8"):
            make_report(settings)

    def test_numbers_and_completions_of_different_evaluations(self, settings: ReportSettings) -> None:
        file = settings.completions / "trained" / "completions.parquet"
        file.write_bytes(answers_parquet(answers(base_skill)))
        with pytest.raises(ValueError, match="but their completions differ by"):
            make_report(settings)

    def test_an_empty_record(self, settings: ReportSettings) -> None:
        for file in (settings.train / "record" / "rollouts").iterdir():
            file.unlink()
        with pytest.raises(ValueError, match="holds no table"):
            make_report(settings)

    @pytest.mark.parametrize("text", ["a,b\n1,2\n", "round,b\n"])
    def test_metrics_without_rounds(self, settings: ReportSettings, text: str) -> None:
        (settings.train / "metrics.csv").write_text(text)
        with pytest.raises(ValueError, match="has no"):
            make_report(settings)

    def test_a_config_of_another_form(self, settings: ReportSettings) -> None:
        (settings.train / "policy" / "resolved_config.yaml").write_text(yaml.safe_dump(["seed"]))
        with pytest.raises(ValueError, match="does not hold named fields"):
            make_report(settings)

    def test_settings(self) -> None:
        with pytest.raises(ValueError, match="name two evaluations"):
            ReportSettings(base="trained")
        with pytest.raises(ValueError, match="samples is 0"):
            ReportSettings(samples=0)


class TestParts:
    def test_where_the_signal_came_from(self) -> None:
        """A mixed group has |advantages| 1.732 + 3 x 0.577; four are of one slice and one of the other."""
        rollouts, updates = record_rows()
        one, two, every = group_statistics(rollouts, {row["rollout_id"]: row for row in updates})
        assert [part.slice for part in (one, two, every)] == ["sums_1digit", "sums_2digit", "all"]
        assert (one.mixed, two.mixed, every.mixed) == (1.0, 0.25, 0.625)
        assert (one.advantage_share, two.advantage_share) == (pytest.approx(0.8), pytest.approx(0.2))
        assert (one.duplicates, one.distinct) == (pytest.approx(0.5), 2.0)
        assert one.reward == pytest.approx(0.35)

    def test_samples_are_of_distinct_problems_and_spread(self) -> None:
        rollouts, _ = record_rows()
        best, worst = best_and_worst(rollouts, 5)
        assert [row["reward"] for row in best] == [1.1, 1.1]
        assert {row["slice"] for row in worst} == {"sums_1digit", "sums_2digit"}
        assert {row["round"] for row in [*best, *worst]} == {ROUNDS - 1}

    def test_changed_answers(self) -> None:
        """Greedy: 0, 4, 8 of 12 right before; all but 0 and 1 after, and 0, 2, 4, 6 of the other slice."""
        gained, lost = changed_answers(answers(base_skill), answers(trained_skill))
        assert len(gained) == 8 + 4
        assert [before.problem_id for before, _ in lost] == ["sums_1digit-00"]
        assert [before.slice for before, _ in gained[:4]] == ["sums_1digit", "sums_2digit"] * 2

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("a`b", "``a`b``"),
            ("`a", "`` `a ``"),
            ("a\nb", "`a⏎b`"),
            ("", "(empty)"),
            ("  ", "(white space)"),
            ("x" * 9, "`xxxxx…`"),
        ],
    )
    def test_code(self, text: str, shown: str) -> None:
        assert code(text, longest=5) == shown

    def test_numbers_read_well(self) -> None:
        assert estimate(Estimate(0.4567, 0.401, 0.512)) == "45.7% [40.1, 51.2]"
        assert estimate(Estimate(3.5), is_share=False) == "3.50"
        assert difference(Estimate(-0.0001, -0.02, 0.02)) == "+0.0 [-2.0, +2.0]"
        assert table(["a", "b"], [["x|y", "1"]]).splitlines()[2] == "| x\\|y | 1 |"

    def test_a_file_is_whole_or_not_there(self, tmp_path: Path) -> None:
        write_whole(tmp_path / "deep" / "file", b"old")
        with pytest.raises(TypeError):
            write_whole(tmp_path / "deep" / "file", "text")  # type: ignore[arg-type]
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
        assert (tmp_path / "deep" / "file").read_bytes() == b"old"
