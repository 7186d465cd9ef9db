"""The report from a small experiment: its numbers are the inputs', and it is there whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from import_graph import REPOSITORY
from markdown_it import MarkdownIt
from matplotlib.cbook import is_math_text
from report_inputs import (
    CONFIG,
    ROUNDS,
    Experiment,
    answers,
    base_skill,
    evaluation,
    experiment,
    record_rows,
    trained_skill,
    write_experiment,
)

from grpo.answer_metrics import Estimate
from grpo.held_out_answers import answers_parquet
from grpo.report import ReportSettings, main, make_report
from grpo.reporting.comparison import compare_evaluations
from grpo.reporting.curves import Curves, read_curves
from grpo.reporting.finished_run import Method
from grpo.reporting.group_statistics import GroupStatistics, group_statistics, signal_by_problem
from grpo.reporting.inputs import _check_numbers, read_inputs
from grpo.reporting.markdown import code, difference, estimate, one_line, plain, table
from grpo.reporting.pictures import draw_pictures, group_signal
from grpo.reporting.recorded_groups import by_round
from grpo.reporting.recorded_metrics import round_values
from grpo.reporting.samples import best_and_worst, changed_answers
from grpo.reporting.timing import time_breakdown
from grpo.whole_files import write_whole

# What data may hold, and what a page and a picture must not trip over.
HOSTILE = (
    r"$\frac{$ x",
    "x_{$",
    "costs $5 to $10",
    r"a\$b$",
    "a|b||c",
    r"a\|b",
    "`tick`` ```",
    "two\nlines\r\nand\x85more\u2028still",
    "<b>bold</b><script>alert(1)</script><!--",
    "\u202eturned\u202c and \u05e9\u05dc\u05d5\u05dd",
    "\x00\x1b[31mred\x07",
    "*a* _b_ [c](d) ![e](f) # g",
    "&amp; &lt;",
    "\u65e5\u672c \U0001f600",
    "\\",
    "very long " * 40,
    "all",
)


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
            "ledger: updates": str(ROUNDS),
            "ledger: groups skipped flat": "3",
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

    def test_a_run_without_a_reference_has_no_kl(self, tmp_path: Path) -> None:
        parts = experiment()
        for row in parts.metrics:
            row.pop("loss/kl", None)
        settings = write_experiment(tmp_path, parts=parts)
        assert "nan" not in text_only(settings)["report.md"].decode().lower()

    @pytest.mark.parametrize(
        ("base", "trained", "verb"),
        [(trained_skill, base_skill, "lowered"), (base_skill, base_skill, "did not clearly change")],
    )
    def test_a_loss_and_a_null_are_said_too(self, tmp_path: Path, base: object, trained: object, verb: str) -> None:
        settings = write_experiment(tmp_path, base, trained)  # type: ignore[arg-type]
        assert f"**Training {verb} the share" in text_only(settings)["report.md"].decode()


def decide(parts: Experiment, chosen: Callable[[dict[str, Any]], bool], **fields: Any) -> None:
    """Change the decisions about the rollouts chosen."""
    names = {row["rollout_id"] for row in parts.rollouts if chosen(row)}
    for row in parts.updates:
        if row["rollout_id"] in names:
            row |= fields


def measured_again(parts: Experiment) -> Experiment:
    """The same with the curves and the ledger that its record now calls for."""
    decided = {row["rollout_id"]: row for row in parts.updates}
    components = Method.of(CONFIG).components
    for number, groups in by_round(parts.rollouts).items():
        kept = {n: v for n, v in parts.metrics[number].items() if n.split("/")[0] in ("loss", "seconds", "validation")}
        parts.metrics[number] = {"round": number, **kept, **round_values(groups, decided, components)}
    verdicts = [row["verdict"] for row in parts.updates]
    ledger = {n: v for n, v in parts.run["ledger"].items() if not n.startswith("groups_")}
    ledger |= {f"groups_{verdict}": verdicts.count(verdict) // 4 for verdict in set(verdicts)}
    ledger["tokens_in_loss"] = sum(row["loss_tokens"] for row in parts.updates)
    parts.run["ledger"] = ledger
    return parts


class TestCautions:
    """What must be known before the numbers are read is said above them; a page without it says nothing."""

    def said(self, folder: Path, parts: Experiment) -> str:
        page = text_only(write_experiment(folder, parts=parts))["report.md"].decode()
        before = page.split("## Result")[0]
        return before.partition("**To know before reading on:**")[2]

    def test_a_sound_run_has_none(self, page: str) -> None:
        assert "To know before reading on" not in page

    def test_rounds_without_an_update(self, tmp_path: Path) -> None:
        parts = experiment()
        for row in parts.rollouts:
            if row["round"] in (1, 2):
                row |= {"reward": 0.1, "reward_steps": [("weighted_sum", 0.1)]}
                row |= {"reward_raw": [("exact_answer", 0.0), ("answer_format", 1.0)]}
                row |= {"reward_weighted": [("exact_answer", 0.0), ("answer_format", 0.1)]}
        flat = {"verdict": "skipped_flat", "centred": 0.0, "advantage": 0.0, "loss_tokens": 0}
        decide(parts, lambda row: row["round"] in (1, 2), **flat)
        said = self.said(tmp_path, measured_again(parts))
        assert said.strip() == (
            "- No group was in the update in 2 of 4 rounds (1, 2), so the policy did not move there: "
            "4 groups skipped as flat (equal rewards)."
        )

    def test_a_run_in_which_nothing_was_scored(self, tmp_path: Path) -> None:
        parts = experiment()
        for row in parts.rollouts:
            row |= {"reward": None, "reward_steps": [], "unscored_reason": "exact_answer: the sandbox is gone"}
            row |= {name: [("exact_answer", None), *row[name][1:]] for name in ("reward_raw", "reward_weighted")}
        decide(parts, lambda _: True, verdict="unscored", centred=None, advantage=None, loss_tokens=0)
        said = self.said(tmp_path, measured_again(parts))
        assert "No group was in the update in every round" in said
        assert "8 groups without two scored members" in said
        assert "No group could be compared for lack of scores in every round." in said

    def test_completions_that_were_all_cut_off(self, tmp_path: Path) -> None:
        parts = experiment()
        for row in parts.rollouts:
            row |= {"finish_reason": "length"} if row["round"] == 3 else {}
        said = self.said(tmp_path, measured_again(parts))
        assert said.strip() == (
            "- Every completion was cut off at the token budget in 1 of 4 rounds (3) of the training."
        )

    def test_answers_that_were_all_cut_off(self, tmp_path: Path) -> None:
        settings = write_experiment(tmp_path)
        found = [
            replace(one, finish_reason="length", strict_answer=None, correct=False, strict_score=0.0)
            for one in answers(base_skill)
        ]
        (settings.completions / "base" / "completions.parquet").write_bytes(answers_parquet(found))
        (settings.evaluation_numbers / "base.json").write_text(json.dumps(evaluation("base", found)))
        page = text_only(settings)["report.md"].decode()
        for mode in ("sampled", "greedy"):
            assert f"- Every {mode} completion of the policy before training was cut off at the token budget." in page

    @pytest.mark.parametrize(("split", "called"), [("train", "training"), ("validation", "validation")])
    def test_a_split_that_was_not_held_out_is_never_called_so(self, tmp_path: Path, split: str, called: str) -> None:
        parts = experiment()
        parts.run["problems_sha256"] = {"heldout": "0" * 64, "train": "1" * 64, "validation": "2" * 64, split: "f" * 64}
        page = text_only(write_experiment(tmp_path, parts=parts))["report.md"].decode()
        assert f"- The evaluated file is the {called} split of the run's problems: nothing of it was held out." in page
        assert f"correct sampled answers on 20 {called} problems:" in page
        assert "**not** the run's held-out problems" in page
        shown = page.replace("**not** the run's held-out problems", "")
        assert "held-out" not in shown.lower()

    def test_a_file_that_the_run_does_not_know(self, tmp_path: Path) -> None:
        parts = experiment()
        parts.run["problems_sha256"] = {"heldout": "0" * 64}
        said = self.said(tmp_path, parts)
        assert "whether it was held out cannot be told from here" in said
        assert "were drawn in training" not in said

    def test_evaluated_problems_that_were_trained_on(self, tmp_path: Path) -> None:
        settings = write_experiment(tmp_path)
        trained_on = record_rows()[0][0]["problem_id"]
        for name, skill in (("base", base_skill), ("trained", trained_skill)):
            found = [
                replace(one, problem_id=trained_on) if one.problem_id == "sums_1digit-00" else one
                for one in answers(skill)
            ]
            (settings.completions / name / "completions.parquet").write_bytes(answers_parquet(found))
        page = text_only(settings)["report.md"].decode()
        assert "- 1 of the 31 evaluated problems were drawn in training (by their ids)." in page


class TestHostileText:
    """Names and texts come from data and from a policy: whatever they hold, it is shown and nothing else happens."""

    @pytest.mark.parametrize("text", HOSTILE)
    def test_a_cell_shows_the_text_and_nothing_else(self, text: str) -> None:
        """Rendered: two cells of the row, without markup but for code, that hold the text."""
        tokens = (
            MarkdownIt("commonmark")
            .enable("table")
            .parse(table(["a", "b"], [[plain(text), code(text, 1000)], ["1", "2"]]))
        )
        cells = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "td_open"]
        assert len(cells) == 4
        shown = []
        for cell in cells[:2]:
            children = cell.children or []
            marked_up = [c for c in children if c.type not in ("text", "text_special", "code_inline")]
            assert {c.content for c in marked_up} <= {"<code>", "</code>"}
            shown.append("".join(c.content for c in children if c.type != "html_inline"))
        assert shown[1] == one_line(text)
        assert shown[0] == (one_line(text) if len(text) <= 120 else one_line(text)[:120] + "…")

    def test_one_line_drops_nothing_unseen(self) -> None:
        assert one_line("a\r\nb\rc\td\xa0e\u202ef\x00") == "a⏎b⏎c d e\ufffdf\ufffd"

    @pytest.mark.parametrize("name", ["additions_1digit", "all", "level 3", "v1.2-easy"])
    def test_names_of_plain_words_stay_as_they_are(self, name: str) -> None:
        assert plain(name) == name

    @pytest.mark.parametrize("name", ["_a_", "a*b*", "a  b", "", "a__b", "#1"])
    def test_other_names_are_code(self, name: str) -> None:
        assert plain(name) == code(name)

    def test_every_picture_is_drawn(self, settings: ReportSettings) -> None:
        """Slices and components of such names; three that are shortened alike keep a bar each."""
        names = [*HOSTILE, "long " * 20 + "1", "long " * 20 + "2", "long " * 20 + "3"]
        inputs = read_inputs(
            settings.train, settings.evaluation_numbers, settings.completions, settings.base, settings.trained
        )
        overall, slices = compare_evaluations(inputs.base, inputs.trained)
        groups = statistics(inputs.run.rollouts, inputs.run.decisions)
        metrics = dict.fromkeys(("reward/mean", *(f"reward/{name}" for name in names)), "0.5")
        curves = Curves(("round", *metrics), tuple({"round": number, **metrics} for number in "01"))
        pictures = draw_pictures(
            overall,
            [replace(slices[0], name=name) for name in names],
            curves,
            [replace(groups[0], slice=name) for name in names],
            names,
        )
        assert set(pictures) == {"held_out.png", "learning.png", "groups.png"}
        assert all(data.startswith(b"\x89PNG") for data in pictures.values())

    @pytest.mark.parametrize("name", [text for text in HOSTILE if "$" in text])
    def test_dollars_in_a_name_are_no_mathematics(self, name: str) -> None:
        """An even number of them sets what stands between as a formula; escaped, matplotlib shows the dollar."""
        one = replace(statistics(*record_rows())[0], slice=name)
        _, right = group_signal(Curves(("round",), ({"round": "0"},)), [one]).axes
        (label,) = (tick.get_text() for tick in right.get_yticklabels())
        assert not is_math_text(label)
        assert label.replace(r"\$", "$") == name

    def test_the_page_is_whole(self, tmp_path: Path) -> None:
        parts = experiment()
        for row, text in zip(parts.rollouts, HOSTILE * 4, strict=False):
            row |= {"prompt_text": text, "completion_text": text}
        hostile = "a|b `c`\n<i>"
        for row in parts.rollouts:
            row |= {"slice": hostile} if row["slice"] == "sums_2digit" else {}
        settings = write_experiment(tmp_path, parts=measured_again(parts))
        page = text_only(settings)["report.md"].decode()
        for block in page.split("\n\n"):
            if block.startswith("| "):
                tokens = MarkdownIt("commonmark").enable("table").parse(block)
                assert tokens[0].type == "table_open", block
                rows = sum(token.type == "tr_open" for token in tokens)
                assert rows == len(block.splitlines()) - 1, block
        assert f"| {code(hostile)} |".replace("a|b", "a\\|b") in page


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
        parts = experiment()
        for row in parts.metrics:
            row["seconds/rollout"] = 77.0
        other = write_experiment(tmp_path, parts=parts)
        assert by_name(other, make_report(other)) == report

    def test_the_times_are_printed(self, settings: ReportSettings, capsys: pytest.CaptureFixture[str]) -> None:
        text_only(settings)
        printed = capsys.readouterr().out
        assert "**Training raised" in printed
        assert "seconds of a round, over 4 rounds and 20.0 s (without what lies between rounds):" in printed

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

    @pytest.mark.parametrize(
        ("damaged", "content", "stage"),
        [
            ("build/train/metrics.csv", b"a,b\n1,2\n", "train"),
            ("build/train/metrics.csv", b"round,b\n", "train"),
            ("build/train/metrics.csv", b"round,b\n0,much\n", "train"),
            ("build/train/metrics.csv", b"round,b\n0,1,2\n", "train"),
            ("build/train/metrics.csv", b"\xff\xfe\x00", "train"),
            ("build/train/run.json", b"", "train"),
            ("build/train/run.json", b"{", "train"),
            ("build/train/run.json", b"{}", "train"),
            ("build/train/run.json", b"[]", "train"),
            ("build/train/policy/resolved_config.yaml", b"a: [", "train"),
            ("build/train/record/rollouts/round-00001-rank-0.parquet", b"PAR1", "train"),
            ("build/train/record/validation/round-00001-rank-0.parquet", b"", "train"),
            ("build/train/record/updates/round-00001-rank-0.parquet", None, "train"),
            ("report/evaluation/base.json", b"{", "evaluate"),
            ("report/evaluation/base.json", b"{}", "evaluate"),
            ("report/evaluation/base.json", b'{"identity": {}, "overall": {}, "by_slice": {}}', "evaluate"),
            ("report/evaluation/base.json", b'{"identity": 1, "overall": [], "by_slice": null}', "evaluate"),
            ("build/evaluation/trained/completions.parquet", b"not a table", "evaluate"),
            ("build/evaluation/trained/completions.parquet", None, "evaluate"),
        ],
    )
    def test_a_damaged_input_is_named_with_its_stage(
        self, settings: ReportSettings, tmp_path: Path, damaged: str, content: bytes | None, stage: str
    ) -> None:
        """None: the file is cut in the middle."""
        path = tmp_path / damaged
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))} .*run the stage {stage} again"):
            make_report(settings)

    @pytest.mark.parametrize("field", ["overall", "sampled", "accuracy", "value"])
    def test_a_damaged_evaluation_is_named_whatever_it_lacks(self, settings: ReportSettings, field: str) -> None:
        def without(node: Any) -> Any:
            return {k: without(v) for k, v in node.items() if k != field} if isinstance(node, dict) else node

        path = settings.evaluation_numbers / "trained.json"
        path.write_text(json.dumps(without(json.loads(path.read_text()))))
        with pytest.raises(ValueError, match=rf"{path} cannot be used .*{field}.*run the stage evaluate again"):
            make_report(settings)

    def test_a_config_of_another_run_or_version(self, settings: ReportSettings) -> None:
        config = settings.train / "policy" / "resolved_config.yaml"
        older = deepcopy(CONFIG)
        del older["model"]["round"]["max_draws"]
        config.write_text(yaml.safe_dump(older))
        with pytest.raises(ValueError, match=r"it is not the configuration that .*run\.json holds"):
            make_report(settings)
        run = json.loads((settings.train / "run.json").read_text())
        (settings.train / "run.json").write_text(json.dumps(run | {"config": yaml.safe_dump(older)}))
        with pytest.raises(ValueError, match=r"cannot be read \(KeyError: 'max_draws'\).*run the stage train again"):
            make_report(settings)

    def test_evaluations_of_another_training(self, settings: ReportSettings) -> None:
        """One training evaluated, then another into the same folder: its numbers would stand beside the other's."""
        path = settings.train / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"policy_sha256": "5" * 64}))
        with pytest.raises(ValueError, match=r"trained is of the policy trained.* ended with 5{16}: evaluate"):
            make_report(settings)

    @pytest.mark.parametrize(("name", "other"), [("trained", "base"), ("base", "trained")])
    def test_one_policy_evaluated_under_both_names(self, settings: ReportSettings, name: str, other: str) -> None:
        path = settings.evaluation_numbers / f"{name}.json"
        numbers = json.loads(path.read_text())
        numbers["identity"]["policy_sha256"] = other * 16
        path.write_text(json.dumps(numbers))
        with pytest.raises(ValueError, match=rf"the evaluation {name} is of the policy {other}.*dvc repro report"):
            make_report(settings)

    def test_a_training_that_disagrees_with_itself(self, tmp_path: Path) -> None:
        parts = experiment()
        parts.metrics[2]["reward/mean"] = 0.9
        settings = write_experiment(tmp_path, parts=parts)
        with pytest.raises(
            ValueError, match=r"do not agree: 1 metrics .*reward/mean of round 2 is 0\.9, .*stage train"
        ):
            make_report(settings)

    def test_settings(self) -> None:
        with pytest.raises(ValueError, match="name two evaluations"):
            ReportSettings(base="trained")
        with pytest.raises(ValueError, match="samples is 0"):
            ReportSettings(samples=0)


def statistics(rollouts: Any, updates: Any) -> list[GroupStatistics]:
    decided = {row["rollout_id"]: row for row in updates}
    return group_statistics(rollouts, decided, Method.of(CONFIG).components)


class TestParts:
    def test_where_the_signal_came_from(self) -> None:
        """A mixed group has |advantages| 1.732 + 3 x 0.577; four are of one slice and one of the other."""
        rollouts, updates = record_rows()
        one, two, every = statistics(rollouts, updates)
        assert [part.slice for part in (one, two, every)] == ["sums_1digit", "sums_2digit", None]
        assert (one.mixed, two.mixed, every.mixed) == (1.0, 0.25, 0.625)
        assert (one.advantage_share, two.advantage_share) == (pytest.approx(0.8), pytest.approx(0.2))
        assert (one.duplicates, one.distinct) == (pytest.approx(0.5), 2.0)
        assert one.reward == pytest.approx(0.35)
        assert (one.deviation, two.deviation) == (pytest.approx(3**0.5 / 4), pytest.approx(3**0.5 / 16))
        assert (one.accepted, two.accepted, every.accepted) == (0.25, 1 / 16, 5 / 32)
        assert (every.finished, every.truncated, every.other_endings, every.draws) == (1.0, 0.0, 0.0, 1.0)

    def test_the_signal_is_told_by_problem(self) -> None:
        rollouts, updates = record_rows()
        decided = {row["rollout_id"]: row for row in updates}
        problems = signal_by_problem(rollouts, decided)
        assert {one.problem_id for one in problems} == {row["problem_id"] for row in rollouts}
        assert sum(one.groups for one in problems) == len({(row["problem_id"], row["round"]) for row in rollouts})
        assert [one.share for one in problems] == sorted((one.share for one in problems), reverse=True)
        assert sum(one.share for one in problems) == pytest.approx(1.0)
        first = [row["rollout_id"] for row in rollouts if row["problem_id"] == problems[0].problem_id]
        of_one = [abs(decided[name]["advantage"] or 0) for name in first]
        assert problems[0].share == pytest.approx(sum(of_one) / sum(abs(row["advantage"] or 0) for row in updates))

    def test_endings_and_draws_are_told_apart(self) -> None:
        """The flat groups of the second slice are drawn again, to the same end; what is cut is not finished."""
        rollouts, updates = record_rows()
        for row in rollouts:
            row["finish_reason"] = ("length", "tool_limit", "end_token", "end_token")[row["member"]]
        flat = [row for row in rollouts if row["slice"] == "sums_2digit" and row["round"] < ROUNDS - 1]
        again = [row | {"draw": 1, "rollout_id": f"again {row['rollout_id']}"} for row in flat]
        decided = updates + [
            {"rollout_id": row["rollout_id"], "verdict": "skipped_flat", "advantage": 0.0} for row in again
        ]
        one, two, every = statistics(rollouts + again, decided)
        assert (one.draws, two.draws, every.draws) == (1.0, 7 / 4, 11 / 8)
        assert (two.finished, two.truncated, two.other_endings) == (0.5, 0.25, 0.25)

    def test_times_are_told_by_phase(self) -> None:
        """The last of three rounds takes four times as long as the others, and so does each of its phases."""
        seconds = {n: {"rollout": t, "other": t / 2, "round": 2 * t} for n, t in enumerate((1.0, 1.0, 4.0))}
        first, *lines = time_breakdown(seconds).splitlines()
        assert first == "seconds of a round, over 3 rounds and 12.0 s (without what lies between rounds):"
        assert [" ".join(line.split()) for line in lines] == [
            "rollout 1.000 in the median 50.0% of all 4.000 at most (round 2)",
            "other 0.500 in the median 25.0% of all 2.000 at most (round 2)",
            "round 2.000 in the median 100.0% of all 8.000 at most (round 2)",
        ]
        assert time_breakdown({}) == ""

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


class TestUnscored:
    """Evaluations in which the scorer had no verdict on some answers."""

    @pytest.fixture
    def unscored(self, tmp_path: Path) -> ReportSettings:
        """After training, nothing is known of problem 0 of sums_1digit, and of one sampled answer to problem 1."""
        settings = write_experiment(tmp_path)
        found = [
            replace(answer, strict_score=None, correct=None, lenient_correct=None, unscored_reason="out of order")
            if answer.slice == "sums_1digit"
            and (answer.problem_id.endswith("00") or (answer.problem_id.endswith("01") and answer.member == 3))
            else answer
            for answer in answers(trained_skill)
        ]
        (settings.evaluation_numbers / "trained.json").write_text(json.dumps(evaluation("trained", found)))
        (settings.completions / "trained" / "completions.parquet").write_bytes(answers_parquet(found))
        return settings

    def test_it_is_said_how_many_and_over_which_the_differences_are(self, unscored: ReportSettings) -> None:
        files = text_only(unscored)
        page = files["report.md"].decode()
        assert "no verdict on 5 of the 124 sampled answers of the policy after training" in page
        assert "no verdict on 1 of the 31 greedy answers of the policy after training" in page
        assert row_of(page, "Without a verdict of the scorer", "### Sampled\n")[1].startswith("0.0%")
        assert row_of(page, "Without a verdict of the scorer", "### Sampled\n")[2].startswith("6.2%")  # 5 of 80
        assert "Of the 20 problems these are: sampled 19 (correct, strict reading)" in page
        assert "sampled 18 (pass@4)" in page
        assert "greedy 19 (correct, strict reading)" in page
        assert row_of(page, "sums_1digit", "### Without a verdict")[1] == "sampled"
        assert row_of(page, "Pass@1", "### Sampled\n")

    def test_a_difference_leaves_a_problem_out_on_both_sides(self, unscored: ReportSettings) -> None:
        """Greedy: before, right on 0, 4 and 8 of sums_1digit; without 0, 2 of 19. After, 10 and 4 of the others."""
        flat = json.loads(text_only(unscored)["comparison.json"])
        assert flat["greedy.accuracy.base"] == pytest.approx(3 / 20, abs=1e-6)
        assert flat["greedy.accuracy.trained"] == pytest.approx(14 / 19, abs=1e-6)
        assert flat["greedy.accuracy.difference"] == pytest.approx(12 / 19, abs=1e-6)
        assert flat["sampled.unscored.trained"] == pytest.approx(5 / 80, abs=1e-6)

    def test_no_answer_without_a_verdict_is_shown_as_changed(self, unscored: ReportSettings) -> None:
        inputs = read_inputs(unscored.train, unscored.evaluation_numbers, unscored.completions, "base", "trained")
        _, lost = changed_answers(inputs.base.answers, inputs.trained.answers)
        assert not any(new.correct is None for _, new in lost)

    def test_where_all_have_one_nothing_is_said(self, page: str, report: dict[str, bytes]) -> None:
        assert "verdict" not in page.partition("## Loopholes")[0]
        assert "unscored" not in report["comparison.json"].decode()


class TestEarlierEvaluations:
    def test_one_without_the_share_and_the_reason_gives_the_same_report(self, tmp_path: Path) -> None:
        new, old = (write_experiment(tmp_path / name) for name in ("new", "old"))
        for name in ("base", "trained"):
            path = old.evaluation_numbers / f"{name}.json"
            numbers = json.loads(path.read_text())
            for part in (numbers["overall"], *numbers["by_slice"].values()):
                for mode in ("sampled", "greedy"):
                    del part[mode]["unscored"]
            path.write_text(json.dumps(numbers))
            table_path = old.completions / name / "completions.parquet"
            pq.write_table(pq.read_table(table_path).drop_columns("unscored_reason"), table_path)
        # One was evaluated anew since.
        (old.evaluation_numbers / "base.json").write_bytes((new.evaluation_numbers / "base.json").read_bytes())
        assert text_only(old) == text_only(new)

    @pytest.mark.parametrize("name", ["base", "trained"])
    def test_the_one_in_the_repository_is_read(self, name: str) -> None:
        path = REPOSITORY / "report" / "evaluation" / f"{name}.json"
        _check_numbers(json.loads(path.read_text()))

    def test_the_default_reading_is_what_they_had(self, tmp_path: Path) -> None:
        settings = write_experiment(tmp_path)
        path = settings.evaluation_numbers / "base.json"
        numbers = json.loads(path.read_text())
        assert "reading" not in numbers["identity"]
        numbers["identity"] |= {"reading": "grpo.answer_readings.strict_answer", "scorer_settings": {}}
        path.write_text(json.dumps(numbers))
        assert "is one line holding the answer alone" in text_only(settings)["report.md"].decode()
        numbers["identity"]["reading"] = "grpo.answer_readings.last_boxed"
        path.write_text(json.dumps(numbers))
        with pytest.raises(ValueError, match=r"differ in reading: .*last_boxed and .*strict_answer"):
            make_report(settings)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (
            "grpo.answer_readings.last_boxed",
            "ended by itself and its answer is what stands in the last \\boxed{}. *Lenient*",
        ),
        ("own.reading", "its answer is what `own.reading` finds. *Lenient*"),
        ("grpo.answer_readings.final_code", "There is no lenient reading of such answers."),
    ],
)
def test_another_reading_is_said(tmp_path: Path, reading: str, words: str) -> None:
    settings = write_experiment(tmp_path)
    lenient = reading != "grpo.answer_readings.final_code"
    for name in ("base", "trained"):
        path = settings.evaluation_numbers / f"{name}.json"
        numbers = json.loads(path.read_text())
        numbers["identity"]["reading"] = reading
        for part in (numbers["overall"], *numbers["by_slice"].values()):
            for mode in ("sampled", "greedy"):
                if not lenient:
                    part[mode]["lenient_accuracy"] = Estimate(None).rounded()
        path.write_text(json.dumps(numbers))
    page = text_only(settings)["report.md"].decode()
    assert words in page
    assert ("Sampled, read leniently" in page) == lenient
    assert "asks for a bare answer" not in page
    if not lenient:
        assert row_of(page, "Correct, lenient reading", "### Sampled\n")[1:] == ["-", "-", "-"]
