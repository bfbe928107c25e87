"""Calls written in Python (Meta's Llama 3.2 and 4): `[name(key=value, …), …]`."""

import ast
import json
import re
import warnings

from worker.api.tools.scanner import MAX_DEPTH, Malformed, Parse, Scanner, Unfinished, is_unicode
from worker.api.tools.writer import AnswerWriter

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\w+")
_PLAIN = re.compile(r"""[^\[\](){},'"<]+""")  # `<` may begin an end mark
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}


def python_calls(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """Read a list of calls; what closes the last one and the list may be missing."""
    yield from scanner.blanks()
    is_marked = yield from scanner.skip(PYTHON_START)
    yield from scanner.blanks()
    yield from scanner.expect("[")
    while True:
        yield from scanner.blanks()
        name = yield from scanner.word(_NAME)
        if not (is_marked or name in writer.known_names):
            raise Malformed
        yield from scanner.blanks()
        yield from scanner.expect("(")
        pairs: list[str] = []
        try:
            yield from _arguments(scanner, pairs)
        except Unfinished:
            if scanner.truncated:
                writer.begin(name)
                writer.arguments("{" + ", ".join(pairs))
            raise
        writer.begin(name)
        writer.arguments("{" + ", ".join(pairs) + "}")
        writer.end()
        scanner.mark()
        yield from scanner.blanks()
        if not (yield from scanner.skip(",")):
            break
    yield from scanner.close("]")
    yield from scanner.blanks()
    yield from scanner.skip(PYTHON_END)


def _arguments(scanner: Scanner, pairs: list[str]) -> Parse[None]:
    keys: set[str] = set()
    yield from scanner.blanks()
    while not (yield from _ends_call(scanner)):
        key = yield from scanner.word(_KEY)
        yield from scanner.blanks()
        yield from scanner.expect("=")
        pieces: list[str] = []
        yield from _value(scanner, pieces)
        value = literal_as_json("".join(pieces))
        if value is None or key in keys:
            raise Malformed
        pairs.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        keys.add(key)
        if (yield from scanner.skip(",")):
            yield from scanner.blanks()


def _ends_call(scanner: Scanner) -> Parse[bool]:
    return (
        (yield from scanner.skip(")"))
        or (yield from scanner.looking_at("]"))
        or (yield from scanner.is_over())
    )


def _value(scanner: Scanner, pieces: list[str]) -> Parse[None]:
    closing: list[str] = []
    while True:
        yield from scanner.run(_PLAIN, pieces.append)
        character = yield from scanner.peek()
        if not closing and character in (",", ")", "]"):
            return
        if (yield from scanner.is_over()):
            pieces += reversed(closing)
            return
        if character in _CLOSING:
            closing.append(_CLOSING[character])
            if len(closing) > MAX_DEPTH:
                raise Malformed
        elif character in (")", "]", "}") and (not closing or closing.pop() != character):
            raise Malformed
        pieces.append((yield from scanner.next()))
        while character in _IN_STRING:
            yield from scanner.run(_IN_STRING[character], pieces.append)
            inner = yield from scanner.next()
            pieces.append(inner)
            if inner == character:
                break
            pieces.append((yield from scanner.next()))  # whatever was escaped


def literal_as_json(text: str) -> str | None:
    """Return a literal of Python (or JSON) as JSON; None if JSON cannot write it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text.strip(), mode="eval")
        value = json.dumps(_literal(tree.body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return value if is_unicode(value) else None


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if all(_is_string(key) for key in keys):
            pairs = zip(keys, values, strict=True)
            return {k.value: _literal(v) for k, v in pairs if isinstance(k, ast.Constant)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=number)) if (
            isinstance(number, int | float) and not isinstance(number, bool)
        ):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("not a literal")


def _is_string(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)
