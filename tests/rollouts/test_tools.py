import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from fixtures_policy import TOKENIZER, key, prompt, random_llama
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from grpo.records import Rollout, ToolCall
from grpo.rollouts import growing_rows
from grpo.rollouts.draws import keyed_uniforms
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.rollouts.tool_turns import CallReader, RowTurns
from grpo.rollouts.tools import Calculator, Tool, ToolError, ToolSettings, answer_call
from grpo.training.tiny_policy import character_tokenizer

END = TOKENIZER.eos_token_id
NEW_LINE = TOKENIZER("\n").input_ids[0]


class Echo(Tool):
    """Gives its argument back: a result can hold anything."""

    version = "3"

    def __call__(self, argument: str) -> str:
        return argument


class Moody(Tool):
    version = "1"

    def __call__(self, argument: str) -> str:
        if argument == "refuse":
            raise ToolError("not today")
        if argument == "number":
            return 7  # type: ignore[return-value]
        raise KeyError(argument)


CALCULATOR = ToolSettings({"calculator": Calculator(), "echo": Echo(), "moody": Moody()}, result="={result};")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 7", "19"),
        ("7-12", "-5"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("4 / 2", "2"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.33333333333"),
        ("-1 / 3", "-0.33333333333"),
        ("200 / 3", "66.6666666667"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 2.", "1"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2 ** 10", "1024"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("0 ** 0", "1"),
        ("(-1) ** 1000001", "-1"),
        ("2 ** 511", str(2**511)),
        ("--3", "3"),
        ("+3", "3"),
        ("100", "100"),
        ("0 / 5", "0"),
        ("12345678901234567890 * 98765432109876543210", str(12345678901234567890 * 98765432109876543210)),
        ("1" + "0" * 20 + " / 8", "12500000000000000000"),
        ("1 / 10 ** 12", "0.000000000001"),
        (" 1 + 1 ", "2"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert Calculator()(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "not arithmetic"),
        (" ", "not arithmetic"),
        ("1 +", "not arithmetic"),
        ("two", "not arithmetic"),
        ("__import__('os')", "not arithmetic"),
        ("1,2", "not arithmetic"),
        ("(1)(2)", "not arithmetic"),
        ("()", "not arithmetic"),
        ("...", "not arithmetic"),
        ("1\n+1", "not arithmetic"),
        ("007", "not arithmetic"),
        ("1 < 2", "not arithmetic"),
        ("1e5", "not arithmetic"),
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "a power must be a whole number"),
        ("2 ** 513", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("(9 ** 99) ** 99", "too large"),
        ("0.5 ** 9999999", "too large"),
        ("(2 ** 300) * (2 ** 300)", "too large"),
        ("1 + " * 30 + "1", "longer than 100 characters"),
        ("(" * 100, "not arithmetic"),
    ],
)
def test_what_the_calculator_refuses(expression: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        Calculator()(expression)


@given(st.text("0123456789.+-*/%() ", max_size=100))
def test_the_calculator_answers_or_refuses_whatever_it_is_asked(expression: str) -> None:
    try:
        answer = Calculator()(expression)
    except ToolError:
        return
    assert set(answer) <= set("-.0123456789")


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda part: st.builds("({} {} {})".format, part, st.sampled_from("+-*"), part),
        max_leaves=8,
    )
)
def test_whole_results_are_exact(expression: str) -> None:
    if len(expression) <= 100:
        assert Calculator()(expression) == str(eval(expression))


@pytest.mark.parametrize(
    ("call", "answered"),
    [
        ("calculator: 12 + 7", ToolCall("calculator", "12 + 7", "19")),
        (" calculator :12+7 ", ToolCall("calculator", "12+7", "19")),
        ("echo: a: b", ToolCall("echo", "a: b", "a: b")),
        ("echo:", ToolCall("echo", "", "")),
        ("12 + 7", ToolCall("", "12 + 7", "error: no tool named", valid=False)),
        ("", ToolCall("", "", "error: no tool named", valid=False)),
        ("search: x", ToolCall("search", "x", "error: unknown tool", valid=False)),
        ("calculator: 1 / 0", ToolCall("calculator", "1 / 0", "error: division by zero", valid=False)),
        ("moody: refuse", ToolCall("moody", "refuse", "error: not today", valid=False)),
        ("moody: crash", ToolCall("moody", "crash", "error: KeyError", valid=False)),
        ("moody: number", ToolCall("moody", "number", "error: the tool gave no text but int", valid=False)),
    ],
)
def test_a_call_is_answered_or_its_fault_told(call: str, answered: ToolCall) -> None:
    assert answer_call(call, CALCULATOR.available) == answered


def completion(
    script: str,
    settings: ToolSettings,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    ends: tuple[int, ...] = (END,),
) -> tuple[str, RowTurns]:
    """What a row becomes whose policy draws ``script`` and an end, however often a tool takes the turn."""
    turns = RowTurns(CallReader(settings, tokenizer), ends)
    script_tokens = [*tokenizer(script, split_special_tokens=True).input_ids, END]
    tokens = []
    while turns.finish_reason is None:
        token, is_drawn = turns.take(script_tokens[0])
        tokens.append(token)
        script_tokens = script_tokens[is_drawn:]
    assert turns.ending[0] == len(tokens)
    return tokenizer.decode(tokens), turns


def test_an_answer_is_put_behind_its_call_and_the_policy_goes_on() -> None:
    text, turns = completion("So <<calculator: 12 + 7>>!", CALCULATOR)
    assert text == "So <<calculator: 12 + 7>>=19;!<end>"
    assert turns.is_drawn == [True] * 25 + [False] * 4 + [True] * 2
    assert turns.calls == [ToolCall("calculator", "12 + 7", "19")]
    assert turns.ending == (31, "end_token")


@pytest.mark.parametrize(
    "script",
    [
        "no call",
        "<<calculator: 1",
        "calculator: 1>>",
        ">> 1 <<",
        "<calculator: 1>",
        "< <calculator: 1> >",
        "<<calculator: 1>",
    ],
)
def test_what_is_no_call_runs_no_tool(script: str) -> None:
    text, turns = completion(script, CALCULATOR)
    assert text == script + "<end>"
    assert turns.calls == []
    assert turns.drawn_mask is None


@pytest.mark.parametrize(
    ("script", "text"),
    [
        # a closing that nothing opened stays plain text, and the call behind it counts
        (">> <<echo: a>>b", ">> <<echo: a>>=a;b"),
        # a call goes from the first opening to the next closing
        ("<<a <<echo: b>>c", "<<a <<echo: b>>=error: unknown tool;c"),
        ("<<echo: a>><<echo: b>>", "<<echo: a>>=a;<<echo: b>>=b;"),
        ("<<echo: a\nb>>", "<<echo: a\nb>>=a\nb;"),
        ("<<echo:>>c", "<<echo:>>=;c"),
    ],
)
def test_where_a_call_begins_and_ends(script: str, text: str) -> None:
    assert completion(script, CALCULATOR)[0] == text + "<end>"


def test_an_answer_is_never_read_as_a_call() -> None:
    crossed = replace(CALCULATOR, opening="[", closing="]")
    settings = replace(crossed, result="{result}[echo: ")
    text, turns = completion("[echo: <<x]]y]", settings)
    assert text == "[echo: <<x]<<x[echo: ]y]<end>"  # what the policy draws behind an answer closes nothing in it
    assert len(turns.calls) == 1
    whole = ToolSettings({"echo": Echo()}, result="{result}<<echo: b>>")
    text, turns = completion("<<echo: a>>c", whole)
    assert text == "<<echo: a>>a<<echo: b>>c<end>"
    assert len(turns.calls) == 1


def test_ends_and_markup_in_an_answer_are_plain_text() -> None:
    settings = ToolSettings({"echo": Echo()}, opening="[", closing="]", result="{result}\n")
    text, turns = completion("[echo: <end><unknown>]b", settings, ends=(END, NEW_LINE))
    # neither the spelled-out <end> nor the new line ends anything, as the policy drew neither as an end token
    assert text == "[echo: <end><unknown>]<end><unknown>\nb<end>"
    assert turns.ending == (len(text) - len("<end>") + 1, "end_token")  # a token a character, but for the last
    assert TOKENIZER("<end>").input_ids == [END]  # the tokenizer reads markup elsewhere as before


def test_an_end_token_in_a_call_ends_the_completion() -> None:
    text, turns = completion("<<echo: a\n>>", CALCULATOR, ends=(END, NEW_LINE))
    assert text == "<<echo: a\n"
    assert turns.ending == (10, "end_token")
    assert turns.calls == []


@pytest.mark.parametrize("limit", [1, 2])
def test_a_call_beyond_the_limit_ends_the_completion(limit: int) -> None:
    settings = replace(CALCULATOR, max_calls=limit)
    text, turns = completion("<<echo: a>><<nobody: b>><<echo: c>>d", settings)
    expected = ["<<echo: a>>=a;<<nobody: b>>", "<<echo: a>>=a;<<nobody: b>>=error: unknown tool;<<echo: c>>"]
    assert text == expected[limit - 1]
    assert turns.ending[1] == "tool_limit"
    assert len(turns.calls) == limit  # failed ones count; the one too many is not run
    assert turns.is_drawn[-1]


def test_the_tokens_of_the_policy_stay_as_they_were_drawn() -> None:
    """Tokens that hold more than a marker, or a part of one, are neither cut up nor put together otherwise."""
    tokenizer = character_tokenizer(["b>>c<<", " <", "<echo"])
    text, turns = completion("a <<echo: b>>c<<echo: d>>e", CALCULATOR, tokenizer)
    # the rest of the closing token stands before the answer, and what it opened was not opened after it
    assert text == "a <<echo: b>>c<<=b;echo: d>>e<end>"
    drawn = tokenizer("a <<echo: b>>c<<").input_ids
    assert turns.is_drawn[: len(drawn) + 3] == [True] * len(drawn) + [False] * 3
    assert [call.result for call in turns.calls] == ["b"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"available": {}}, "sampling.tools.available is empty"),
        ({"available": {"a:b": Echo()}}, "'a:b'"),
        ({"available": {" a": Echo()}}, "' a'"),
        ({"available": {"a<<": Echo()}}, "'a<<'"),
        ({"opening": ""}, "sampling.tools.opening"),
        ({"closing": " >>"}, "sampling.tools.closing"),
        ({"closing": "\n"}, "sampling.tools.closing"),
        ({"result": "x"}, "sampling.tools.result"),
        ({"max_calls": 0}, "sampling.tools.max_calls"),
    ],
)
def test_impossible_tool_settings_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(CALCULATOR, **change)  # type: ignore[arg-type]


def test_a_tool_without_a_version_is_refused() -> None:
    class Nameless(Echo):
        version = ""

    with pytest.raises(ValueError, match=r"sampling\.tools\.available\.echo has the version ''"):
        ToolSettings({"echo": Nameless()})


def test_tools_are_declared_in_a_config_by_their_class() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--sampling", type=SamplingSettings, default=SamplingSettings())
    declared = {"available": {"calc": {"class_path": "grpo.rollouts.tools.Calculator"}}, "max_calls": 2}
    config = parser.parse_object({"sampling": {"tools": declared, "top_k": 5}})
    settings = parser.instantiate(config).sampling
    assert isinstance(settings, SamplingSettings)
    assert settings.tools is not None
    assert isinstance(settings.tools.available["calc"], Calculator)
    assert (settings.tools.max_calls, settings.tools.opening, settings.top_k) == (2, "<<", 5)


def test_the_sampling_policy_names_tools_and_versions() -> None:
    policy = SamplingSettings(tools=CALCULATOR).sampling_policy()
    assert json.loads(policy.tools) == {"calculator": "1", "echo": "3", "moody": "1"}
    assert json.loads(policy.settings)["tool_calls"] == {
        "opening": "<<",
        "closing": ">>",
        "result": "={result};",
        "max_calls": 4,
    }
    assert "tools" not in json.loads(policy.settings)


class Scripted(LlamaForCausalLM):
    """Is nearly sure of ``script``: of its i-th token at the i-th place of a completion, whoever made the others."""

    script = ""
    prompt_length = 0

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **rest: object
    ) -> CausalLMOutputWithPast:  # type: ignore[override]
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **rest)  # type: ignore[arg-type]
        script = torch.tensor(TOKENIZER(self.script).input_ids)
        places = (position_ids[:, -output.logits.shape[1] :] - self.prompt_length + 1).clamp(0, len(script) - 1)
        output.logits = output.logits.scatter_add(-1, script[places][..., None], torch.full((*places.shape, 1), 12.0))
        return output


def scripted(script: str, prompt_length: int) -> Scripted:
    plain = random_llama()
    model = Scripted(plain.config)
    model.load_state_dict(plain.state_dict())
    model.script, model.prompt_length = script, prompt_length
    return model.eval()


def rollouts_of(
    model: PreTrainedModel, question: str, members: int = 2, settings: ToolSettings = CALCULATOR, **rest: float
) -> list[Rollout]:
    sampler = Sampler(model, TOKENIZER, (END, NEW_LINE), SamplingSettings(tools=settings, **rest))  # type: ignore[arg-type]
    return sampler.sample([prompt(question)], [key()], members)[0]


def test_a_rollout_with_a_call() -> None:
    question = "<<calculator: 1 + 1>> and <<echo: "  # what the prompt says calls nothing
    model = scripted(">> <<calculator: 12 + 7>>____19 it is<end>", len(question))
    for rollout in rollouts_of(model, question, max_new_tokens=60):
        assert rollout.text == ">> <<calculator: 12 + 7>>=19;19 it is"
        assert rollout.tokens == (*TOKENIZER(rollout.text).input_ids, END)
        assert rollout.drawn == (True,) * 25 + (False,) * 4 + (True,) * 9
        assert rollout.finish_reason == "end_token"
        assert rollout.tool_calls == (ToolCall("calculator", "12 + 7", "19"),)
        assert [p for p, is_drawn in zip(rollout.logprobs, rollout.drawn, strict=True) if not is_drawn] == [0.0] * 4
        assert all(p < 0 for p, is_drawn in zip(rollout.logprobs, rollout.drawn, strict=True) if is_drawn)


@pytest.mark.parametrize(("limit", "text"), [(11, "<<echo: a>>"), (13, "<<echo: a>>=a"), (14, "<<echo: a>>=a;")])
def test_inserted_tokens_count_in_the_length(limit: int, text: str) -> None:
    for rollout in rollouts_of(scripted("<<echo: a>>___b\n", 1), "x", max_new_tokens=limit):
        assert rollout.text == text
        assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.drawn_mask) == limit
        assert rollout.finish_reason == "length"


def test_a_rollout_ends_at_the_call_beyond_the_limit() -> None:
    model = scripted("<<echo: \\>>____<<echo: b>>cd\n", 1)
    for rollout in rollouts_of(model, "x", settings=replace(CALCULATOR, max_calls=1), max_new_tokens=60):
        assert rollout.finish_reason == "tool_limit"
        assert rollout.text.endswith(">>")
        assert not rollout.truncated
        assert len(rollout.tool_calls) == 1


def talkative() -> LlamaForCausalLM:
    """Draws from few characters, so that it calls, rightly and wrongly, again and again."""
    model = random_llama(spread=0.2)
    head = torch.nn.Linear(32, len(TOKENIZER))
    head.weight = model.lm_head.weight
    likely = TOKENIZER("<>:e1").input_ids
    with torch.no_grad():
        head.bias.zero_()
        head.bias[likely] = 6.0
        head.bias[NEW_LINE] = 4.0
    model.lm_head = head
    return model


SHORT = ToolSettings({"e": Echo()}, opening="<", closing=">", result="={result};", max_calls=2)
PROMPTS = [prompt("1+2=", "a"), prompt("12345 + 67890 =", "b"), prompt("x", "c")]
KEYS = [key("a"), key("b"), key("c")]


def talk(members: int = 8, **settings: float) -> list[list[Rollout]]:
    full = SamplingSettings(**({"max_new_tokens": 70} | settings), tools=SHORT)  # type: ignore[arg-type]
    return Sampler(talkative(), TOKENIZER, (END, NEW_LINE), full).sample(PROMPTS, KEYS, members)


def what_happened(groups: list[list[Rollout]]) -> list[object]:
    return [(r.tokens, r.drawn, r.text, r.finish_reason, r.tool_calls) for group in groups for r in group]


def test_random_talk_covers_what_can_happen() -> None:
    rollouts = [rollout for group in talk(32) for rollout in group]
    assert {rollout.finish_reason for rollout in rollouts} == {"end_token", "length", "tool_limit"}
    calls = [call for rollout in rollouts for call in rollout.tool_calls]
    assert {call.valid for call in calls} == {True, False}
    assert {len(rollout.tool_calls) for rollout in rollouts} == {0, 1, 2}
    assert len({len(rollout.tokens) for rollout in rollouts}) > 10
    for rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.drawn_mask) <= 70
        gaps = [before for before, after in pairwise(rollout.drawn_mask) if before and not after]
        answers = len(rollout.tool_calls)
        assert len(gaps) in (answers, answers - 1)  # the answer to a call on the last token has no room


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_answers_that_are_due_survive_the_taking_out_of_rows(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = what_happened(talk())
    monkeypatch.setattr(growing_rows, "COMPACT_WHEN_ENDED", share)
    assert what_happened(talk()) == expected


@pytest.mark.parametrize("rows", [1, 9])
def test_neighbours_do_not_matter_to_calls(rows: int) -> None:
    together = talk()
    assert what_happened(talk(max_rows=rows)) == what_happened(together)
    settings = SamplingSettings(max_new_tokens=70, tools=SHORT)
    for i, group in enumerate(together):
        alone = Sampler(talkative(), TOKENIZER, (END, NEW_LINE), settings).sample([PROMPTS[i]], [KEYS[i]], 1)
        assert what_happened(alone) == what_happened([group[:1]])


@pytest.mark.parametrize("cuts", [{}, {"top_k": 9}], ids=str)
def test_each_drawn_token_is_the_inverse_at_its_own_place(cuts: dict[str, float]) -> None:
    """One plain pass over prompt and completion gives every recorded number, and each token from its uniform."""
    model = talkative()
    for rollout in (rollout for group in talk(temperature=0.8, **cuts) for rollout in group):
        start = len(rollout.group.prompt_tokens)
        ids = torch.tensor([[*rollout.group.prompt_tokens, *rollout.tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, start - 1 : -1] / 0.8
        logprobs = torch.log_softmax(logits.double(), -1)
        kept = logprobs
        if cuts:
            least = logprobs.sort(dim=-1, descending=True).values[:, 8:9]
            kept = torch.log_softmax(logprobs.masked_fill(logprobs < least, -torch.inf), -1)
        numbers = keyed_uniforms(rollout.key, 70)
        for place, (token, is_drawn) in enumerate(zip(rollout.tokens, rollout.drawn_mask, strict=True)):
            recorded = [rollout.logprobs[place]]
            expected = [float(logprobs[place, token])]
            if cuts:
                assert rollout.sampling_logprobs is not None
                recorded.append(rollout.sampling_logprobs[place])
                expected.append(float(kept[place, token]))
            if is_drawn:
                assert recorded == pytest.approx(expected, abs=2e-5)
                assert token == np.searchsorted(np.cumsum(kept[place].exp().numpy()), numbers[place], side="right")
            else:
                assert recorded == [0.0] * len(recorded)
        if not cuts:
            assert rollout.sampling_logprobs is None


def test_a_policy_that_calls_nothing_draws_what_it_draws_without_tools() -> None:
    model = random_llama(spread=0.3)
    plain = Sampler(model, TOKENIZER, (END, NEW_LINE), SamplingSettings(max_new_tokens=20)).sample(PROMPTS, KEYS, 8)
    unused = ToolSettings({"c": Calculator()}, opening="\N{SNOWMAN}", closing="\N{SNOWMAN}")
    settings = SamplingSettings(max_new_tokens=20, tools=unused)
    again = Sampler(model, TOKENIZER, (END, NEW_LINE), settings).sample(PROMPTS, KEYS, 8)
    policy = plain[0][0].sampling_policy
    assert [[replace(rollout, sampling_policy=policy) for rollout in group] for group in again] == plain


def test_greedy_completions_call_tools_too() -> None:
    for rollout in rollouts_of(scripted("<<calculator: 6*7>>____\n", 1), "x", temperature=0.0, max_new_tokens=40):
        assert rollout.text == "<<calculator: 6*7>>=42;"
        assert rollout.finish_reason == "end_token"
