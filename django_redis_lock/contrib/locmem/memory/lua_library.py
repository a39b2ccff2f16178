"""What our Lua scripts use of Lua's library.

nil is None; strings are bytes; numbers are int or float; tables are ``Table``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any


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
