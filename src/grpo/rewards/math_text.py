r"""Answers in one spelling: what is only typography is taken away, what carries meaning stays.

``canonical`` maps the many ways of writing one thing in LaTeX, Unicode and plain text to one; equal
results are equal answers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_WIDTHLESS = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")
_SIGNS = {
    "−": "-", "–": "-", "×": "*", "⋅": "*", "·": "*", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "±": r"\pm ", "∓": r"\mp ", "°": r"^{\circ}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "λ": r"\lambda ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "…": r"\ldots ", "⟨": "(", "⟩": ")", "≈": r"\approx ",
}  # fmt: skip
_SIGN = re.compile("|".join(_SIGNS))
# Signs set as text are what they are elsewhere: a digit, or a factorial.
_SIGNS_AS_TEXT = r"\\text\s*\{([^{}a-zA-Z]*)\}"
# Plain spellings to one: commands that look alike, or that change the look alone.
_PATTERNS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\\\(?=[a-zA-Z])(?![^\\]*\\end)", r"\\"),  # a command escaped twice, outside a matrix
    (r"(?<!\\)\\!|\{,\}(?=\d{3})", lambda match: "," if match[0] == "{,}" else ""),
    (r"(?<=\d)(?:(?<!\\)\\[, ]|\u202f|\u2009)(?=\d{3}(?!\d))", ","),
    (r"\\(?:left|right|bigg?[lrm]?|Bigg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])\.?", ""),
    (r"\\(?:quad|qquad|hspace\{[^{}]*\})(?![a-zA-Z])|(?<!\\)\\[,;:> ]|~", " "),
    (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|boldsymbol|bm|pmb)(?=\s*\{)", ""),
    (
        r"\\not\s*(?:=|<|>|\\(?:approx|equiv|sim|in|leq?|geq?)(?![a-zA-Z]))|\\(?:notin|nsim|not(?:approx|equal))(?![a-zA-Z])",
        r"\\ne ",
    ),
    (r"\\approx(?![a-zA-Z])", "="),  # there is no tolerance: what is said to be about 5 must be 5
    (r"^\s*=(?!=)", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"(?:\{|^)([^{}\\]*)\\over(?![a-zA-Z])([^{}\\]*)(?:\}|$)", r"\\frac{\1}{\2}"),
    (r"(?:\{|^)([^{}\\]*)\\choose(?![a-zA-Z])([^{}\\]*)(?:\}|$)", r"\\binom{\1}{\2}"),
    (r"(?<=[\d.])\\dot(?=\s*\{)", r"\\overline"),
    (r"\\[dt]binom|\\choose(?![a-zA-Z])", r"\\binom"),
    (r"\\lbrace(?![a-zA-Z])|\\lbrack(?![a-zA-Z])", lambda match: r"\{" if "brace" in match[0] else "["),
    (r"\\rbrace(?![a-zA-Z])|\\rbrack(?![a-zA-Z])", lambda match: r"\}" if "brace" in match[0] else "]"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
    (r"\*\*", "^"),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\\(?:leq|leqslant|le)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\(?:neq|ne)(?![a-zA-Z])|(?<![\d)}])!=", r"\\ne "),  # "4!=24" is a step
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\(?:dots|cdots|dotsc|dotsb)(?![a-zA-Z])|\.\.\.+", r"\\ldots "),
    (r"(?:(?<=[(,\[{])|^)\+\s*(?=\\infty)", ""),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
    (r"\\overline\s*\{([A-Z]{2})\}", r"\1"),  # a segment, by its end points
    (r"\\bar(?![a-zA-Z])", r"\\overline"),
    (r"\\(?:operatorname\*?|mathrm|mathbf|mathit|mathsf)\s*\{\s*([a-zA-Z])\s*\}", r"\1"),
    (r"\\operatorname\*?\s*\{\s*(sin|cos|tan|cot|sec|csc|log|ln|exp)\s*\}", r"\\\1 "),
    (r"\\(?:math(?:rm|bf|it|sf|tt)|text(?:bf|it|rm|sf|tt|up|normal)|emph|mbox|operatorname)(?=\s*\{)", r"\\text"),
    (_SIGNS_AS_TEXT, r"\1"),
    (r"^\s*\\text\s*\{\s*(-?\d[\d.,]*)(\s[^{}\d]*)\}\s*$", r"\1\\text{\2}"),  # a number and its unit
    (r"\\(?:degrees?|textdegree)(?![a-zA-Z])", r"^{\\circ}"),
    (r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|log|ln|exp|pi|sqrt)(?![a-zA-Z])", r"\\\1 "),
    (r"√", r"\\sqrt "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\circ(?=[CF]\b)", r"\\circ "),
    (r"(?<=[\d.])[eE]([+-]?\d{1,9})(?![\w.])", r"*10^{\1}"),
    (r"^\s*\\text\s*\{([^{}\d]* and [^{}\d]*)\}\s*$", r"\1"),  # a list of words, as it is without the mark
    (r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\a-zA-Z{])(?:and|or)(?![a-zA-Z}])", ","),
    (r"\\%|\\text\s*\{\s*(?:percent|%)\s*\}|\bpercent\b", "%"),
)
_SPELLINGS = tuple((re.compile(pattern), to) for pattern, to in _PATTERNS)
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, "^": 1, "_": 1, r"\overline": 1}
_TAKES_ARGUMENTS = re.compile(r"\\(?:frac|binom|sqrt|overline)(?![a-zA-Z])|[\^_]")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+|.", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]|\.\d+,)")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SET_BUILDER = re.compile(r"\\\{([a-zA-Z])(?:\\in(?:\\mathbb\{R\}|R))?(?:\\mid|\||:)(?![|:])(.*)\\\}")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_WRAPPERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"), ('"', '"'))


def canonical(text: str) -> str:
    r"""``text`` in the one spelling that answers are compared in; equal results are equal answers.

    >>> canonical(r"\dfrac12"), canonical("1,000.50"), canonical("－５ × 2²"), canonical(r"x \leq \sqrt5")
    ('\\frac{1}{2}', '1000.50', '-5*2^{2}', 'x\\le\\sqrt{5}')
    """
    text = _plain_signs(unwrapped(text))
    for pattern, to in _SPELLINGS:
        text = pattern.sub(to, text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = _spaced(_without_thousands(_braced(text.replace(r"\$", "$").replace(r"\_", "_"))))
    text = _without_group(_SET_BUILDER.sub(r"\2", text.rstrip(".,;: ")))
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text) else text


def unwrapped(text: str) -> str:
    """Without the marks of mathematics or emphasis that enclose the whole."""
    text = text.strip()
    for opening, closing in _WRAPPERS:
        inside = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = inside.strip() if opening not in inside and closing not in inside else text
    # Several pieces of mathematics in a row ("$1$ and $2$"): the pairs of signs go, a price's single one stays.
    return (
        text.replace("$", " ") if text.count("$") % 2 == 0 and not re.search(r"\\?\$\d[\d,.]*(?!\S*\$)", text) else text
    )


def words_of(text: str) -> str | None:
    r"""The text of an answer in words, for comparison without case; None where it is mathematics.

    A word is ``\text{...}`` with a letter in it, or a run of four letters or more.

    >>> words_of(r"\text{Evelyn}"), words_of("Evelyn"), words_of(r"\text{(B)}"), words_of("abc")
    ('evelyn', 'evelyn', 'b', None)
    """
    marked = any(re.search("[A-Za-z]", inside) for inside in _TEXT.findall(text))
    plain = _TEXT.sub(r" \1 ", text)
    if not marked and not _WORD.search(re.sub(r"\\(?:begin|end)\{[a-zA-Z]*\}", "", plain)):
        return None
    plain = " ".join(plain.split()).strip("\"'`.,;: ")
    choice = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)?", plain)
    return (choice[1] if choice else plain).casefold()


def _plain_signs(text: str) -> str:
    text = _WIDTHLESS.sub("", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = _VULGAR.sub(_vulgar_fraction, text)
    # Not before the superscripts are dealt with: composition by meaning makes 4² into 42.
    return unicodedata.normalize("NFKC", _SIGN.sub(lambda match: _SIGNS[match[0]], text))


def _vulgar_fraction(match: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(match[0])).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _braced(text: str) -> str:
    r"""Every argument in braces: ``\frac12``, ``\sqrt[3]2``, ``x^10`` (all digits) and ``2^(3+1)`` too."""
    out: list[str] = []
    end = 0
    while (command := _TAKES_ARGUMENTS.search(text, end)) is not None:
        out.append(text[end : command.start()] + command[0])
        end = command.end()
        if command[0] == r"\sqrt" and (index := re.compile(r"\s*\[([^\[\]]*)\]").match(text, end)):
            out.append(f"[{index[1].strip()}]")
            end = index.end()
        for _ in range(_ARGUMENTS[command[0]]):
            argument, end = _argument(text, end, whole_number=command[0] in "^_\\sqrt")
            out.append(f"{{{_braced(argument)}}}")
    out.append(text[end:])
    return "".join(out)


def _argument(text: str, start: int, *, whole_number: bool) -> tuple[str, int]:
    """The argument that begins at ``start`` and where it ends: a group, or one token."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start < len(text) and text[start] in "{(":
        close = closing(text, start)
        if close is not None and (text[start] == "{" or whole_number):
            return text[start + 1 : close].strip(), close + 1
    sign = "-" if whole_number and text[start : start + 1] == "-" else ""
    token = _TOKEN.match(text, start + len(sign))
    if token is None:
        return "", start
    if token[0].isdigit() and not whole_number:
        return token[0][0], start + 1
    return sign + token[0], token.end()


def closing(text: str, start: int) -> int | None:
    """Where the bracket at ``start`` is closed, whatever its kind: half-open intervals mix them."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
            if depth == 0:
                return place
    return None


def _without_thousands(text: str) -> str:
    """Thousands commas go, but not inside brackets, where ``(100,200)`` is a point."""
    out, depth = [], 0
    for piece in re.split(r"([(\[{}\])])", text):
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        out.append(_THOUSANDS.sub(lambda match: match[0].replace(",", ""), piece) if depth == 0 else piece)
    return "".join(out)


def _spaced(text: str) -> str:
    """White space stays where it separates: two words or numbers, or a command from a letter; and in text."""
    pieces = re.split(r"(\\text\s*\{[^{}]*\})", text)
    for i in range(0, len(pieces), 2):
        tight = re.sub(r"\s+", " ", pieces[i])
        pieces[i] = re.sub(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])", "", tight)
        pieces[i] = re.sub(r"(\\[a-zA-Z]+) (?=\d)", r"\1", pieces[i])
    return "".join(pieces).strip()


def _without_group(text: str) -> str:
    """Without braces or round brackets around a single whole."""
    while text[:1] in ("{", "(") and closing(text, 0) == len(text) - 1 and not set(",;") & set(text):
        text = text[1:-1].strip()
    return text.removeprefix("+")
