"""Every setting of the train stage reaches what it is for, and the record.

A marker, unlike the default, is set in the configuration of a real run; the table says where in that run it must
be found again. A setting that is not in the table fails a test.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures_policy import TOKENIZER, adapter_folder, leaning_policy_folder, problem_folder, train_config, write_config
from fixtures_rounds import Call, Row, by_group, read_table, watch
from lightning.pytorch.loggers import Logger
from pebble import ProcessPool

from grpo import train
from grpo.rewards import RewardComponent, judging
from grpo.rollouts import sampling, tool_turns
from grpo.rollouts.adapter_files import AdapterSettings, read_adapter
from grpo.rollouts.adapters import REFERENCE, TRAINED, adapter_parameters
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.growing_rows import GrowingRows
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import SamplingSettings
from grpo.rollouts.tools import ToolSettings
from grpo.training import draw_groups, grpo_module, policy_update, prompt_group_datamodule, round_update, run_loggers
from grpo.training.checkpoints import StreamingCheckpointIO
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.round_update import RoundUpdate
from grpo.training.run_loggers import WandbSettings
from grpo.training.settings import AdvantageSettings, LossSettings, OptimizerSettings, RoundSettings

WATCHED: dict[str, tuple[Any, str]] = {
    "loss": (round_update, "grpo_loss"),
    "advantages": (grpo_module, "group_advantages"),
    "centred": (grpo_module, "centred_rewards"),
    "update": (RoundUpdate, "run"),
    "scored": (round_update, "completion_logprobs"),
    "judged": (draw_groups, "judge_draw"),
    "failures": (grpo_module, "refuse_failures"),
    "parts": (round_update, "split_minibatches"),
    "weights": (policy_update, "token_weights"),
    "micro_batches": (policy_update, "micro_batches"),
    "clipped": (torch.nn.utils, "clip_grad_norm_"),
    "drawn": (sampling, "draw_cut_tokens"),
    "uniforms": (sampling, "keyed_uniforms"),
    "waiting": (train, "wait_at_most"),
    "growing": (GrowingRows, "admit"),
    "caches": (GrowingRows, "__init__"),
    "stops": (sampling, "StopStrings"),
    "answered": (tool_turns, "answer_call"),
    "policies": (grpo_module, "load_policy"),
    "tokenizers": (prompt_group_datamodule, "load_tokenizer"),
    "problems": (prompt_group_datamodule, "read_problems"),
    "orders": (prompt_group_datamodule, "problem_order"),
    "saved": (StreamingCheckpointIO, "save_checkpoint"),
    "pools": (judging, "ProcessPool"),
    "scheduled": (ProcessPool, "schedule"),
}


class NoWandb(Logger):
    """Stands where W&B would start a process of its own, and keeps what it was called with."""

    name = version = ""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass
class Evidence:
    """What a run was called with on the way, and what it left."""

    folder: Path
    output: Path
    calls: dict[str, list[Call]] = field(repr=False)

    def all(self, call: str, argument: str) -> Any:
        """The one value that all these calls had."""
        return one([c[argument] for c in self.calls[call]])

    def table(self, name: str) -> list[Row]:
        return read_table(self.output / "record", name)

    @property
    def module(self) -> GRPOModule:
        module: GRPOModule = self.calls["update"][0]["self"].module
        return module

    @property
    def groups(self) -> list[list[Row]]:
        return list(by_group(self.table("rollouts")).values())

    def resolved(self) -> dict[str, Any]:
        text = (self.output / "policy" / "resolved_config.yaml").read_text(encoding="utf-8")
        config: dict[str, Any] = yaml.safe_load(text)
        return config


def one(values: list[Any]) -> Any:
    assert values
    assert all(value == values[0] for value in values), values
    return values[0]


Read = Callable[[Evidence], Any]


@dataclass(frozen=True)
class Reach:
    """A setting's marker, and how it is found again.

    Args:
        run: the run that it is set in.
        value: the marker, as YAML has it; ``{folder}`` in text is the run's folder.
        read: from where it has its effect.
        seen: what must be read there, where that is not the marker itself.
    """

    run: str
    value: Any
    read: Read = field(compare=False)
    seen: Any = None

    def marker(self, folder: Path) -> Any:
        return self.value.replace("{folder}", str(folder)) if isinstance(self.value, str) else self.value

    def expected(self, folder: Path) -> Any:
        return self.marker(folder) if self.seen is None else self.seen


def argument(call: str, name: str) -> Read:
    return lambda run: run.all(call, name)


def limit(name: str) -> Read:
    return lambda run: one([getattr(call["limits"], name) for call in run.calls["micro_batches"]])


def shared_prompt(run: Evidence) -> bool:
    return any(max(call["rows_per_prompt"].tolist()) > 1 for call in run.calls["scored"])


def optimizer(name: str) -> Read:
    return lambda run: one([group[name] for group in run.module.trainer.optimizers[0].param_groups])


def cut(place: int, name: str) -> Read:
    return lambda run: getattr(run.all("drawn", "cuts")[place], name)


def learning_rates(run: Evidence) -> list[float]:
    return [row["loss/learning_rate"] for row in run.module.loggers[0].rows.values()]  # type: ignore[attr-defined]


def temperature(run: Evidence) -> Any:
    return one([run.all("drawn", "temperature"), run.all("scored", "temperature")])


def largest_chunk(run: Evidence) -> int:
    return max(sum(len(members) for members in call["rows"]) for call in run.calls["growing"])


def called(run: Evidence) -> list[tuple[Row, str, str]]:
    """Rows that called a tool once and went on, what they had drawn up to the answer, and what was put in."""
    found = []
    for row in run.table("rollouts"):
        drawn = row["completion_drawn"]
        if row["tool_calls"] and drawn and drawn[-1]:
            start = drawn.index(False)
            put_in = [token for token, is_drawn in zip(row["completion_tokens"], drawn, strict=True) if not is_drawn]
            text = TOKENIZER.decode(row["completion_tokens"][:start])
            found.append((row, text, TOKENIZER.decode(put_in)))
    return found


def opening(run: Evidence) -> str:
    """The sign before the content of unnamed calls, which the record keeps as their argument."""
    unnamed = [(text, row["tool_calls"][0]["argument"]) for row, text, _ in called(run)]
    return str(one([text[: -1 - len(content)][-1] for text, content in unnamed if content in text]))


def closing(run: Evidence) -> str:
    return str(one([text[-1] for _, text, _ in called(run)]))


def result_text(run: Evidence) -> str:
    return str(one([put_in.replace(row["tool_calls"][0]["result"], "{result}") for row, _, put_in in called(run)]))


def calls_at_the_limit(run: Evidence) -> int:
    return int(one([len(r["tool_calls"]) for r in run.table("rollouts") if r["finish_reason"] == "tool_limit"]))


def tools(run: Evidence) -> Any:
    assert one([sorted(call["tools"]) for call in run.calls["answered"]]) == ["c"]
    return one([row["tools"] for row in run.table("rollouts")])


def step_of(row: Row, name: str) -> float:
    return float(row["reward_steps"][name])


def steps(run: Evidence, name: str) -> list[float]:
    return [step_of(row, name) for row in run.table("rollouts")]


def zone(run: Evidence) -> tuple[int, int]:
    """Length and end of the zone, from the slope of the penalty over the tokens that were drawn."""
    most = -min(steps(run, "length_penalty"))
    share_of = {}
    for row in run.table("rollouts"):
        length = sum(row["completion_drawn"] or [True] * len(row["completion_tokens"]))
        share_of[length] = -step_of(row, "length_penalty") / most
    partial = sorted(length for length, share in share_of.items() if 0 < share < 1)
    short, long = partial[0], partial[-1]
    tokens = (long - short) / (share_of[long] - share_of[short])
    return round(tokens), round(long + (1 - share_of[long]) * tokens)


def format_component(run: Evidence) -> str:
    rows = run.table("rollouts")
    fined = [step_of(row, "format_penalty") < 0 for row in rows]
    assert True in fined
    assert False in fined
    return str(one([name for name in rows[0]["reward_raw"] if [r["reward_raw"][name] < 1 for r in rows] == fined]))


def fine_a_call(run: Evidence) -> float:
    invalid = [
        (step_of(row, "tool_penalty"), sum(not call["valid"] for call in row["tool_calls"]))
        for row in run.table("rollouts")
    ]
    return float(one([-fine / count for fine, count in invalid if count]))


def weight_of(component: str) -> Read:
    def read(run: Evidence) -> float:
        rows = [row for row in run.table("rollouts") if row["reward_raw"][component]]
        return float(one([row["reward_weighted"][component] / row["reward_raw"][component] for row in rows]))

    return read


def limit_of(component: str) -> Read:
    """Of the calls that a worker was sent; None where none was."""

    def read(run: Evidence) -> float | None:
        limits = [call["timeout"] for call in run.calls["scheduled"] if call["args"][0] == component]
        return one(limits) if limits else None

    return read


def check_of(component: str) -> Read:
    def read(run: Evidence) -> str:
        check: Any = run.module.components[component].check
        for row in run.table("rollouts")[:5]:
            assert check(None, row["completion_text"]).value == row["reward_raw"][component]
        return f"{check.__module__}.{check.__qualname__}"

    return read


def seeds(run: Evidence) -> int:
    """Of the draws, of the problems' order and of the order within an update."""
    keys = [call["key"].seed for call in run.calls["uniforms"]]
    return int(one([*keys, run.all("orders", "seed"), *(int(c["key"].split("/")[0]) for c in run.calls["parts"])]))


def passes_a_round(run: Evidence) -> int:
    rounds = [call["key"].split("/")[1] for call in run.calls["parts"]]
    return int(one([rounds.count(number) for number in set(rounds)]))


def split(run: Evidence) -> str:
    cuts = [
        {row.group for row in call.result[0]} & {row.group for row in call.result[1]} for call in run.calls["parts"]
    ]
    return "rows" if any(cuts) else "groups"


def unit(run: Evidence) -> str:
    return "problem_over_variants" if one([len({r["template_id"] for r in g}) for g in run.groups]) > 1 else "problem"


def old_logprobs(run: Evidence) -> str:
    recorded = {value for row in run.table("rollouts") for value in row["old_logprobs"]}
    counted = [call["old_logprobs"][call["mask"]].tolist() for call in run.calls["loss"]]
    assert any(counted)
    return "recorded" if all(set(values) <= recorded for values in counted) else "recomputed"


def first_refresh(run: Evidence) -> int:
    rows = [row for row in run.table("updates") if row["reference_version"] is not None]
    return int(min(row["round"] for row in rows if row["reference_version"] > 0))


def truncated_are_masked(run: Evidence) -> bool:
    rows = {row["rollout_id"]: row for row in run.table("rollouts")}
    tokens = [r["loss_tokens"] for r in run.table("updates") if rows[r["rollout_id"]]["finish_reason"] == "length"]
    assert tokens
    return not any(tokens)


def kl_on_flat_groups(run: Evidence) -> bool:
    anchored = [row["reference_logprobs"] is not None for row in run.table("updates") if row["verdict"] == "kept_flat"]
    return bool(one(anchored))


def entropy_bonus(run: Evidence) -> float:
    assert any(call["entropy_gradient"] for call in run.calls["scored"])
    return float(run.all("loss", "entropy_bonus"))


def adapter_rank(run: Evidence) -> int:
    return int(one([min(weight.shape) for weight in adapter_parameters(run.module.policy, TRAINED).values()]))


def adapter_alpha(run: Evidence) -> float:
    """From what the layers multiply with."""
    layers = [m for m in run.module.policy.modules() if hasattr(m, "scaling") and hasattr(m, "lora_A")]
    return float(one([m.scaling[TRAINED] for m in layers])) * adapter_rank(run)


def adapted_layers(run: Evidence) -> list[str]:
    names = adapter_parameters(run.module.policy, TRAINED)
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names})


def begun_with(run: Evidence) -> str:
    """The adapter of the reference, which nothing moves in this run."""
    folder = run.folder / "an-adapter"
    theirs = read_adapter(AdapterSettings(rank=3, alpha=5.0, target_modules=("v_proj",), start=folder))
    assert theirs is not None
    mine = adapter_parameters(run.module.policy, REFERENCE)
    for layer, factors in theirs.factors.items():
        for letter, factor in zip("AB", factors, strict=True):
            assert torch.equal(mine[f"{layer}.lora_{letter}.{REFERENCE}.weight"], factor)
    return str(folder)


def baseline(run: Evidence) -> Any:
    return one([run.all("advantages", "baseline"), run.all("centred", "baseline")])


def limit_verdict(run: Evidence) -> str:
    flat = {row["verdict"] for row in run.table("updates")} & {"kept_flat", "skipped_flat"}
    assert flat == {"kept_flat"}
    return str(run.all("judged", "at_limit"))


def completions_of_a_validation_problem(run: Evidence) -> int:
    rows = [(row["round"], row["problem_id"]) for row in run.table("validation")]
    return int(one([rows.count(name) for name in set(rows)]))


def groups_a_round(run: Evidence) -> int:
    rounds = [group[0]["round"] for group in run.groups if group[0]["draw"] == 0]
    return int(one([rounds.count(number) for number in set(rounds)]))


def variants(run: Evidence) -> list[dict[str, str]]:
    """Templates read off prompts, the question taken out again."""
    questions = {r["problem_id"]: r["prompt_text"] for r in run.table("rollouts") if r["template_id"] == "bare"}
    others = [row for row in run.table("rollouts") if row["template_id"] != "bare"]
    return [
        {
            "id": one([row["template_id"] for row in others]),
            "text": one([row["prompt_text"].replace(questions[row["problem_id"]], "{question}") for row in others]),
        }
    ]


def folder_of_policies(run: Evidence) -> str:
    return str(one([run.all("policies", "folder"), run.all("tokenizers", "folder")]))


def folder_of_problems(run: Evidence) -> str:
    assert [call["path"].name for call in run.calls["problems"]] == ["train.jsonl", "validation.jsonl"]
    return str(one([call["path"].parent for call in run.calls["problems"]]))


def wandb(name: str) -> Read:
    return lambda run: one([logger.options[name] for logger in run.module.loggers if isinstance(logger, NoWandb)])


def wandb_mode(run: Evidence) -> str:
    return "not disabled" if any(isinstance(logger, NoWandb) for logger in run.module.loggers) else "disabled"


REACH: dict[str, Reach] = {
    "seed_everything": Reach("kept", 7, seeds),
    "output": Reach("kept", "{folder}/elsewhere", lambda run: str(run.output)),
    "runs": Reach("kept", "{folder}/states", lambda run: str(run.calls["saved"][0]["path"]).rsplit("/", 3)[0]),
    # four updates a round: a state after the second round, and none after the third
    "checkpoint_every_n_updates": Reach(
        "kept", 7, lambda run: [Path(call["path"]).name for call in run.calls["saved"]], ["update-8.ckpt"]
    ),
    "longest_wait_minutes": Reach("kept", 12.5, argument("waiting", "minutes")),
    "wandb.mode": Reach("kept", "disabled", wandb_mode),
    "wandb.project": Reach("drawn_again", "of-its-own", wandb("project")),
    "wandb.group": Reach("drawn_again", "together", wandb("group")),
    "model.rewards.lower_case.check": Reach("kept", "fixtures_policy.share_of_lower_case", check_of("lower_case")),
    "model.rewards.lower_case.weight": Reach("kept", 2.0, weight_of("lower_case")),
    "model.rewards.lower_case.limit_seconds": Reach("kept", None, limit_of("lower_case")),
    "model.rewards.form.limit_seconds": Reach("kept", 55.0, limit_of("form")),
    "model.rewards.form.check": Reach("kept", "fixtures_policy.starts_with_a_letter", check_of("form")),
    "model.rewards.form.weight": Reach("kept", 0.25, weight_of("form")),
    "model.reward_transform.clip": Reach(
        "kept", [0.9375, 1.125], lambda run: [min(steps(run, "clipped")), max(steps(run, "clipped"))]
    ),
    "model.reward_transform.length_penalty": Reach("kept", 0.375, lambda run: -min(steps(run, "length_penalty"))),
    "model.reward_transform.max_length": Reach("kept", 18, lambda run: zone(run)[1]),
    "model.reward_transform.length_zone": Reach("kept", 14, lambda run: zone(run)[0]),
    "model.reward_transform.format_penalty": Reach("kept", 0.5, lambda run: -min(steps(run, "format_penalty"))),
    "model.reward_transform.format_component": Reach("kept", "form", format_component),
    "model.reward_transform.invalid_tool_penalty": Reach("kept", 0.125, fine_a_call),
    "model.sampling.temperature": Reach("kept", 0.75, temperature),
    "model.sampling.max_new_tokens": Reach("kept", 44, argument("uniforms", "count")),
    # prompts of three completions each: four prompts side by side
    "model.sampling.max_rows": Reach("kept", 14, largest_chunk, 12),
    "model.sampling.top_p": Reach("kept", 0.97, cut(1, "top_p")),
    "model.sampling.top_k": Reach("kept", 30, cut(0, "top_k")),
    "model.sampling.min_p": Reach("kept", 0.001, cut(2, "min_p")),
    "model.sampling.stop_strings": Reach("kept", ["~%"], lambda run: list(run.all("stops", "texts"))),
    "model.sampling.shared_prompt": Reach("kept", False, argument("caches", "share_prompts")),
    "model.sampling.tools.available": Reach(
        "kept", {"c": {"class_path": "grpo.rollouts.tools.Calculator"}}, tools, '{"c": "1"}'
    ),
    "model.sampling.tools.opening": Reach("kept", "[", opening),
    "model.sampling.tools.closing": Reach("kept", "]", closing),
    "model.sampling.tools.result": Reach("kept", "={result};", result_text),
    "model.sampling.tools.max_calls": Reach("kept", 1, calls_at_the_limit),
    "model.round.group_size": Reach("kept", 6, lambda run: one([len(group) for group in run.groups])),
    "model.round.group_unit": Reach("kept", "problem_over_variants", unit),
    "model.round.split_groups": Reach("kept", True, lambda run: run.module.trainer.datamodule.train_rounds[0].split),
    "model.round.flat_groups": Reach("kept", "keep", argument("judged", "flat_groups")),
    "model.round.max_draws": Reach("drawn_again", 2, lambda run: max(r["draw"] for r in run.table("rollouts")) + 1),
    "model.round.at_limit": Reach("drawn_again", "keep", limit_verdict),
    "model.round.epochs": Reach("kept", 2, passes_a_round),
    "model.round.minibatches": Reach("kept", 2, lambda run: one([len(call.result) for call in run.calls["parts"]])),
    "model.round.minibatch_split": Reach("kept", "rows", split),
    "model.round.reward_workers": Reach("kept", 1, argument("pools", "max_workers")),
    "model.round.max_failure_share": Reach("kept", 0.25, argument("failures", "max_failure_share")),
    "model.round.validation_samples": Reach("kept", 4, completions_of_a_validation_problem),
    "model.advantages.baseline": Reach("kept", "batch_mean", baseline),
    "model.advantages.scale": Reach("kept", "batch_std", argument("advantages", "scale")),
    "model.advantages.std_correction": Reach("kept", 1, argument("advantages", "std_correction")),
    "model.advantages.epsilon": Reach("kept", 0.125, argument("advantages", "epsilon")),
    "model.loss.clip_low": Reach("kept", 0.125, argument("loss", "clip_low")),
    "model.loss.clip_high": Reach("kept", 0.3, argument("loss", "clip_high")),
    "model.loss.dual_clip": Reach("kept", 3.0, argument("loss", "dual_clip")),
    "model.loss.ratio": Reach("kept", "sequence", argument("loss", "ratio")),
    "model.loss.reduction": Reach("kept", "constant", argument("weights", "reduction")),
    "model.loss.constant_length": Reach("kept", 11, argument("weights", "constant_length")),
    "model.loss.kl_beta": Reach("kept", 0.3, argument("loss", "kl_beta")),
    "model.loss.kl_estimator": Reach("kept", "k2", argument("loss", "kl_estimator")),
    "model.loss.kl_on_flat_groups": Reach("drawn_again", False, kl_on_flat_groups),
    "model.loss.reference_refresh_rounds": Reach("kept", 2, first_refresh),
    "model.loss.entropy_bonus": Reach("kept", 0.01, entropy_bonus),
    "model.loss.old_logprobs": Reach("kept", "recorded", old_logprobs),
    "model.loss.mismatch_cap": Reach("kept", 2.5, argument("loss", "mismatch_cap")),
    "model.loss.mask_truncated": Reach("kept", True, truncated_are_masked),
    "model.optimizer.learning_rate": Reach("kept", 0.0005, lambda run: learning_rates(run)[0]),
    "model.optimizer.end_factor": Reach(
        "kept", 0.5, lambda run: learning_rates(run), [0.0005, pytest.approx(0.000375), 0.00025]
    ),
    "model.optimizer.betas": Reach("kept", [0.8, 0.99], lambda run: list(optimizer("betas")(run))),
    "model.optimizer.weight_decay": Reach("kept", 0.03, optimizer("weight_decay")),
    "model.optimizer.max_gradient_norm": Reach("kept", 0.7, argument("clipped", "max_norm")),
    "model.optimizer.micro_batch_rows": Reach("kept", 7, limit("rows")),
    "model.optimizer.micro_batch_tokens": Reach("kept", 777, limit("tokens")),
    "model.optimizer.shared_prompt": Reach("kept", False, shared_prompt),
    "model.optimizer.gradient_checkpointing": Reach(
        "kept", True, lambda run: run.module.policy.is_activation_checkpointing
    ),
    "model.adapter.rank": Reach("drawn_again", 3, adapter_rank),
    "model.adapter.alpha": Reach("drawn_again", 5.0, adapter_alpha),
    "model.adapter.target_modules": Reach("drawn_again", ["v_proj"], adapted_layers),
    "model.adapter.start": Reach("drawn_again", "{folder}/an-adapter", begun_with),
    "data.policy": Reach("kept", "{folder}/leaning-policy", folder_of_policies),
    "data.problems": Reach("kept", "{folder}/some-problems", folder_of_problems),
    "data.rounds": Reach("kept", 3, lambda run: len({row["round"] for row in run.table("rollouts")})),
    "data.groups_per_round": Reach("kept", 3, groups_a_round),
    "data.validation_problems": Reach("kept", 1, lambda run: len({r["problem_id"] for r in run.table("validation")})),
    "data.max_prompt_tokens": Reach("kept", 77, lambda run: run.module.trainer.datamodule.max_prompt_tokens),
    "data.prompt_variants": Reach("kept", [{"id": "asked", "text": "Q: {question}"}], variants),
}

# Not for the user to set twice: they follow another key.
LINKED = {
    "model.policy": "data.policy",
    "model.seed": "seed_everything",
    "data.seed": "seed_everything",
    "data.group_unit": "model.round.group_unit",
    "data.group_size": "model.round.group_size",
    "data.split_groups": "model.round.split_groups",
    "data.max_new_tokens": "model.sampling.max_new_tokens",
}

# What another engine than this project's own sampler reads: tests/rollouts/test_vllm_sampling.py has runs with each.
# And what several processes alone can show, as tests/distributed/test_gathering.py does.
OF_ENGINES = {f"model.engine.{each.name}" for each in fields(EngineSettings)}

# What a run needs besides, which is not looked for.
BESIDES: dict[str, dict[str, Any]] = {
    "kept": {},
    "drawn_again": {
        "wandb.mode": "offline",
        "model.round.flat_groups": "resample",
        "model.rewards": {"letter": {"check": "fixtures_policy.starts_with_a_letter", "limit_seconds": None}},
    },
}


def put(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value


def get(config: dict[str, Any], key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found[name]
    return found


def configured(folder: Path, name: str) -> dict[str, Any]:
    config = train_config(folder)
    if name == "kept":
        del config["model"]["rewards"]
    for key, value in BESIDES[name].items():
        put(config, key, value)
    for key, reach in REACH.items():
        if reach.run == name:
            put(config, key, reach.marker(folder))
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    found = {}
    for name in BESIDES:
        folder = tmp_path_factory.mktemp(name)
        leaning_policy_folder(folder / "leaning-policy", "[]c", by=5.0)
        problem_folder(folder / "some-problems")
        adapter_folder(folder / "an-adapter", AdapterSettings(rank=3, alpha=5.0, target_modules=("v_proj",)))
        config = configured(folder, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("WANDB_MODE", raising=False)
            patch.setattr(run_loggers, "WandbLogger", NoWandb)
            calls = {watched: watch(patch, *place) for watched, place in WATCHED.items()}
            published = watch(patch, train, "publish")
            train.main(["--config", write_config(folder / "train.yaml", config)])
        found[name] = Evidence(folder, published[0]["output"], calls)
    return found


@pytest.mark.parametrize("key", REACH)
def test_a_setting_reaches_what_it_is_for(runs: dict[str, Evidence], key: str) -> None:
    reach = REACH[key]
    run = runs[reach.run]
    assert reach.read(run) == reach.expected(run.folder)


@pytest.mark.parametrize("key", REACH)
def test_a_setting_stands_in_the_record_of_the_policy_it_made(runs: dict[str, Evidence], key: str) -> None:
    reach = REACH[key]
    run = runs[reach.run]
    assert get(run.resolved(), key) == reach.marker(run.folder)


def test_every_rollout_holds_the_sampling_settings_it_was_drawn_under(runs: dict[str, Evidence]) -> None:
    markers = {key.removeprefix("model.sampling."): r.value for key, r in REACH.items() if "sampling" in key}
    expected = {name: value for name, value in markers.items() if not name.startswith("tools.")}
    rules = {name.removeprefix("tools."): value for name, value in markers.items() if name.startswith("tools.")}
    expected["tool_calls"] = {name: value for name, value in rules.items() if name != "available"}
    assert expected.keys() == {f.name for f in fields(SamplingSettings)} - {"tools"} | {"tool_calls"}
    for table in ("rollouts", "validation"):
        rows = runs["kept"].table(table)
        assert one([row["sampling_settings"] for row in rows]) == json.dumps(expected, sort_keys=True)
        assert one([row["tools"] for row in rows]) == '{"c": "1"}'


# The table itself

SECTIONS: dict[str, type] = {
    "model.adapter": AdapterSettings,
    "model.engine": EngineSettings,
    "model.advantages": AdvantageSettings,
    "model.loss": LossSettings,
    "model.optimizer": OptimizerSettings,
    "model.round": RoundSettings,
    "model.sampling": SamplingSettings,
    "model.sampling.tools": ToolSettings,
    "model.reward_transform": RewardTransform,
    "model.rewards.lower_case": RewardComponent,
    "wandb": WandbSettings,
}
CONSTRUCTORS = {"model": GRPOModule, "data": PromptGroupDataModule}


def defaults() -> dict[str, Any]:
    """Every key that a constructor takes, with its default; sections, whose fields are there, are left out."""
    found: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        for each in fields(kind):
            found[f"{section}.{each.name}"] = each.default
    for section, constructor in CONSTRUCTORS.items():
        for name, parameter in inspect.signature(constructor).parameters.items():
            found[f"{section}.{name}"] = MISSING if parameter.default is parameter.empty else parameter.default
    return {key: value for key, value in found.items() if key not in {*SECTIONS, "model.rewards"}}


def test_the_table_covers_every_setting() -> None:
    assert set(defaults()) - set(LINKED) - OF_ENGINES <= set(REACH)
    assert set(LINKED) <= set(defaults())
    assert set(LINKED.values()) <= set(REACH)


def test_the_table_covers_every_key_of_a_resolved_configuration(runs: dict[str, Evidence]) -> None:
    def keys(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in config.items():
            key = prefix + name
            if isinstance(value, dict) and key not in REACH:
                yield from keys(value, f"{key}.")
            else:
                yield key

    found = {key for key in keys(runs["kept"].resolved()) if not key.startswith("trainer.")}
    # Null in the one run, and set in the other.
    adapter = set(keys(runs["drawn_again"].resolved()["model"]["adapter"], "model.adapter."))
    assert found - {"model.adapter"} - set(LINKED) - OF_ENGINES | adapter == set(REACH)


def test_no_marker_is_the_default() -> None:
    cli = {"seed_everything": 1, "output": "build/train", "runs": "runs", "checkpoint_every_n_updates": 4}
    for key, default in (defaults() | cli).items():
        if key in REACH and default is not MISSING:
            value = REACH[key].value
            assert (tuple(value) if isinstance(value, list) else value) != default, key


def test_the_shipped_configuration_names_every_setting() -> None:
    config = yaml.safe_load((Path(__file__).parents[2] / "configs" / "train.yaml").read_text(encoding="utf-8"))
    optional = (
        "model.rewards.",
        "model.sampling.tools.",
        "model.adapter.",
        "wandb.group",
    )  # a file of its own; null by default
    for key in REACH:
        if not key.startswith(optional):
            get(config, key)
