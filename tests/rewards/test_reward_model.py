import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grpo.records import Problem, Score
from grpo.rewards import BatchReward, judge_batch
from grpo.rewards.reward_model import RewardModel, load_classifier

PROBLEM = Problem("p", "one plus one", "two", "s")
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "one", "two", "three", "plus", "is", "so", "user", "assistant", ":", "\n"]
TEMPLATE = "{question} is {completion}"
TEXTS = ["two", "three", "so one plus one is two", "", "one " * 20, "two", "\U0001f600", "one plus"]
LONGEST = 32
CHAT = "{% for m in messages %}{{ m.role }} : {{ m.content.split('</think>')[-1] }}\n{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        padding_side="left", model_max_length=LONGEST, chat_template=CHAT,
    )  # fmt: skip


def sizes(labels: int) -> dict[str, int]:
    return {
        "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64, "num_labels": labels,
    }  # fmt: skip


def bert(labels: int) -> PreTrainedModel:
    return BertForSequenceClassification(BertConfig(**sizes(labels), pad_token_id=0))


def llama(labels: int, pad: int | None = 0) -> PreTrainedModel:
    config = LlamaConfig(**sizes(labels), pad_token_id=pad, num_key_value_heads=2, attention_dropout=0.5)
    return LlamaForSequenceClassification(config)


def saved(folder: Path, model: PreTrainedModel) -> str:
    for parameter in model.parameters():
        parameter.data.mul_(5)  # or every value lies too near the middle to tell two texts apart
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("classifiers")
    made = {"bert": bert(1), "llama": llama(1), "bert3": bert(3), "llama2": llama(2), "unpadded": llama(1, pad=None)}
    paths = {name: saved(root / name, model) for name, model in made.items()}
    return paths.__getitem__


def values(check: RewardModel, texts: list[str]) -> list[float]:
    scores = judge_batch(check, [(PROBLEM, text) for text in texts])
    assert all(score.value is not None for score in scores), scores
    return [score.value for score in scores if score.value is not None]


@pytest.mark.parametrize(
    ("name", "label"), [("bert", None), ("llama", None), ("unpadded", None), ("bert3", 2), ("llama2", "LABEL_1")]
)
def test_a_batch_gives_what_each_text_gets_alone(folders: Callable[[str], str], name: str, label: str | int) -> None:
    check = RewardModel(folders(name), TEMPLATE, label=label, batch_size=3)
    assert isinstance(check, BatchReward)
    together = values(check, TEXTS)
    assert all(0 <= value <= 1 for value in together)
    assert len({round(value, 6) for value in together}) == len(set(TEXTS))
    alone = [check(PROBLEM, text).value for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-6)
    assert values(check, TEXTS[::-1])[::-1] == pytest.approx(together, abs=1e-6)


def test_equal_texts_of_a_batch_tie_exactly(folders: Callable[[str], str]) -> None:
    check = RewardModel(folders("llama"), TEMPLATE, batch_size=2)
    together = values(check, ["two", "one " * 9, "two ", "so", "two<|im_end|>"])
    assert together[0] == together[2] == together[4]


@pytest.mark.parametrize(("name", "count"), [("bert", 1), ("bert3", 3)])
def test_the_value_is_the_models_own(folders: Callable[[str], str], name: str, count: int) -> None:
    model = BertForSequenceClassification.from_pretrained(folders(name)).eval()
    tokens = tokenizer()("one plus one is two", return_tensors="pt").input_ids
    logits = model(tokens).logits[0].double()
    expected = [logits.sigmoid().item()] if count == 1 else logits.softmax(-1).tolist()
    labels = [None] if count == 1 else list(range(count))
    found = [RewardModel(folders(name), TEMPLATE, label=label)(PROBLEM, "two").value for label in labels]
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_model_is_frozen_and_loaded_once(folders: Callable[[str], str]) -> None:
    check = RewardModel(folders("llama"), TEMPLATE)
    again = pickle.loads(pickled := pickle.dumps(check))
    assert len(pickled) < 1000
    assert values(again, TEXTS) == values(check, TEXTS)
    classifier = load_classifier(check.model, None, "cpu", "float32")
    assert load_classifier(again.model, None, "cpu", "float32") is classifier
    assert not classifier.model.training
    assert not any(parameter.requires_grad for parameter in classifier.model.parameters())


def test_the_chat_template_is_rendered_and_may_leave_nothing_out(folders: Callable[[str], str]) -> None:
    chat = RewardModel(folders("bert"), "chat")
    # The template writes its own marks, so the tokenizer adds none.
    assert chat(PROBLEM, "two").parts == {"tokens": len(["user", ":", "one", "plus", "one", "assistant", ":", "two"])}
    lost = chat(PROBLEM, "<think> one </think> two")
    assert lost == Score.unscorable("the chat template leaves out a part of the completion")


def test_too_long_is_unscorable_and_not_cut(folders: Callable[[str], str]) -> None:
    template_tokens = len(["[CLS]", "one", "plus", "one", "is", "[SEP]"])
    fits, longer = "two " * (LONGEST - template_tokens), "two " * (LONGEST - template_tokens + 1)
    check = RewardModel(folders("bert"), TEMPLATE)
    scores = check.score_batch([(PROBLEM, fits), (PROBLEM, longer), (PROBLEM, "two")])
    assert [score.value is None for score in scores] == [False, True, False]
    assert scores[1].reason == "33 tokens with the template, more than the reward model's 32"
    short = RewardModel(folders("bert"), TEMPLATE, max_tokens=6)
    assert short(PROBLEM, "two two").reason == "8 tokens with the template, more than the reward model's 6"


@pytest.mark.parametrize(
    ("completion", "reason"), [("two [SEP] one", "holds '[SEP]'"), ("\ud800", "half a surrogate pair")]
)
def test_text_that_is_no_text_to_the_model_is_unscorable(
    folders: Callable[[str], str], completion: str, reason: str
) -> None:
    check = RewardModel(folders("bert"), TEMPLATE)
    [score, beside] = check.score_batch([(PROBLEM, completion), (PROBLEM, "two")])
    assert score.value is None
    assert reason in score.reason
    assert beside.value is not None


def test_braces_are_text(folders: Callable[[str], str]) -> None:
    check = RewardModel(folders("bert"), TEMPLATE)
    assert check(PROBLEM, "{question}").parts == check(PROBLEM, "two").parts


@pytest.mark.parametrize(
    ("name", "label", "message"),
    [
        ("bert", "LABEL_0", "leave it null"),
        ("bert3", None, "name one of them"),
        ("bert3", "good", "name one of them"),
        ("bert3", 3, "name one of them"),
    ],
)
def test_the_label_must_be_one_to_choose(
    folders: Callable[[str], str], name: str, label: str | int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardModel(folders(name), TEMPLATE, label=label)(PROBLEM, "two")


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**{**sizes(2), "num_labels": 2}, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"no weights for score\.weight: choose a trained classifier"):
        RewardModel(saved(tmp_path, LlamaForCausalLM(config)), TEMPLATE, label=1)(PROBLEM, "two")


def test_logits_that_are_no_numbers_are_unscorable(tmp_path: Path) -> None:
    model = bert(1)
    model.classifier.bias.data.fill_(float("nan"))
    score = RewardModel(saved(tmp_path, model), TEMPLATE)(PROBLEM, "two")
    assert score == Score.unscorable("the reward model's logits are not finite")


@pytest.mark.parametrize("revision", [None, "main", "abc123"])
def test_a_hub_model_must_be_pinned(revision: str | None) -> None:
    with pytest.raises(ValueError, match="pin a hub model by its commit"):
        RewardModel("somebody/some-model", TEMPLATE, revision=revision)
    RewardModel("somebody/some-model", TEMPLATE, revision="0123456789abcdef0123456789abcdef01234567")


@pytest.mark.parametrize("template", ["", "{completion}", "{question} {question} {completion}", "Chat"])
def test_a_template_must_hold_both(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="give chat, or a text with"):
        RewardModel(str(tmp_path), template)


@pytest.mark.parametrize("setting", [{"batch_size": 0}, {"max_tokens": 0}])
def test_counts_start_at_one(tmp_path: Path, setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        RewardModel(str(tmp_path), TEMPLATE, **setting)


def test_no_gold_answer_is_held_against_it(folders: Callable[[str], str]) -> None:
    check = RewardModel(folders("bert"), TEMPLATE)
    assert check.graded_on_gold is False
    assert check(PROBLEM, PROBLEM.answer).value < 1.0


def test_nothing_to_judge_loads_nothing(tmp_path: Path) -> None:
    assert RewardModel(str(tmp_path), TEMPLATE).score_batch([]) == []


@given(st.text())
def test_no_text_makes_it_raise(folders: Callable[[str], str], completion: str) -> None:
    score = RewardModel(folders("llama"), TEMPLATE)(PROBLEM, completion)
    assert (score.value is None and score.reason) or 0 <= (score.value or 0) <= 1
