"""Our Lua scripts as Python functions: the part of Lua that they are written in, compiled, and what
they use of its library. A script that uses anything else of Lua is refused.

Functions of a script become functions that return tuples; those of Lua's library return a value.
nil is None; strings are bytes; numbers are int or float; tables are ``Table``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

# -- Lua's library ---------------------------------------------------------------------------------


class Table(dict[Any, Any]):
    """What it does not have is nil."""

    @classmethod
    def of(cls, *values: object) -> Table:
        return cls((at, value) for at, value in enumerate(values, 1) if value is not None)

    def __missing__(self, key: object) -> None:
        return None

    def __setitem__(self, key: object, value: object) -> None:
        if value is None:
            self.pop(key, None)
        else:
            super().__setitem__(key, value)

    @property
    def size(self) -> int:
        size = len(self)
        while size and size not in self:
            size -= 1
        return size

    def items_from(self, start: int = 1, end: float = math.inf) -> Iterator[object]:
        while start in self and start <= end:
            yield self[start]
            start += 1


def number_text(number: float) -> bytes:
    return b"%d" % number if isinstance(number, int) else b"%.17g" % number


def _to_number(value: object) -> object:
    if not isinstance(value, bytes):
        return value if isinstance(value, (int, float)) else None
    try:
        return int(value) if value.strip().lstrip(b"-").isdigit() else float(value)
    except ValueError:
        return None


def _number(value: object) -> Any:
    if type(value) is int or type(value) is float:
        return value
    number = _to_number(value) if isinstance(value, bytes) else None
    if number is None:
        raise TypeError(f"a script counts with {value!r}")
    return number


def _text(value: object) -> bytes:
    return value if isinstance(value, bytes) else b"%.14g" % _number(value)


def _type(value: object) -> bytes:
    kinds = {type(None): b"nil", bool: b"boolean", bytes: b"string", Table: b"table"}
    return kinds.get(type(value), b"number")


def _true(value: object) -> bool:
    """0 and the empty string are true in Lua."""
    return value is not None and value is not False


def _first(values: tuple[object, ...]) -> object:
    return values[0] if values else None


def _field(value: object, name: object) -> object:
    return value[name] if isinstance(value, Table) else None


def _size(value: Any) -> int:
    return value.size if isinstance(value, Table) else len(value)


def _error(message: bytes) -> None:
    raise RuntimeError(message.decode())


def _ipairs(table: Table) -> Iterator[tuple[int, object]]:
    return enumerate(table.items_from(), 1)


def _sub(text: bytes, start: int, end: int = -1) -> bytes:
    start = max(start + len(text) + 1, 1) if start < 0 else max(start, 1)
    return text[start - 1 : end if end >= 0 else len(text) + end + 1]


@lru_cache(maxsize=64)
def _pattern(lua: bytes) -> re.Pattern[bytes]:
    return re.compile(lua.replace(b"%", b"\\"), re.DOTALL)


def _match(text: bytes, pattern: bytes) -> bytes | None:
    found = _pattern(pattern).search(text)
    return None if found is None else found[found.re.groups]


def _gmatch(text: bytes, pattern: bytes) -> Iterator[tuple[bytes]]:
    return ((found[0],) for found in _pattern(pattern).finditer(text))


def _find(text: bytes, wanted: bytes, start: int = 1, plain: bool = False) -> int | None:
    if plain:
        return text.find(wanted, start - 1) + 1 or None
    match = _pattern(wanted).search(text, start - 1)
    return None if match is None else match.start() + 1


_LIBRARY: dict[str, object] = {
    "error": _error,
    "ipairs": _ipairs,
    "math.abs": lambda value: abs(_number(value)),
    "math.ceil": lambda value: math.ceil(_number(value)),
    "math.floor": lambda value: math.floor(_number(value)),
    "math.max": lambda *values: max(map(_number, values)),
    "math.min": lambda *values: min(map(_number, values)),
    "redis.sha1hex": lambda text: hashlib.sha1(text, usedforsecurity=False).hexdigest().encode(),
    "string.find": _find,
    "string.format": lambda form, *values: form % tuple(map(_number, values)),
    "string.gmatch": _gmatch,
    "string.lower": bytes.lower,
    "string.match": _match,
    "string.sub": _sub,
    "table.concat": lambda table, between=b"": between.join(map(_text, table.items_from())),
    "tonumber": _to_number,
    "type": _type,
    "unpack": lambda table, *ends: tuple(table.items_from(*ends)),
}
HELPERS = {
    "Table": Table,
    "_field": _field,
    "_first": _first,
    "_number": _number,
    "_size": _size,
    "_text": _text,
    "_true": _true,
    "nothing": None,
} | {name.replace(".", "__"): function for name, function in _LIBRARY.items()}
#: Names that a script finds, and what they are in Python.
GIVEN = {name: name.replace(".", "__") for name in _LIBRARY} | {
    **{name: name for name in ("KEYS", "ARGV")},
    "redis.call": "call",
    "redis.pcall": "pcall",
}

# -- the compiler ----------------------------------------------------------------------------------

#: ``script(KEYS, ARGV, redis.call, redis.pcall)``: what the script returns, as a tuple.
Script = Callable[..., tuple[Any, ...]]

_TOKEN = re.compile(
    r"""\s+|--[^\n]*
    |(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")
    |(?P<sign>\.\.\.|\.\.|[=~<>]=|[-+*/%^\#<>=(){}\[\];:,.])""",
    re.VERBOSE,
)
_KEYWORDS = {
    *("and", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local"),
    *("nil", "not", "or", "return", "then", "true"),
}
#: The binary operators as Python writes them, those that bind least first.
_COUNTING = "_number({{}}) {} _number({{}})"
_LEVELS: tuple[dict[str, str], ...] = (
    {"==": "{} == {}", "~=": "{} != {}"}
    | {sign: _COUNTING.format(sign) for sign in ("<", ">", "<=", ">=")},
    {"..": "_text({}) + _text({})"},
    {sign: _COUNTING.format(sign) for sign in "+-"},
    {sign: _COUNTING.format(sign) for sign in "*/%"},
)


class _Code(NamedTuple):
    """An expression in Python. ``many``: it gives a tuple, of all values in Lua."""

    text: str
    many: bool = False

    @property
    def one(self) -> str:
        return f"_first({self.text})" if self.many else self.text

    @property
    def all(self) -> str:
        return "*" * self.many + self.text


class _Function:
    """A function that is being written, and the variables of outer ones that it sets."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.lines: list[str] = []
        self.nonlocals: set[str] = set()


class _Scope(NamedTuple):
    """The variables of a block of a function, by their names in Lua."""

    names: dict[str, str]
    function: _Function


class _Compiler:
    def __init__(self, source: str) -> None:
        self._tokens = list(_tokens(source))
        self._at = 0
        self._made = 0
        self._function = _Function(depth=1)
        self._scopes = [_Scope({}, self._function)]

    def chunk(self) -> str:
        self._block("")
        head = "def script(KEYS, ARGV, call, pcall):"
        return "\n".join((head, *self._function.lines, " return ()"))

    # -- tokens ------------------------------------------------------------------------------

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    @property
    def _ahead(self) -> str:
        return self._tokens[self._at]

    def _skip(self, token: str) -> bool:
        found = self._ahead == token
        self._at += found
        return found

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise SyntaxError(f"expected {token!r}, not {self._ahead!r}")

    def _names(self) -> list[str]:
        names = [self._next()]
        while self._skip(","):
            names.append(self._next())
        return names

    # -- variables ---------------------------------------------------------------------------

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self._scopes.append(_Scope({}, self._function))
        yield
        self._scopes.pop()

    def _declare(self, name: str) -> str:
        """A new name: Python knows no blocks."""
        if not name.isidentifier() or name in _KEYWORDS:
            raise SyntaxError(f"{name!r} is no name")
        self._made += 1
        declared = self._scopes[-1].names[name] = f"{name}_{self._made}"
        return declared

    def _variable(self, name: str) -> str | None:
        return next((s.names[name] for s in reversed(self._scopes) if name in s.names), None)

    def _set(self, targets: list[str], values: str) -> None:
        for scope in self._scopes:
            if scope.function is not self._function:
                outer = scope.names.values()
                self._function.nonlocals.update(t for t in targets if t in outer)
        self._write(f"{', '.join(targets)}, *_ = ({values}{'None, ' * len(targets)})")

    # -- statements --------------------------------------------------------------------------

    def _write(self, line: str) -> None:
        self._function.lines.append(" " * self._function.depth + line)

    def _block(self, *ends: str) -> None:
        with self._scope():
            while self._ahead not in ends:
                self._statement()

    def _under(self, head: str, *ends: str) -> None:
        self._write(head)
        self._function.depth += 1
        self._write("pass")
        self._block(*ends)
        self._function.depth -= 1

    def _statement(self) -> None:
        if self._skip("local"):
            self._local()
        elif self._skip("if"):
            self._if()
        elif self._skip("for"):
            self._for()
        elif self._skip("return"):
            ends = self._ahead in ("", "end", "else", "elseif")
            self._write(f"return ({'' if ends else self._list()})")
        elif not self._skip(";"):
            self._assignment_or_call()

    def _local(self) -> None:
        if self._skip("function"):
            self._local_function()
            return
        names = self._names()
        values = self._list() if self._skip("=") else ""
        self._set([self._declare(name) for name in names], values)

    def _local_function(self) -> None:
        name = self._declare(self._next())
        outer = self._function
        self._function = inner = _Function(outer.depth + 1)
        with self._scope():
            self._expect("(")
            parameters = []
            while not self._skip(")"):
                more = self._skip("...")
                parameters.append("*rest" if more else f"{self._declare(self._next())}=None")
                self._skip(",")
            self._block("end")
            self._expect("end")
        self._function = outer
        others = [] if "*rest" in parameters else ["*_"]
        self._write(f"def {name}({', '.join(parameters + others)}):")
        if inner.nonlocals:
            self._write(f" nonlocal {', '.join(sorted(inner.nonlocals))}")
        outer.lines += inner.lines
        self._write(" return ()")

    def _if(self) -> None:
        word = "if"
        while word != "end":
            condition = "" if word == "else" else f" _true({self._expression().one})"
            if condition:
                self._expect("then")
            self._under(f"{word.replace('else', 'el', word == 'elseif')}{condition}:", *_AFTER_THEN)
            word = self._next()

    def _for(self) -> None:
        names = self._names()
        if self._skip("="):
            bounds = [part.one for part in self._expressions()]
            start, end, step = (*bounds, "1")[:3]
            over = f"((at,) for at in range(int({start}), int({end}) + 1, int({step})))"
        else:
            self._expect("in")
            over = self._expression().one
        self._expect("do")
        with self._scope():
            targets = "".join(f"{self._declare(name)}, " for name in names)
            self._under(f"for {targets}in {over}:", "end")
        self._expect("end")

    def _assignment_or_call(self) -> None:
        targets = [self._suffixed(read=False).text]
        while self._skip(","):
            targets.append(self._suffixed(read=False).text)
        if self._skip("="):
            self._set(targets, self._list())
        elif targets[0].endswith(")"):
            self._write(targets[0])
        else:
            raise SyntaxError(f"unexpected {targets[0]!r}")

    # -- expressions -------------------------------------------------------------------------

    def _expressions(self, *ends: str) -> list[_Code]:
        found = []
        while self._ahead not in ends:
            found.append(self._expression())
            if not self._skip(","):
                break
        return found

    def _list(self, *ends: str) -> str:
        """The inside of a tuple: of the last expression, all values."""
        found = self._expressions(*ends)
        if not found:
            return ""
        *others, last = found
        return "".join(f"{part.one}, " for part in others) + last.all + ", "

    def _expression(self) -> _Code:
        return self._either("or", lambda: self._either("and", lambda: self._binary(0)))

    def _either(self, word: str, operand: Callable[[], _Code]) -> _Code:
        left = operand()
        while self._skip(word):
            self._made += 1
            kept = f"kept_{self._made}"
            test = f"_true({kept} := {left.one})"
            right = operand().one
            chosen, other = (right, kept) if word == "and" else (kept, right)
            left = _Code(f"({chosen} if {test} else {other})")
        return left

    def _binary(self, level: int) -> _Code:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._ahead in _LEVELS[level]:
            form = _LEVELS[level][self._next()]
            right = self._binary(level + 1)
            left = _Code(f"({form.format(left.one, right.one)})")
        return left

    def _unary(self) -> _Code:
        if self._skip("not"):
            return _Code(f"(not _true({self._unary().one}))")
        if self._skip("-"):
            return _Code(f"(-_number({self._unary().one}))")
        if self._skip("#"):
            return _Code(f"_size({self._unary().one})")
        base = self._simple()
        return _Code(f"({base.one} ** {self._unary().one})") if self._skip("^") else base

    def _simple(self) -> _Code:
        token = self._ahead
        if token in _CONSTANTS:
            return _Code(_CONSTANTS[self._next()])
        if token[:1] in ("'", '"'):
            return _Code(repr(_unquoted(self._next())))
        if token[:1].isdigit():
            return _Code(self._next())
        if self._skip("..."):
            return _Code("rest", many=True)
        if self._skip("("):
            inside = self._expression().one
            self._expect(")")
            return _Code(f"({inside})")
        if self._skip("{"):
            return _Code(f"Table.of({self._arguments('}')})")
        return self._suffixed(read=True)

    def _arguments(self, end: str) -> str:
        arguments = self._list(end)
        self._expect(end)
        return arguments

    def _suffixed(self, read: bool) -> _Code:
        """A variable, a function or a field, to be ``read`` or to be set."""
        name = self._next()
        if not name.isidentifier() or name in _KEYWORDS:
            raise SyntaxError(f"unexpected {name!r}")
        variable = self._variable(name)
        if variable is None and self._skip("."):
            name = f"{name}.{self._next()}"
            if name not in GIVEN:
                raise SyntaxError(f"{name} is not among what scripts may use of Lua")
        # A name that was not declared is nil.
        code = _Code(variable or GIVEN.get(name, "nothing"))
        while self._ahead in ("[", ".", "("):
            if self._skip("("):
                many = variable is not None or name == "unpack"
                code = _Code(f"{code.one}({self._arguments(')')})", many)
            elif self._skip("["):
                code = _Code(f"{code.one}[{self._expression().one}]")
                self._expect("]")
            else:
                self._skip(".")
                field = repr(self._next().encode())
                # Read, it may be of a string, which has no fields.
                code = _Code(f"_field({code.one}, {field})" if read else f"{code.one}[{field}]")
        return code


_AFTER_THEN = ("elseif", "else", "end")
_CONSTANTS = {"nil": "None", "true": "True", "false": "False"}


def _tokens(source: str) -> Iterator[str]:
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise SyntaxError(f"unexpected {source[at : at + 20]!r}")
        at = found.end()
        if found.lastgroup:
            yield found[0]
    yield ""


def _unquoted(literal: str) -> bytes:
    return re.sub(r"\\(.)", lambda at: {"n": "\n"}.get(at[1], at[1]), literal[1:-1]).encode()


@lru_cache(maxsize=256)
def compile_script(source: str) -> Script:
    """The script as a function.

    Raises:
        SyntaxError: it uses more of Lua than is known here.
    """
    names: dict[str, Any] = dict(HELPERS)
    exec(compile(_Compiler(source).chunk(), "<script>", "exec"), names)
    script: Script = names["script"]
    return script
