"""Training an adapter of low rank: its gradient, its reference, what is kept, resumed and published."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import TOKENIZER, adapter_folder, policy_folder, random_llama, train_config, write_config
from fixtures_rounds import LOWER_CASE, Run, gradient, plain_logprobs, relative_difference
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo import train
from grpo.export import ExportError, ExportSettings, export
from grpo.planning.shapes import read_shape
from grpo.rollouts.adapter_files import AdapterSettings, read_adapter
from grpo.rollouts.adapters import (
    REFERENCE,
    TRAINED,
    adapter_parameters,
    as_reference,
    merge,
    put_adapter,
    require_fit,
    trained_weights,
)
from grpo.rollouts.completion_logprobs import completion_logprobs
from grpo.rollouts.policies import load_policy
from grpo.training import grpo_module
from grpo.training.checkpoints import newest_checkpoint
from grpo.training.grpo_module import GRPOModule
from grpo.training.settings import LossSettings, OptimizerSettings, RoundSettings

SMALL = AdapterSettings(rank=4, alpha=8.0)
# PEFT's own model class asks transformers by a name that has since changed; the training does not use that class.
PEFT_WARNS = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
FAST = OptimizerSettings(learning_rate=1e-2)


def random_adapter(folder: Path) -> Path:
    return adapter_folder(folder, SMALL)


def from_adapter(folder: Path) -> AdapterSettings:
    return AdapterSettings(SMALL.rank, SMALL.alpha, start=folder)


def base_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The frozen weights of an adapted model, by the names that they have without an adapter."""
    state = model.state_dict()
    return {name.replace(".base_layer", ""): weight for name, weight in state.items() if ".lora_" not in name}


def greedy(model: PreTrainedModel) -> list[list[int]]:
    prompts = [TOKENIZER(f"{i} + {i} =").input_ids for i in range(10, 18)]
    ended = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.eval().generate(torch.tensor([p]), **ended)[0].tolist() for p in prompts]


# The reference


def test_the_reference_is_the_policy_without_its_adapter(tmp_path: Path) -> None:
    run = Run(tmp_path, adapter=SMALL, rounds=3, optimizer=FAST, round=RoundSettings(group_size=4, minibatches=2)).go()
    assert run.module.reference is None
    assert run.metrics[0]["loss/kl"] < 1e-2 < run.metrics[2]["loss/kl"]
    base = load_policy(tmp_path / "policy").model
    for number in range(3):
        for row in run.joined(number):
            if row["reference_logprobs"] is None:
                continue
            expected = plain_logprobs(base, row)[0].tolist()
            assert row["reference_logprobs"] == pytest.approx(expected, abs=1e-4)
            distance = (torch.tensor(row["recomputed_old_logprobs"]) - torch.tensor(expected)).abs().max()
            assert (distance < 1e-4) if number == 0 else distance > 1e-3


def test_an_adapter_that_has_not_moved_is_at_no_distance_from_the_reference(tmp_path: Path) -> None:
    for name, settings in {"off": SMALL, "begun": from_adapter(random_adapter(tmp_path / "adapter"))}.items():
        run = Run(tmp_path / name, adapter=settings).go()
        assert run.metrics[0]["loss/kl"] == 0.0
        assert run.metrics[1]["loss/kl"] > 1e-9
        for row in run.joined():
            assert row["reference_logprobs"] == row["recomputed_old_logprobs"]


def test_the_adapter_begun_with_is_the_reference_and_stays_as_it_was(tmp_path: Path) -> None:
    settings = from_adapter(random_adapter(tmp_path / "adapter"))
    run = Run(tmp_path, adapter=settings, rounds=3, optimizer=FAST).go()
    begun = read_adapter(settings)
    assert begun is not None
    merged, base = (load_policy(tmp_path / "policy").model for _ in range(2))
    merge(begun, merged)
    for row in run.joined(2):
        if row["reference_logprobs"] is not None:
            expected, without = (torch.tensor(plain_logprobs(model, row)[0].tolist()) for model in (merged, base))
            assert row["reference_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
            assert (expected - without).abs().max() > 1e-2
    frozen = adapter_parameters(run.module.policy, REFERENCE)
    moved = adapter_parameters(run.module.policy, TRAINED)
    for layer, (first, second) in begun.factors.items():
        for factor, weight in (("A", first), ("B", second)):
            assert torch.equal(frozen[f"{layer}.lora_{factor}.{REFERENCE}.weight"], weight)
            assert not torch.equal(moved[f"{layer}.lora_{factor}.{TRAINED}.weight"], weight)


def test_a_renewed_reference_is_the_adapter_of_that_round(tmp_path: Path) -> None:
    loss = LossSettings(reference_refresh_rounds=2)
    run = Run(tmp_path, adapter=SMALL, rounds=4, optimizer=FAST, loss=loss).go()
    kl = [row["loss/kl"] for row in run.metrics]
    assert kl[0] == kl[2] == 0.0
    assert min(kl[1], kl[3]) > 1e-9
    versions = {row["reference_version"] for row in run.table("updates") if row["reference_logprobs"]}
    assert versions == {0, 2}


@pytest.mark.parametrize("begun", [False, True])
def test_no_second_model_is_held(tmp_path: Path, begun: bool) -> None:
    adapter = from_adapter(random_adapter(tmp_path / "adapter")) if begun else SMALL
    run = Run(tmp_path, adapter=adapter, rounds=1).go()
    base = sum(weight.numel() for weight in load_policy(tmp_path / "policy").model.parameters())
    trained = sum(weight.numel() for weight in run.module.parameters() if weight.requires_grad)
    assert trained == read_shape(str(tmp_path / "policy")).trainable(SMALL.rank)  # as `grpo plan` counts them
    assert sum(weight.numel() for weight in run.module.parameters()) == base + trained * (2 if begun else 1)


def test_the_adapter_is_on_again_after_the_reference(tmp_path: Path) -> None:
    model = random_llama()
    put_adapter(model, from_adapter(random_adapter(tmp_path / "adapter")), 1, own_reference=False)
    tokens = torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    with as_reference(model):
        assert torch.equal(model(tokens).logits, random_llama()(tokens).logits)
    with suppress(KeyError), as_reference(model):
        raise KeyError
    assert torch.equal(model(tokens).logits, before)
    assert all(weight.requires_grad for weight in adapter_parameters(model, TRAINED).values())


# What is trained


def test_only_the_adapter_is_trained_and_the_base_keeps_every_bit(tmp_path: Path) -> None:
    run = Run(tmp_path, adapter=SMALL, rounds=3, optimizer=FAST).go()
    original = load_policy(tmp_path / "policy").model.state_dict()
    base = base_of(run.module.policy)
    assert base.keys() == original.keys()
    assert all(torch.equal(base[name], weight) for name, weight in original.items())
    [group] = run.trainer.optimizers[0].param_groups
    trained = adapter_parameters(run.module.policy, TRAINED)
    assert {id(weight) for weight in group["params"]} == {id(weight) for weight in trained.values()}
    assert all(name.endswith("_proj.lora_A.default.weight") or "lora_B" in name for name in trained)
    assert all(weight.abs().max() > 0 for weight in trained.values())


def test_a_rounds_gradient_is_that_of_all_weights_projected(tmp_path: Path) -> None:
    """At first the second factors are zero, so the policy, its draws and its loss are those of a full training."""
    whole, adapted = Run(tmp_path, rounds=1), Run(tmp_path, rounds=1, adapter=SMALL)
    flat = gradient(whole)
    sizes = [weight.numel() for weight in whole.module.policy.parameters()]
    names = [name for name, _ in whole.module.policy.named_parameters()]
    full = dict(zip(names, flat.split(sizes), strict=True))
    mine = gradient(adapted)
    weights = dict(adapted.module.policy.named_parameters())
    parts = dict(zip(weights, mine.split([weight.numel() for weight in weights.values()]), strict=True))
    compared = 0
    for name, part in parts.items():
        if ".lora_B." in name:
            layer = name.removesuffix(f".lora_B.{TRAINED}.weight")
            first = weights[name.replace("lora_B", "lora_A")].detach()
            of_layer = full[f"{layer}.weight"].view(weights[name].shape[0], first.shape[1])
            expected = (SMALL.alpha / SMALL.rank) * of_layer @ first.T
            assert expected.norm() > 1e-4
            assert relative_difference(part, expected.flatten()) < 1e-4, name
            compared += 1
        else:
            assert part.abs().max() == 0.0, name
    assert compared == 14


def test_the_gradient_is_exact_in_double_precision(tmp_path: Path) -> None:
    """With W' = W + s B A and G = dL/dW': dL/dB = s G A' and dL/dA = s B' G."""
    settings = from_adapter(random_adapter(tmp_path / "adapter"))
    begun = read_adapter(settings)
    assert begun is not None
    whole, adapted = random_llama().double(), random_llama()
    put_adapter(adapted, settings, 1, own_reference=False)
    adapted.double()
    scale = SMALL.alpha / SMALL.rank
    with torch.no_grad():
        for name, (first, second) in begun.factors.items():
            whole.get_submodule(name).weight += scale * second.double() @ first.double()  # type: ignore[operator]
    for model in (whole, adapted):
        _some_loss(model).backward()  # type: ignore[no-untyped-call]
    weights = adapter_parameters(adapted, TRAINED)
    for name, (first, second) in begun.factors.items():
        full = whole.get_parameter(f"{name}.weight").grad
        a, b = (weights[f"{name}.lora_{factor}.{TRAINED}.weight"].grad for factor in "AB")
        assert full is not None
        assert a is not None
        assert b is not None
        torch.testing.assert_close(b, scale * full @ first.double().T, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(a, scale * second.double().T @ full, rtol=1e-9, atol=1e-12)
        assert min(a.norm(), b.norm()) > 1e-6


def _some_loss(model: PreTrainedModel) -> Tensor:
    tokens = torch.arange(20) % 7 + 5
    prompts, completions = tokens[:8].view(2, 4), tokens[8:20].view(4, 3)
    logprobs, _ = completion_logprobs(model, prompts, torch.ones_like(prompts), completions, torch.ones(4, 3))
    return (logprobs * torch.linspace(-1, 1, 12, dtype=logprobs.dtype).view(4, 3)).sum()


@pytest.mark.parametrize("change", [{"gradient_checkpointing": True}, {"micro_batch_rows": 4}])
def test_the_gradient_does_not_depend_on_how_it_is_computed(tmp_path: Path, change: dict[str, Any]) -> None:
    adapter = from_adapter(random_adapter(tmp_path / "adapter"))
    options = [OptimizerSettings(), OptimizerSettings(**change)]
    one, other = (gradient(Run(tmp_path, adapter=adapter, optimizer=each, rounds=1)) for each in options)
    assert one.norm() > 1e-3
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_the_reward_rises(tmp_path: Path) -> None:
    adapter = AdapterSettings(rank=8, alpha=16.0)
    run = Run(tmp_path, adapter=adapter, rounds=20, groups=6, optimizer=FAST, round=RoundSettings(group_size=8)).go()
    rewards = [row["reward/mean"] for row in run.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.08


def test_the_first_factors_are_keyed_by_the_seed_alone() -> None:
    def factors(seed: int, before: int) -> Tensor:
        model = random_llama()
        torch.manual_seed(before)
        put_adapter(model, SMALL, seed, own_reference=True)
        drawn = torch.rand(1)
        torch.manual_seed(before)
        assert torch.equal(drawn, torch.rand(1))  # nothing was taken from the shared generator
        pairs = [adapter_parameters(model, adapter) for adapter in (TRAINED, REFERENCE)]
        assert all(torch.equal(*both) for both in zip(*(pair.values() for pair in pairs), strict=True))
        return torch.cat([weight.detach().flatten() for name, weight in pairs[0].items() if "lora_A" in name])

    assert torch.equal(factors(1, 8), factors(1, 9))
    assert not torch.equal(factors(1, 8), factors(2, 8))


def test_an_adapter_stands_on_the_layers_that_are_named() -> None:
    settings = AdapterSettings(rank=2, target_modules=("q_proj", "layers.1.mlp.down_proj"))
    model = random_llama()
    put_adapter(model, settings, 1, own_reference=False)
    layers = list(trained_weights(model, settings).factors)
    q, down = "model.layers.{}.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    assert sorted(layers) == sorted([q.format(0), q.format(1), down])


# What is kept, resumed and published


def configured(folder: Path, adapter: dict[str, Any] | None = None, **loss: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    config = train_config(folder)
    config["model"]["adapter"] = {"rank": 4, "alpha": 8.0} if adapter is None else adapter
    config["model"]["loss"] = loss
    config["model"]["optimizer"]["learning_rate"] = 1e-2
    config["trainer"]["callbacks"] = [
        {"class_path": "fixtures_policy.KeepsState", "init_args": {"to": str(folder / "kept.ckpt")}}
    ]
    return config


def go(folder: Path, config: dict[str, Any]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        train.main(["--config", write_config(folder / "train.yaml", config)])
    return folder / "output"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    go(folder, configured(folder))
    return folder


def test_a_state_holds_the_adapter_and_nothing_frozen(finished: Path) -> None:
    state = torch.load(finished / "kept.ckpt", weights_only=True)
    assert len(state["state_dict"]) == 2 * 14
    assert all(".lora_" in name and f".{TRAINED}." in name for name in state["state_dict"])
    assert len(state["optimizer_states"][0]["state"]) == 2 * 14


class Killed(BaseException):
    """As abrupt as a signal."""


def kill_in_round(folder: Path, config: dict[str, Any], round_index: int) -> Path:
    """Start a run that dies in that round; give the state that it left."""
    real: Callable[..., Any] = GRPOModule._advantages

    def dying(self: GRPOModule, *args: Any) -> Any:
        if self.trainer.fit_loop.epoch_loop.batch_idx == round_index:
            raise Killed
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOModule, "_advantages", dying)
        with pytest.raises(Killed):
            go(folder, config)
    [run_folder] = (folder / "runs").iterdir()
    newest = newest_checkpoint(run_folder)
    assert newest is not None
    return newest


@pytest.mark.parametrize("loss", [{}, {"reference_refresh_rounds": 3}], ids=["off", "renewed"])
def test_a_run_that_was_killed_ends_as_the_straight_one(tmp_path: Path, loss: dict[str, Any]) -> None:
    straight = go(tmp_path / "straight", configured(tmp_path / "straight", **loss))
    config = configured(tmp_path / "killed", **loss)
    state = torch.load(kill_in_round(tmp_path / "killed", config, 5), weights_only=True)
    assert state["reference_version"] == (3 if loss else 0)  # the state is that of four rounds
    assert len([name for name in state["state_dict"] if f".{REFERENCE}." in name]) == (28 if loss else 0)
    resumed = go(tmp_path / "killed", config)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(output / "policy" / file) for output in (straight, resumed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    one, other = ((output / "metrics.csv").read_text().splitlines() for output in (straight, resumed))
    assert len(one) == len(other) == 7


def test_a_state_that_lacks_a_factor_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    kept = kill_in_round(tmp_path, config, 3)
    state = torch.load(kept, weights_only=False)
    del state["state_dict"]["policy.model.layers.0.mlp.up_proj.lora_A.default.weight"]
    torch.save(state, kept)
    with pytest.raises(RuntimeError, match=r"up_proj\.lora_A\.default\.weight"):
        go(tmp_path, config)


@pytest.mark.filterwarnings(PEFT_WARNS)
def test_what_is_published_is_a_plain_folder_with_the_adapter_in_its_weights(finished: Path) -> None:
    published = finished / "output" / "policy"
    merged = AutoModelForCausalLM.from_pretrained(published)
    plain = AutoModelForCausalLM.from_pretrained(finished / "policy")
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert not hasattr(merged, "peft_config")
    beside = PeftModel.from_pretrained(plain, str(published / "adapter"))
    assert beside.peft_config["default"].base_model_name_or_path == str(finished / "policy")
    tokens = torch.tensor([TOKENIZER("12 + 3 =").input_ids])
    with beside.disable_adapter():
        assert (merged(tokens).logits - beside(tokens).logits).abs().max() > 1e-2
    torch.testing.assert_close(merged(tokens).logits, beside(tokens).logits, atol=1e-4, rtol=1e-4)
    assert greedy(merged) == greedy(beside)
    found = AutoPeftModelForCausalLM.from_pretrained(str(published / "adapter"))  # with the base that its file names
    assert torch.equal(found(tokens).logits, beside(tokens).logits)
    layers = json.loads((published / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert layers == sorted(layers)  # the same bytes from the same run


def test_the_published_policy_says_what_the_live_one_says(tmp_path: Path) -> None:
    run = Run(tmp_path, adapter=SMALL, rounds=4, optimizer=FAST).go()
    live = greedy(run.module.policy)
    assert greedy(run.module.trained_policy().model) == live
    assert greedy(load_policy(tmp_path / "policy").model) != live


def test_an_export_of_the_last_state_is_what_was_published(finished: Path, tmp_path: Path) -> None:
    export(ExportSettings(finished / "kept.ckpt", finished / "policy", tmp_path / "exported"))
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(f / file) for f in (tmp_path / "exported", finished / "output" / "policy"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file


def test_an_export_beside_another_policy_is_refused(finished: Path, tmp_path: Path) -> None:
    other = policy_folder(tmp_path / "other", seed=4)
    with pytest.raises(ExportError, match=r"trained beside another policy than .*other"):
        export(ExportSettings(finished / "kept.ckpt", other, tmp_path / "exported"))
    for factor in "AB":
        state = torch.load(finished / "kept.ckpt", weights_only=True)
        del state["state_dict"][f"policy.model.layers.0.mlp.up_proj.lora_{factor}.default.weight"]
        torch.save(state, tmp_path / "less.ckpt")
        with pytest.raises(ExportError, match=r"lacks \['model\.layers\.0\.mlp\.up_proj'\]"):
            export(ExportSettings(tmp_path / "less.ckpt", finished / "policy", tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()


def test_a_published_adapter_can_be_begun_with(finished: Path, tmp_path: Path) -> None:
    start = {"rank": 4, "alpha": 8.0, "start": str(finished / "output" / "policy" / "adapter")}
    config = configured(tmp_path, start)
    config["data"]["rounds"] = 1
    config["checkpoint_every_n_updates"] = 1
    output = go(tmp_path, config)
    told = json.loads((output / "run.json").read_text())
    assert len(told["adapter"]["start"]) == 64
    ours, theirs, base = (
        load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
        for folder in (output / "policy", finished / "output" / "policy", finished / "policy")
    )
    assert (ours - theirs).abs().max() < (ours - base).abs().max()


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"adapter\.rank is 0: it must be at least 1"),
        ({"rank": None}, r"adapter\.rank is null: give a number"),
        ({"alpha": None}, r"adapter\.alpha is null: give a number"),
        ({"alpha": 0.0}, r"adapter\.alpha is 0\.0: it must be positive"),
        ({"alpha": float("nan")}, r"adapter\.alpha is nan"),
        ({"target_modules": ()}, r"adapter\.target_modules is \[\]"),
        ({"start": Path("no/such")}, r"adapter\.start is no/such, which has no adapter_config\.json"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOModule(Path("no/such/policy"), LOWER_CASE, adapter=AdapterSettings(**settings))


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens", "proj"])
def test_layers_that_there_are_not_are_listed_before_weights_are_read(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, adapter=AdapterSettings(target_modules=("q_proj", target)))
    monkeypatch.delattr(grpo_module, "load_policy")
    with pytest.raises(ValueError, match=rf"adapter\.target_modules .* \['{target}'\] are no .* name some of \['down_"):
        run.go()
    assert not (tmp_path / "record").exists()


def test_an_adapter_trained_beside_another_policy_is_no_beginning(tmp_path: Path, finished: Path) -> None:
    """The policy that was published with it is another one too: it would hold it twice."""
    published = finished / "output" / "policy"
    start = AdapterSettings(rank=4, alpha=8.0, start=published / "adapter")
    require_fit(finished / "policy", start)
    policy_folder(tmp_path / "other", seed=9)
    for policy in (published, tmp_path / "other"):
        message = rf"start is {start.start}, which was trained beside another policy than data\.policy = {policy} \(be"
        with pytest.raises(ValueError, match=message):
            require_fit(policy, start)


@pytest.mark.parametrize("name", ["rank", "alpha"])
def test_an_adapter_of_another_form_is_no_beginning(tmp_path: Path, name: str) -> None:
    start = random_adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"adapter\.{name} is 16.*: set adapter\.{name} to {getattr(SMALL, name):g}"):
        AdapterSettings(**{"rank": SMALL.rank, "alpha": SMALL.alpha, "start": start} | {name: 16}).check()


@pytest.mark.parametrize("other", [{"use_dora": True}, {"bias": "all"}, {"use_rslora": True}, {"target_modules": "q"}])
def test_an_adapter_of_another_kind_is_no_beginning(tmp_path: Path, other: dict[str, Any]) -> None:
    """As PEFT itself writes it."""
    model = random_llama()
    start = random_adapter(tmp_path / "adapter")
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | other
    if other == {"target_modules": "q"}:
        model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), model)
        fewer = {n: w for n, w in load_file(start / "adapter_model.safetensors").items() if "q_proj" in n}
        save_file(fewer, start / "adapter_model.safetensors")
        message = r"adapter\.start is .*: it lacks \['model\.layers\.0\.mlp\.down_proj'"
    else:
        LoraConfig(**options).save_pretrained(str(start))
        message = rf"adapter\.start is .*, an adapter of another kind than plain LoRA: it has {{'{next(iter(other))}'"
    with pytest.raises(ValueError, match=message):
        put_adapter(random_llama(), from_adapter(start), 1, own_reference=True)


@pytest.mark.filterwarnings(PEFT_WARNS)
def test_an_adapter_that_peft_trained_is_a_beginning(tmp_path: Path) -> None:
    """Its names, its dropout and its layers named in PEFT's own way."""
    from peft import get_peft_model

    peft_model = get_peft_model(
        random_llama(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")
    )
    torch.nn.init.normal_(peft_model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"))
    peft_model.save_pretrained(str(tmp_path / "adapter"))
    model = random_llama()
    put_adapter(model, from_adapter(tmp_path / "adapter"), 1, own_reference=True)
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(tokens).logits, peft_model.eval()(tokens).logits)
    assert not torch.equal(model(tokens).logits, random_llama()(tokens).logits)


@pytest.mark.parametrize(
    ("of_the_config", "message"),
    [({"r": "4"}, "describes no LoRA adapter"), ({"use_magic": True}, r"another kind .* it has \{'use_magic': True\}")],
)
def test_an_adapter_that_says_more_than_is_known_is_refused(
    tmp_path: Path, of_the_config: dict[str, Any], message: str
) -> None:
    run = Run(tmp_path, adapter=from_adapter(random_adapter(tmp_path / "adapter")))
    written = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(written.read_text())
    written.write_text(json.dumps(config | {"off_in_a_later_version": False}))
    require_fit(tmp_path / "policy", run.module.adapter_settings)
    written.write_text(json.dumps(config | of_the_config))
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, adapter=from_adapter(tmp_path / "adapter")).go()


def test_whole_numbers_are_no_factors(tmp_path: Path) -> None:
    weights = random_adapter(tmp_path / "adapter") / "adapter_model.safetensors"
    save_file({name: weight.to(torch.int64) for name, weight in load_file(weights).items()}, weights)
    with pytest.raises(ValueError, match="other weights than pairs of finite factors"):
        read_adapter(from_adapter(tmp_path / "adapter"))


def test_a_broken_adapter_is_refused(tmp_path: Path) -> None:
    start = random_adapter(tmp_path / "adapter")
    settings = from_adapter(start)
    (start / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"adapter\.start is .* cannot be read"):
        read_adapter(settings)
    (start / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter\.start is .* describes no LoRA adapter"):
        settings.check()
