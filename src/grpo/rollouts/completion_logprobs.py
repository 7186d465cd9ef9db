"""Log-probabilities of given completions, each prompt run once, and the output layer only where a token counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from grpo.rollouts.chosen_logprobs import LogitRule, chosen_logprobs
from grpo.rollouts.packed_rows import PADDING, PackedRows, pack_rows


@dataclass(frozen=True)
class ModelTraits:
    """What was found out about a model by trying it on a few tokens.

    Args:
        rule: how its logits follow from the output layer; None where that could not be told, and its own logits
            are taken.
        packs: whether completions beside one another do not see each other under a mask that says so.
    """

    rule: LogitRule | None
    packs: bool


_TRAITS: WeakKeyDictionary[PreTrainedModel, ModelTraits] = WeakKeyDictionary()


def completion_logprobs(
    model: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    completions: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    rows_per_prompt: Tensor | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given completions, each prompt run once for all its completions.

    Args:
        model: the policy or the reference.
        prompts: ``[P, L]`` left-padded prompt tokens.
        prompt_mask: ``[P, L]``, 1 at prompt tokens.
        completions: ``[N, T]`` right-padded, those of a prompt side by side.
        mask: ``[N, T]``, 1 at the tokens whose log-probabilities are wanted. What stands before the last of them in
            a row is read, wanted or not; what stands after it costs nothing.
        temperature: divides the logits, as it did when the tokens were drawn.
        rows_per_prompt: ``[P]``, completions of each prompt; by default ``N / P`` of each. They share a pass over it
            where the model allows that.
        entropy_gradient: whether the entropies carry a gradient.

    Returns:
        log-probabilities ``[N, T]`` and entropies ``[N, T]`` in nats, float32 (float64 where the model is); 0 where
        none is wanted.
    """
    traits = traits_of(model)
    wanted = mask.bool()
    if rows_per_prompt is None:
        rows_per_prompt = torch.full((len(prompts),), len(completions) // len(prompts))
    rows_per_prompt = rows_per_prompt.to(prompts.device)
    pack = pack_rows if traits.packs else _one_by_one
    packed = pack(prompts, prompt_mask, completions, wanted, rows_per_prompt)
    if traits.rule is None:
        values = _from_its_own_logits(model, packed, completions[wanted], temperature, entropy_gradient)
    else:
        hidden = _hidden_states(model, packed).flatten(0, 1)[packed.source]
        head: Any = model.get_output_embeddings()
        rule = replace(traits.rule, temperature=temperature)
        values = chosen_logprobs(hidden, head.weight, head.bias, completions[wanted], rule, entropy_gradient)
    logprobs, entropies = (_spread(value, wanted) for value in values)
    return logprobs, entropies


def _one_by_one(
    prompts: Tensor, prompt_mask: Tensor, completions: Tensor, wanted: Tensor, rows_per_prompt: Tensor
) -> PackedRows:
    """As :func:`pack_rows`, each completion behind a prompt of its own."""
    prompts, prompt_mask = (t.repeat_interleave(rows_per_prompt, dim=0) for t in (prompts, prompt_mask))
    return pack_rows(prompts, prompt_mask, completions, wanted, torch.ones_like(completions[:, 0]))


def _spread(values: Tensor, wanted: Tensor) -> Tensor:
    """``[N, T]`` with the ``[M]`` values where they are wanted, and 0 elsewhere."""
    return torch.zeros(wanted.shape, dtype=values.dtype, device=values.device).masked_scatter(wanted, values)


def _from_its_own_logits(
    model: PreTrainedModel, packed: PackedRows, tokens: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The plain way: the whole logits of every token, then those that are wanted."""
    logits = model(**_inputs(model, packed)).logits.flatten(0, 1)[packed.source]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = torch.special.entr(logprobs.exp()).sum(dim=-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropies


def _hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """``[B, S, H]``, what the output layer is given."""
    hidden: Tensor = model.base_model(**_inputs(model, packed))[0]
    return hidden


def _inputs(model: PreTrainedModel, packed: PackedRows) -> dict[str, Any]:
    if packed.alone:
        # A plain right-padded batch, which every causal model takes: padding comes last, and nothing sees it.
        return {
            "input_ids": packed.tokens,
            "attention_mask": (packed.owner != PADDING).long(),
            "use_cache": False,
        }
    return {
        "input_ids": packed.tokens,
        "position_ids": packed.positions,
        "attention_mask": _masks(model, packed),
        "use_cache": False,
    }


def _masks(model: PreTrainedModel, packed: PackedRows) -> Any:
    """The mask of packed rows, ``[B, 1, S, S]``, for every kind of layer: added to the scores, made once a pass."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        windows = {"full_attention": None, "sliding_attention": window}
        return {kind: _added(packed.visible(windows[kind]), model.dtype) for kind in sorted(kinds)}
    return _added(packed.visible(None if kinds else window), model.dtype)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def traits_of(model: PreTrainedModel) -> ModelTraits:
    """What a model allows, found out the first time it is asked for; what it does not allow is warned of."""
    if model not in _TRAITS:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
            traits = ModelTraits(_find_rule(model), _can_pack(model))
        name = type(model).__name__
        if traits.rule is None:
            cut = is_cut_up(model)
            why = "has its output layer cut up (ZeRO stage 3, FSDP2)" if cut else "makes its logits in an unknown way"
            warnings.warn(f"{name} {why}: whole logits are kept in the update, which costs memory", stacklevel=3)
        if not traits.packs:
            warnings.warn(
                f"{name} does not keep completions apart that share a pass over their prompt: the prompt runs once for "
                "each, as with optimizer.shared_prompt: false",
                stacklevel=3,
            )
        _TRAITS[model] = traits
    return _TRAITS[model]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for a moment; the mode of each module is given back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _probe(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Two prompts with two completions each: prompts, mask, completions, mask, rows a prompt."""
    # Not from the embeddings themselves, which ZeRO's stage 3 would put together and keep for the rest of the round.
    highest = min(model.config.get_text_config().vocab_size, 64)
    ids = (torch.arange(12, device=model.device) * 7 + 1) % highest
    prompts = torch.stack([ids[:3], torch.cat([ids.new_zeros(1), ids[3:5]])])
    completions = torch.stack([ids[5:8], ids[8:11], ids[2:5], ids[6:9]])
    everywhere = torch.ones_like(completions).bool()
    everywhere[1, 2:] = False
    prompt_mask = torch.ones_like(prompts)
    prompt_mask[1, 0] = 0
    return prompts, prompt_mask, completions, everywhere, torch.tensor([2, 2], device=model.device)


def _find_rule(model: PreTrainedModel) -> LogitRule | None:
    """The rule under which a plain output layer gives the model's own logits."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or model.base_model is model:
        return None
    if is_cut_up(model):  # and put together for the model's own pass alone
        return None
    prompts, mask, completions, wanted, repeats = _probe(model)
    rows = _one_by_one(prompts, mask, completions, wanted, repeats)
    try:
        expected = model(**_inputs(model, rows)).logits
        output = head(_hidden_states(model, rows))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
    for rule in _known_rules(model):
        if alike(rule.apply_(output.clone()), expected):
            return rule
    return None


def is_cut_up(model: PreTrainedModel) -> bool:
    """Whether each process has a part of every weight alone, by FSDP2 or by DeepSpeed."""
    return isinstance(model, FSDPModule) or hasattr(next(model.parameters()), "ds_id")


def _known_rules(model: PreTrainedModel) -> list[LogitRule]:
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    named = ("logit_scale", "logits_scaling", "lm_head_multiplier")
    factors = [float(value) for name in named if (value := getattr(config, name, None))]
    return [LogitRule(scale, cap) for scale in [1.0, *factors, *(1.0 / factor for factor in factors)]]


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether packed rows give the hidden states that their completions have alone."""
    if model.config._attn_implementation not in ("sdpa", "eager") or has_windows_of_its_own(model):
        return False
    prompts, mask, completions, wanted, repeats = _probe(model)
    packed = pack_rows(prompts, mask, completions, wanted, repeats)
    alone = _one_by_one(prompts, mask, completions, wanted, repeats)
    try:
        together, apart = (model(**_inputs(model, rows)).logits.flatten(0, 1)[rows.source] for rows in (packed, alone))
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False
    return alike(together, apart)


def has_windows_of_its_own(model: PreTrainedModel) -> bool:
    """Whether a layer may cut its view by columns, which are not positions in a packed row: no short trial shows it.

    Sliding windows are said to the model in the mask, and count positions.
    """
    settings = model.config.get_text_config().to_dict()
    return any(
        ("window" in name or "chunk" in name)
        and "sliding_window" not in name
        and name != "max_window_layers"
        and type(value) is int
        and value > 0
        for name, value in settings.items()
    )


def alike(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding, in units of the largest difference within a row's values."""
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 3e-2
    one, other = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (one, other))  # impossible tokens are at -inf
    spread = (other.amax(-1) - other.amin(-1)).amax()
    return bool((one - other).abs().amax() <= tolerance * spread)
