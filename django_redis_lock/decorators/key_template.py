"""Names made from the arguments of a call, for ``locked()`` and ``cached()``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import string
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

__all__ = ["MAX_NAME_CHARACTERS", "Template", "bound_method", "namer", "short"]

#: Characters of a name; a longer one ends in a hash instead of its last part.
MAX_NAME_CHARACTERS = 200

Namer = Callable[[tuple[Any, ...], dict[str, Any]], str]

#: What an escaped character is made of, so none of these can part two values.
_ESCAPES = frozenset("%0123456789ABCDEF")
_formatter = string.Formatter()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


class Field(NamedTuple):
    """What stands between one pair of braces."""

    name: str
    conversion: str | None
    spec: str

    def text(self, values: dict[str, Any]) -> str:
        value = values[self.name] if self.name in values else self._found(values)
        if not (self.conversion or self.spec) and type(value) in (str, int):
            return str(value)
        if isinstance(value, (set, frozenset)):
            raise ValueError(f"{{{self.name}}} is a set, and its order differs between processes")
        value = _formatter.convert_field(value, self.conversion)
        text = str(_formatter.format_field(value, _formatter.vformat(self.spec, (), values)))
        if _ADDRESS.search(text):
            raise ValueError(
                f"{{{self.name}}} gives {text!r}, which is another text in each process: name an "
                "attribute of it, such as its pk"
            )
        return text

    def _found(self, values: dict[str, Any]) -> Any:
        """What attributes and items lead to."""
        value, _ = _formatter.get_field(self.name, (), values)
        return value


class Template:
    """A name with ``{fields}`` to be filled in.

    Two sets of values never give the same name, as long as their texts differ: where a value
    contains a character that parts it from the next one, that character is written as in a URL,
    ``%2D`` for ``-``. With one field nothing needs to be escaped.

    Raises:
        ValueError: it is no template, or nothing stands between two of its fields.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        #: Literal text and fields in turn; the last literal stands alone.
        self._literals: list[str] = [""]
        self._fields: list[Field] = []
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f"{text!r} is no template: {error}; a brace that belongs to the name is doubled"
            ) from None
        for literal, name, spec, conversion in parts:
            self._literals[-1] += literal
            if conversion not in (None, "r", "s", "a"):
                raise ValueError(f"{text!r}: !{conversion} is no conversion; there are !r, !s, !a")
            if name is not None:
                self._fields.append(Field(name, conversion, spec or ""))
                self._literals.append("")
        self._escaped = frozenset("%").union(*map(self._parting, self._literals[1:-1]))

    def _parting(self, literal: str) -> str:
        """The character of what stands between two fields that no value may contain."""
        parting = next((c for c in literal if c not in _ESCAPES), None)
        if parting is None:
            raise ValueError(
                f"{self.text!r}: put something such as '-' between the fields, or the values 'xy', "
                "'z' and 'x', 'yz' would be the same"
            )
        return parting

    def fields(self) -> Iterator[str]:
        """What stands between braces, also where a field's format has fields of its own."""
        for field in self._fields:
            yield field.name
            for _, name, _, _ in string.Formatter().parse(field.spec):
                if name is not None:
                    yield name

    def fill(self, values: dict[str, Any]) -> str:
        filled = [field.text(values) for field in self._fields]
        if len(filled) > 1:
            filled = [self._escape(text) for text in filled]
        return self._literals[0] + "".join(
            text + literal for text, literal in zip(filled, self._literals[1:], strict=True)
        )

    def _escape(self, text: str) -> str:
        if self._escaped.isdisjoint(text):
            return text
        return "".join(_percent(c) if c in self._escaped else c for c in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def namer(key: str | Callable[..., str] | None, function: Callable[..., Any], dotted: str) -> Namer:
    """How to name one call of ``function``.

    Args:
        key: a name, a template over the arguments of the call, or a callable that takes them; None
            for ``dotted``.
        dotted: the function's own name, for messages too.

    Raises:
        ValueError: the template names an argument that the function does not have. At the call:
            it cannot be filled in, or gives a name that is empty or differs between processes.
    """
    if key is None:
        return lambda args, kwargs: short(dotted)
    if callable(key):
        return lambda args, kwargs: _usable(key(*args, **kwargs), dotted)
    template = Template(key)
    fields = list(template.fields())
    if not fields:
        name = short(template.fill({}))  # Doubled braces may stand in it.
        return lambda args, kwargs: name
    method = bound_method(function)
    signature = inspect.signature(function if method is None else method)
    known = {"self": method.__self__} if method is not None else {}
    any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for field in fields:
        argument = field.partition(".")[0].partition("[")[0]
        if not argument or argument.isdigit():
            raise ValueError(f"{key!r}: name the argument between the braces, such as {{pk}}")
        if argument not in signature.parameters and argument not in known and not any_name:
            has = ", ".join([*known, *signature.parameters]) or "none"
            raise ValueError(f"{key!r}: {dotted} has no argument {argument!r} (it has: {has})")

    def name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**known, **bound.arguments}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values = {**values[name], **values}
        try:
            return _usable(template.fill(values), dotted)
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the key {key!r} of {dotted} cannot be made from this call's arguments: {error!r}"
            ) from error

    return name_of


def bound_method(function: Any) -> MethodType | None:
    """The method of an object that Django's ``method_decorator`` has wrapped up as ``function``:
    its signature is that of the call, while ``function`` claims to be the unbound method."""
    while function is not None:
        if isinstance(function, functools.partial) and inspect.ismethod(function.func):
            return function.func
        function = getattr(function, "__wrapped__", None)
    return None


def short(name: str) -> str:
    """``name``, or if it is too long, as much of its beginning as fits before a hash of it. A short
    name and a shortened one are never the same: they differ in length."""
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name[: MAX_NAME_CHARACTERS - len(digest)]}~{digest}"


def _usable(name: Any, dotted: str) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the key of {dotted} must give a non-empty str, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the key of {dotted} gives {name!r}, which is no text") from None
    return short(name)
