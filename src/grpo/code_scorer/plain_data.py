"""Plain data as text and back: what may pass between the two sides of a judgement.

No import of this file enters a sandbox, but its text does, below that of ``sandbox_sides``.
"""

import ast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Beside numbers, text and brackets, what the spelling of plain data may name; the first two also by themselves.
_VALUES: "dict[str, Any]" = {"inf": float("inf"), "nan": float("nan")}
_MAKERS: "dict[str, Any]" = {make.__name__: make for make in (bytearray, complex, frozenset, iter, range, set)}
_NODES = (
    *(ast.Expression, ast.Constant, ast.UnaryOp, ast.USub, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.Call, ast.Name, ast.Load),
)


def spelled(value: "Any") -> str:
    """Plain data as an expression of Python; a subclass of a plain type as that plain type.

    Raises:
        TypeError: it is no plain data.
    """
    if value is None or value is True or value is False:
        return repr(value)
    if isinstance(value, int):
        return hex(int(value)) if abs(value) >> 64 else repr(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return ascii(str(value))
    if isinstance(value, bytes):
        return repr(bytes(value))
    if isinstance(value, complex):
        return f"complex({float(value.real)!r},{float(value.imag)!r})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{spelled(key)}:{spelled(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{spelled(each)}," for each in value) + ")"
    return _spelled_collection(value)


def _spelled_collection(value: "Any") -> str:
    if isinstance(value, range):
        return f"range({value.start},{value.stop},{value.step})"
    kinds = ((list, "{}"), (set, "set({})"), (frozenset, "frozenset({})"), (bytearray, "bytearray({})"))
    for kind, form in kinds:
        if isinstance(value, kind):
            return form.format("[" + ",".join(map(spelled, value)) + "]")
    if hasattr(type(value), "__next__"):
        return "iter([" + ",".join(map(spelled, value)) + "])"
    raise TypeError(f"a {type(value).__name__} is no plain data")


def read_back(text: str) -> "Any":
    """The plain data that ``text`` spells; nothing but brackets and the makers above is ever called.

    Raises:
        ValueError: it spells something else.
    """
    tree = ast.parse(text, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            sound = node.id in (_MAKERS if id(node) in called else _VALUES)
        elif isinstance(node, ast.Call):
            sound = id(node.func) in called and isinstance(node.func, ast.Name)
        else:
            sound = isinstance(node, _NODES)
        if not sound:
            raise ValueError("no plain data")
    return eval(compile(tree, "data", "eval", dont_inherit=True), {"__builtins__": {}, **_MAKERS, **_VALUES})
