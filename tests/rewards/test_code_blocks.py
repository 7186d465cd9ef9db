import time

import pytest

from grpo.rewards.code_blocks import fenced_blocks, program_of

RIGHT, WRONG = "def f():\n    return 1\n", "def f():\n    return 2\n"


def block(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}```\n"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (block(RIGHT), RIGHT),
        (block(RIGHT, "py"), RIGHT),
        (block(RIGHT, "Python"), RIGHT),
        (block(RIGHT, ""), RIGHT),
        (block(RIGHT, " python title=x"), RIGHT),
        (f"First:\n{block(WRONG)}Better:\n{block(RIGHT)}Done.", RIGHT),
        (f"{block(RIGHT)}{block(WRONG)}", WRONG),
        (f"{block(RIGHT)}Run it:\n{block('python f.py', 'bash')}", RIGHT),
        (f"{block('ls', 'sh')}{block('{}', 'json')}", None),
        (f"```python\n{RIGHT}", RIGHT),
        (f"````python\n{RIGHT}```\n````", RIGHT + "```\n"),
        (f"  ```python\n{RIGHT}  ```", RIGHT),
        (f"```python\r\n{RIGHT}```\r\n", RIGHT),
        (block(""), ""),
        ("Use `f()` or ```f()``` inline.", None),
        (RIGHT, None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_program(completion: str, program: str | None) -> None:
    assert program_of(completion, "block") == program


def test_a_continuation_is_all_of_the_completion() -> None:
    assert program_of("    return 1\n", "continuation", "def f():\n") == RIGHT
    assert program_of("", "continuation", "def f():\n") == "def f():\n"


def test_blocks_come_in_order() -> None:
    assert fenced_blocks(block("a\n", "x") + "text\n" + block("b\n", "")) == [("x", "a\n"), ("", "b\n")]


@pytest.mark.parametrize(
    "completion", ["`" * 300_000, "```\n" * 100_000, "```" + " " * 300_000 + "x`", "``` `\n" * 50_000]
)
def test_long_texts_are_read_at_once(completion: str) -> None:
    start = time.process_time()
    program_of(completion, "block")
    assert time.process_time() - start < 1.0
