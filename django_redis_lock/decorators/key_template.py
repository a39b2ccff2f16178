"""Names made from the arguments of a call, for ``locked()`` and ``cached()``."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import numbers
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db.models import Model
from django.utils.functional import Promise
from django.utils.tree import Node

from ..threads import get_logger

T = TypeVar("T")

logger = get_logger("django_redis_lock.locked")

#: The longest name; the end of a longer one is replaced by a hash.
MAX_NAME_CHARACTERS = 200

#: The arguments of a call.
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]
Namer = Callable[[Args, Kwargs], str]
#: A name of a lock, or several.
Names = str | tuple[str, ...]

_TAGS: dict[str, Any] = {
    "None": type(None),
    "bool": bool,
    "int": numbers.Integral,
    "float": numbers.Real,
    "bytes": bytes,
    "list": list,
    "tuple": tuple,
    "dict": dict,
}
#: The characters of an escape sequence, which cannot separate two values.
_ESCAPES = frozenset("%0123456789ABCDEF")
_formatter = string.Formatter()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
#: Without a ``__str__``, but their text is complete and the same in each process.
_PLAIN = (str, bytes, int, float, complex, range, type, type(None))


class Field(NamedTuple):
    """One field of a template."""

    name: str
    conversion: str | None
    spec: str

    def text(self, values: dict[str, object], typed: bool) -> tuple[str, object]:
        """The text of the value, and the value; with a conversion or a format, the text twice.
        ``typed``: what a dataclass compares and does not show counts, too."""
        if self.name in values:
            value = values[self.name]
        else:  # A name with attributes and items.
            value, _ = _formatter.get_field(self.name, (), values)
        formats = self.conversion or self.spec
        if not formats and type(value) in (str, int):
            return str(value), value
        value = self._reliable(value, typed)
        shown = _formatter.convert_field(value, self.conversion)
        text = str(_formatter.format_field(shown, _formatter.vformat(self.spec, (), values)))
        if _ADDRESS.search(text):
            raise ValueError(
                f"{{{self.name}}} gives {text!r}, which differs between processes: use one of its "
                "attributes, such as its pk"
            )
        return text, text if formats else value

    def _reliable(self, value: object, typed: bool) -> object:
        """``value``, with the items of a dict in one order. Raises ValueError if its text may
        differ between processes, as that of a set, or be cut short, as a queryset's."""
        kind = value.__class__  # Of a lazy object, what it stands for.
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Promise):  # A translation: its text in the language of the call.
            return str(value)
        if isinstance(value, dict):
            keys = [self._reliable(key, typed) for key in value]
            parts = [self._reliable(part, typed) for part in value.values()]
            items = zip(keys, parts, strict=True)
            return dict(sorted(items, key=repr)) if kind is dict else value
        if isinstance(value, (list, tuple)):
            parts = [self._reliable(part, typed) for part in value]
            return kind(parts) if kind in (list, tuple) else value
        no_str = kind.__str__ is object.__str__
        if no_str and dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                if field.repr or (typed and field.compare):
                    self._reliable(getattr(value, field.name), typed)
        elif no_str or (issubclass(kind, Sized) and issubclass(kind, Iterable)):
            raise ValueError(
                f"{{{self.name}}} is or contains a value of type {kind.__name__}, whose text may "
                "differ between processes or be cut short: use an attribute, such as its pk, or a "
                "list"
            )
        return value


class Template:
    """A name with ``{fields}``. Different values never give the same name: a character in a value
    that separates two fields is escaped as in a URL, ``%2D`` for ``-``.

    Args:
        typed: whether a value that is no text has its type before it, ``%(int)1`` for 1.
    """

    def __init__(self, text: str, typed: bool = False) -> None:
        self.text = text
        self._typed = typed
        #: Literal text and fields alternate; the last literal has no field.
        self._literals: list[str] = [""]
        self._fields: list[Field] = []
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f"{text!r} is not a template: {error}; double a brace that belongs to the name"
            ) from None
        for literal, name, spec, conversion in parts:
            self._literals[-1] += literal
            if conversion not in (None, "r", "s", "a"):
                raise ValueError(f"{text!r}: !{conversion} is not a conversion; use !r, !s or !a")
            if name is not None:
                self._fields.append(Field(name, conversion, spec or ""))
                self._literals.append("")
        self._escaped = frozenset("%").union(*map(self._separator, self._literals[1:-1]))

    def _separator(self, literal: str) -> str:
        """The character of ``literal``, between two fields, that is escaped in values."""
        separator = next((c for c in literal if c not in _ESCAPES), None)
        if separator is None:
            raise ValueError(
                f"{self.text!r}: put a separator such as '-' between the fields, or the values "
                "'xy', 'z' and 'x', 'yz' would give the same name"
            )
        return separator

    def fields(self) -> Iterator[str]:
        """The names of all fields, including fields in the format of another field."""
        for field in self._fields:
            yield field.name
            for _, name, _, _ in string.Formatter().parse(field.spec):
                if name is not None:
                    yield name

    def fill(self, values: dict[str, object]) -> str:
        filled = [self._fill(*field.text(values, self._typed)) for field in self._fields]
        return self._literals[0] + "".join(
            text + literal for text, literal in zip(filled, self._literals[1:], strict=True)
        )

    def _fill(self, text: str, value: object) -> str:
        tag = "" if not self._typed or isinstance(value, str) else _tag(value)
        if len(self._fields) > 1:
            text = self._escape(text)
            tag = "%".join(map(self._escape, tag.split("%")))
        elif self._typed and not tag and text[:1] == "%":
            text = _LIKE_A_TAG.sub("%25", text)
        return tag + text

    def _escape(self, text: str) -> str:
        if self._escaped.isdisjoint(text):
            return text
        return "".join(_percent(c) if c in self._escaped else c for c in text)


#: The beginning of a text that looks like a tag, or like such a text that has been escaped.
_LIKE_A_TAG = re.compile(r"\A%(?=(25)*\()")


def _tag(value: object) -> str:
    """The type of ``value``, the same for types that can stand for each other, such as ``int`` and
    the members of ``IntegerChoices``; and what its text leaves out."""
    unseen = "" if isinstance(value, _PLAIN) else "".join(_unseen(value))
    if unseen and isinstance(value, Model):
        return unseen
    kind = next((name for name, kind in _TAGS.items() if isinstance(value, kind)), "object")
    return f"%({kind}){unseen}"


def _unseen(value: object) -> Iterator[str]:
    """What tells ``value`` from others that have its text: the type and primary key of each object
    of the database within it, and what a dataclass compares but does not show."""
    parts: Iterable[object] = ()
    if isinstance(value, Model):
        if value.pk is not None:
            key = re.sub("[%()]", lambda match: _percent(match[0]), str(value.pk))
            yield f"%({value._meta.label_lower} {key})"
    elif isinstance(value, dict):
        parts = chain.from_iterable(value.items())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, Node):  # A condition of a query, such as Q.
        parts = value.children
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = [field for field in dataclasses.fields(value) if field.compare]
        parts = [getattr(value, field.name) for field in compared]
        for field, part in zip(compared, parts, strict=True):
            if not field.repr:
                yield f"%({part!r})"
    for part in parts:
        if not isinstance(part, _PLAIN):
            yield from _unseen(part)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def namer(
    key: str | Callable[..., str] | None,
    function: Callable[..., object],
    dotted: str,
    *,
    typed: bool = False,
) -> str | Namer:
    """The name of each call of ``function``, or what makes it from the arguments.

    Args:
        key: a name, a template over the arguments of the call, or a callable that takes them; None
            for ``dotted``, the function's name.
        typed: see ``Template``.

    Raises:
        ValueError: ``key`` is invalid; or, at the call, the name.
    """
    if key is None:
        return short(dotted)
    if callable(key):
        return lambda args, kwargs: _usable(key(*args, **kwargs), dotted)
    template = Template(key, typed)
    fields = list(template.fields())
    if not fields:
        return short(template.fill({}))  # It may contain doubled braces.
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

    of_users = [field for field in fields if _OF_A_USER.search(field)]

    def name_of(args: Args, kwargs: Kwargs) -> str:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{dotted}(): {error}") from None
        bound.apply_defaults()
        values = {**known, **bound.arguments}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values = {**values[name], **values}
        try:
            if of_users and _is_anonymous(of_users[0], values):
                _warn_of_anonymous(key, dotted)
            return _usable(template.fill(values), dotted)
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the key {key!r} of {dotted} cannot be made from this call's arguments: {error!r} "
                f"(it has: {', '.join(values)})"
            ) from error

    return name_of


#: The key of the user of a request; of all who are not logged in it is None.
_OF_A_USER = re.compile(r"\brequest\.user\.(pk|id)$")


def _is_anonymous(field: str, values: dict[str, object]) -> bool:
    return _formatter.get_field(field, (), values)[0] is None


@functools.cache
def _warn_of_anonymous(key: object, dotted: str) -> None:
    """Log it once for each use of a decorator."""
    logger.warning(
        "The key %r of %s is the same for all visitors who are not logged in: put the decorator "
        "below @login_required, or name something else of the request",
        *(key, dotted),
    )


async def made_for_task(
    make: Callable[[Any, Any], T], args: object, kwargs: object, *, by_function: bool
) -> T:
    """The name that ``make`` makes from the arguments of a call; in Django's thread if a function
    of the user makes it, or a field needs the database (a ``request.user``)."""
    if not by_function:
        try:
            return make(args, kwargs)
        except SynchronousOnlyOperation:
            pass
    return await sync_to_async(make)(args, kwargs)


def bound_method(function: object) -> MethodType | None:
    """The bound method, with the signature of the call, that Django's ``method_decorator`` has made
    into ``function``."""
    while function is not None:
        if isinstance(function, functools.partial) and inspect.ismethod(function.func):
            return function.func
        function = getattr(function, "__wrapped__", None)
    return None


def short(name: str) -> str:
    """``name``; if it is too long, its beginning and a hash: longer than any name that is not
    shortened, so equal to none."""
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name[: MAX_NAME_CHARACTERS - len(digest)]}~{digest}"


def names_of(
    key: Any, function: Callable[..., object], dotted: str
) -> Names | Callable[[Args, Kwargs], Names]:
    """As ``namer``, for several names, too."""
    if isinstance(key, tuple):
        names = [namer(each, function, dotted) for each in key]
        known = tuple(name for name in names if isinstance(name, str))
        if len(known) == len(names):
            return known
        return lambda args, kwargs: tuple(n(args, kwargs) if callable(n) else n for n in names)
    if callable(key):
        return lambda args, kwargs: names_from(key(*args, **kwargs), dotted)
    return namer(key, function, dotted)


def names_from(returned: object, dotted: str) -> Names:
    """What a callable has returned, as a name or several."""
    if isinstance(returned, (list, tuple)):
        return tuple(_usable(name, dotted) for name in returned)
    return _usable(returned, dotted, "a non-empty str, or a list of them")


def _usable(name: object, dotted: str, wanted: str = "a non-empty str") -> str:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the key of {dotted} must give {wanted}, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the key of {dotted} gives {name!r}, which is not valid text") from None
    return short(name)
