"""Texts that end a completion: over several tokens, inside one, in halves of characters, between tool answers."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures_policy import TOKENIZER, random_llama
from fixtures_rounds import watch
from fixtures_sampling import END, KEYS, MANY, MANY_KEYS, PROMPTS, SOME_ENDS, drawn, flat, sampler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.rollouts.stop_strings import Stop, StopStrings
from grpo.rollouts.tool_turns import CallReader, RowTurns
from grpo.rollouts.tools import Calculator, ToolSettings


def byte_tokenizer(*merged: str) -> PreTrainedTokenizerBase:
    """One token a byte, as byte-level tokenizers write it, and one for each of ``merged``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for text in merged:
        word = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary[word[:end]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_stop(tokenizer: PreTrainedTokenizerBase, tokens: list[int], *texts: str) -> Stop | None:
    """As the sampler looks: after each token, and only where that may complete one."""
    stops = StopStrings(texts, tokenizer, len(tokenizer))
    found = (stops.stop_at(tokens[:end]) for end in range(1, len(tokens) + 1))
    return next((stop for stop in found if stop is not None), None)


@pytest.mark.parametrize(
    ("merged", "text", "texts", "kept"),
    [
        ((), "so </answer> and", ("</answer>",), "so </answer>"),
        (("</ans",), "so </answer> and", ("</answer>",), "so </answer>"),
        ((">!? and",), "so </answer>!? and", ("</answer>",), "so </answer>"),  # ends inside a token
        (("x</a>y",), "so x</a>y", ("</a>",), "so x</a>"),  # stands within one
        ((), "price: 5 € or", ("€",), "price: 5 €"),  # three tokens, none of them a character
        (("€ or",), "price: 5 € or", ("€",), "price: 5 €"),
        ((), "a日本b", ("日本",), "a日本"),
        ((), "aé\n\nb", ("\n\n",), "aé\n\n"),
        (("\n\n\n",), "a\n\n\nb", ("\n\n",), "a\n\n"),
        ((), "aab", ("b", "aab", "ab"), "aab"),
        ((), "one STOP two END", ("END", "STOP"), "one STOP"),
        ((" and", " and more"), "this and more", (" an",), "this an"),
        ((), "ababac", ("abac",), "ababac"),
        ((), "ends with blank ", ("blank ",), "ends with blank "),
    ],
)
def test_a_stop_string_is_found_however_it_is_cut(
    merged: tuple[str, ...], text: str, texts: tuple[str, ...], kept: str
) -> None:
    tokenizer = byte_tokenizer(*merged)
    tokens = tokenizer(text).input_ids
    stop = first_stop(tokenizer, tokens, *texts)
    assert stop is not None
    whole = tokenizer.decode(tokens[: stop.length])
    assert whole[: len(whole) - stop.beyond] == kept
    assert not any(each in tokenizer.decode(tokens[: stop.length - 1]) for each in texts)  # no sooner and no later


@pytest.mark.parametrize("text", ["so </answer and >", "€", "⚬", "stop", "ab"])
def test_what_is_no_stop_string_is_none(text: str) -> None:
    tokenizer = byte_tokenizer("</an")
    assert first_stop(tokenizer, tokenizer(text).input_ids, "</answer>", "STOP", "ba") is None


def test_few_tokens_can_complete_one() -> None:
    stops = StopStrings(["</answer>"], TOKENIZER, len(TOKENIZER))
    assert stops.may_complete.nonzero().squeeze(-1).tolist() == TOKENIZER(">").input_ids
    ascii_only = byte_tokenizer()
    halves = StopStrings(["\n"], ascii_only, len(ascii_only))
    assert int(halves.may_complete.sum()) == 1  # half characters can complete no plain one
    assert int(StopStrings(["€"], ascii_only, len(ascii_only)).may_complete.sum()) >= 64


def cut_by_hand(tokens: tuple[int, ...], texts: tuple[str, ...], ends: tuple[int, ...]) -> tuple[int, str]:
    for length in range(1, len(tokens) + 1):
        if tokens[length - 1] in ends:
            return length, "end_token"
        if any(text in TOKENIZER.decode(tokens[:length]) for text in texts):
            return length, "stop_string"
    return len(tokens), "length"


@pytest.mark.parametrize("rows", [4, 128])
def test_a_sampled_completion_ends_where_its_text_first_holds_a_stop_string(rows: int) -> None:
    """Held against the same draws without stop strings, cut by hand; rows that stop make room for others."""
    model = random_llama()
    ends = (END, *TOKENIZER("01").input_ids)
    texts = ("a", "b", "cd", "\n", "7%")
    free = sampler(model, (), max_new_tokens=40).sample(MANY, MANY_KEYS, 4)
    got = sampler(model, ends, max_new_tokens=40, max_rows=rows, stop_strings=texts).sample(MANY, MANY_KEYS, 4)
    for rollout, whole in zip(flat(got), flat(free), strict=True):
        length, reason = cut_by_hand(whole.tokens, texts, ends)
        assert (len(rollout.tokens), rollout.finish_reason) == (length, reason)
        assert rollout.tokens == whole.tokens[:length]
        assert rollout.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert rollout.drawn_mask == (True,) * length
        if reason == "stop_string":
            assert rollout.text.endswith(texts)
            assert rollout.text == TOKENIZER.decode(rollout.tokens)
            assert not rollout.truncated
    assert {rollout.finish_reason for rollout in flat(got)} == {"end_token", "stop_string", "length"}


def test_the_text_ends_with_the_stop_string_and_the_tokens_with_what_was_drawn() -> None:
    model = random_llama()
    tokens = tuple(sampler(model, (), max_new_tokens=6).sample(PROMPTS, KEYS, 1)[0][0].tokens)
    tokenizer = byte_tokenizer()

    class Long:
        """Every token is a word of five letters."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **_: Any) -> Any:
            return tokenizer(text)

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"<{int(token):03d}>" for token in ids)

        def batch_decode(self, rows: list[list[int]]) -> list[str]:
            return [self.decode(row) for row in rows]

    stop = f"<{tokens[2]:03d}"
    settings = SamplingSettings(max_new_tokens=6, stop_strings=(stop,))
    [[rollout], *_] = Sampler(model, Long(), (), settings).sample(PROMPTS, KEYS, 1)  # type: ignore[arg-type]
    assert rollout.tokens == tokens[: len(rollout.tokens)]
    assert rollout.text.endswith(stop)
    assert Long().decode(rollout.tokens) == rollout.text + ">"


def test_an_end_token_that_completes_a_stop_string_ends_as_an_end_token() -> None:
    ends = (END, *TOKENIZER("abc\n").input_ids)
    plain = sampler(random_llama(), ends, max_new_tokens=20).sample(MANY, MANY_KEYS, 4)
    both = sampler(random_llama(), ends, max_new_tokens=20, stop_strings=("a", "\n")).sample(MANY, MANY_KEYS, 4)
    assert [(r.tokens, r.text, r.finish_reason) for r in flat(both)] == [
        (r.tokens, r.text, r.finish_reason) for r in flat(plain)
    ]


def test_stop_strings_that_never_occur_change_nothing_and_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama(spread=0.3)
    plain = sampler(model, SOME_ENDS, max_new_tokens=12).sample(MANY, MANY_KEYS, 4)
    looked = watch(monkeypatch, StopStrings, "stop")
    got = sampler(model, SOME_ENDS, max_new_tokens=12, stop_strings=("a€",)).sample(MANY, MANY_KEYS, 4)
    assert drawn(got) == drawn(plain)
    assert looked == []


def turns(written: str, *texts: str) -> RowTurns:
    """A row that draws ``written``, tool answers going in between."""
    reader = CallReader(ToolSettings({"c": Calculator()}), TOKENIZER)
    row = RowTurns(reader, (END,), StopStrings(texts, TOKENIZER, len(TOKENIZER)))
    rest = list(TOKENIZER(written).input_ids)
    while rest and row.finish_reason is None:
        _, is_drawn = row.take(rest[0])
        if is_drawn:
            rest.pop(0)
    return row


def test_what_a_tool_puts_in_is_no_stop_string() -> None:
    row = turns("<<c: 20+3>> so 2.", "23", "o 2")
    assert row.finish_reason == "stop_string"
    assert row.calls[0].result == "23"
    assert row.stop is not None
    assert row.is_drawn.count(True) == len("<<c: 20+3>> so 2")  # up to the stop string, and no sign behind it
    assert turns("<<c: 20+3>> so.", "23").finish_reason is None
    assert turns("<<c: 23+3>>", "23").finish_reason == "stop_string"  # the policy itself drew it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_strings": "END"}, "sampling.stop_strings is the text 'END': give a list"),
        ({"stop_strings": ("END", "")}, "sampling.stop_strings has an empty text"),
        ({"stop_strings": (">",), "tools": ToolSettings({"c": Calculator()})}, "sampling.tools.closing"),
    ],
)
def test_impossible_stop_strings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)


def test_stop_strings_stand_in_the_record() -> None:
    assert '"stop_strings": ["END"]' in SamplingSettings(stop_strings=("END",)).sampling_policy().settings
