import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.rollouts import chosen_logprobs as rooms
from grpo.rollouts.chosen_logprobs import LogitRule, chosen_logprobs

STATES, WIDTH, VOCABULARY = 23, 8, 50
RULES = [LogitRule(), LogitRule(temperature=0.7), LogitRule(0.25, None, 1.5), LogitRule(1.0, 3.0, 0.7)]


def inputs(dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(STATES, WIDTH, dtype=dtype), torch.randn(VOCABULARY, WIDTH, dtype=dtype)
    extra = torch.randn(VOCABULARY, dtype=dtype)
    tensors = [hidden.requires_grad_(), weight.requires_grad_(), extra.requires_grad_() if bias else None]
    return tensors[0], tensors[1], tensors[2], torch.randint(VOCABULARY, (STATES,))  # type: ignore[return-value]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, rule: LogitRule) -> tuple[Tensor, ...]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * rule.scale
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / rule.temperature, -1)
    return logprobs[range(STATES), tokens], -(logprobs.exp() * logprobs).sum(-1)


def gradients(values: tuple[Tensor, ...], inputs: list[Tensor], entropy: float) -> list[Tensor]:
    weights = torch.linspace(-1, 2, STATES, dtype=values[0].dtype)
    loss = (weights * values[0]).sum() + (entropy * (weights.flip(0) * values[1]).sum() if entropy else 0.0)
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "value", "gradient"), [(torch.float32, 1e-6, 1e-5), (torch.float64, 1e-13, 1e-10)])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_give_the_values_and_gradients_of_whole_logits(
    chunk: int, rule: LogitRule, dtype: torch.dtype, value: float, gradient: float, entropy: float, bias: bool
) -> None:
    hidden, weight, extra, tokens = inputs(dtype, bias)
    size = chunk * VOCABULARY * dtype.itemsize
    got = chosen_logprobs(hidden, weight, extra, tokens, rule, entropy > 0, size)
    expected = plain(hidden, weight, extra, tokens, rule)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=value, atol=value)
    leaves = [tensor for tensor in (hidden, weight, extra) if tensor is not None]
    parts = zip(gradients(got, leaves, entropy), gradients(expected, leaves, entropy), strict=True)
    for one, other in parts:
        assert (one - other).norm() <= gradient * other.norm()


def test_an_entropy_without_a_gradient_has_none() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    assert not chosen_logprobs(hidden, weight, None, tokens)[1].requires_grad
    assert chosen_logprobs(hidden, weight, None, tokens, entropy_gradient=True)[1].requires_grad


def test_no_tensor_is_as_large_as_the_logits() -> None:
    """Every result of every operation, forward and backward, is at most a chunk or one of the inputs' size."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight, _, tokens = inputs(torch.float32)
    for entropy_gradient in (False, True):
        with Sizes():
            logprobs, entropies = chosen_logprobs(
                hidden, weight, None, tokens, LogitRule(1.0, 5.0), entropy_gradient, 10 * VOCABULARY * 4
            )
            (logprobs.sum() + entropies.sum()).backward()
    assert largest <= 10 * VOCABULARY < STATES * VOCABULARY


def test_chunks_are_even_and_cover_every_state() -> None:
    parts = rooms._chunks(23, 50, torch.float32, 10 * 50 * 4)
    assert [(part.start, part.stop) for part in parts] == [(0, 8), (8, 16), (16, 23)]
    assert len(rooms._chunks(5, 50, torch.float32, 1)) == 5
    assert rooms._chunks(0, 50, torch.float32, 100) == []


def test_no_state_gives_zero_gradients() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    logprobs, _ = chosen_logprobs(hidden[:0], weight, None, tokens[:0])
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().sum() + weight.grad.abs().sum() == 0


def test_bfloat16_states_give_float32_logprobs() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    logprobs, entropies = chosen_logprobs(low[0], low[1], None, tokens, chunk_bytes=5 * VOCABULARY * 4)
    assert logprobs.dtype == entropies.dtype == torch.float32
    logits = torch.nn.functional.linear(low[0], low[1]).detach().float()
    expected = torch.log_softmax(logits, -1)[range(STATES), tokens]
    torch.testing.assert_close(logprobs.detach(), expected, rtol=1e-6, atol=1e-6)  # no rounding but the product's
    got = gradients((logprobs,), low, 0.0)
    exact = gradients(plain(hidden, weight, None, tokens, LogitRule()), [hidden, weight], 0.0)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).norm() <= 0.02 * other.norm()


def test_autocast_gives_float32_logprobs_and_gradients_of_the_weights_own_dtype() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = chosen_logprobs(hidden, weight, None, tokens)
        assert logprobs.dtype == torch.float32
        logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    low = torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16()).float()
    torch.testing.assert_close(logprobs, torch.log_softmax(low, -1)[range(STATES), tokens], rtol=1e-6, atol=1e-6)
