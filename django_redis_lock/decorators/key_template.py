"""Names made from the arguments of a call, for ``locked()`` and ``cached()``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import string
from collections.abc import Callable, Iterator
from datetime import date, time
from decimal import Decimal
from enum import Enum
from numbers import Integral
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DEFAULT_DB_ALIAS, router
from django.db.models import Model

from ..threads import get_logger
from .targets import bound_method

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

#: The characters of an escape sequence, which cannot separate two values.
_ESCAPES = frozenset("%0123456789ABCDEF")
_formatter = string.Formatter()
#: The steps from an argument to one of its attributes or items.
_STEPS = re.compile(r"\.[^.\[]+|\[[^\]]*\]")
#: A place for a value in the syntax of Python's ``%``.
_PERCENT = re.compile(r"%(\(\w+\))?[sdr](?![a-zA-Z])")
#: Types of which each value has one text, in each process.
_BY_TEXT = (Decimal, date, time, UUID)  # A datetime is a date.
#: Of values as Python writes them: what is before their text in the keys of ``cached()``, and the
#: text. Nothing is before that of a str.
_WRITTEN: tuple[tuple[type, str, Callable[[Any], str]], ...] = (
    (bool, "bool", str),
    (type(None), "None", str),
    (Integral, "int", lambda value: str(int(value))),
    (float, "float", float.__repr__),
    (bytes, "bytes", bytes.__repr__),
)
_TAGS = frozenset(("list", "tuple", *(tag for _, tag, _ in _WRITTEN)))


class Field:
    """One field of a template."""

    def __init__(self, name: str, conversion: str | None, spec: str) -> None:
        self.name, self.conversion, self.spec = name, conversion, spec
        self._steps = _STEPS.findall(name)
        self._argument = name.partition(".")[0].partition("[")[0]

    def encode(self, values: dict[str, object]) -> tuple[str, str]:
        """The type of the value, and its text; a str has no type, and with a conversion or a format
        the text counts."""
        value = values[self._argument]
        for step in self._steps:
            self._refuse_unsaved(value)
            value, _ = _formatter.get_field(f"v{step}", (), {"v": value})
        tag, text = self._encode(value)
        if not (self.conversion or self.spec):
            return tag, text
        shown = _formatter.convert_field(value, self.conversion)
        return "", str(_formatter.format_field(shown, _formatter.vformat(self.spec, (), values)))

    def _encode(self, value: Any) -> tuple[str, str]:
        """The type and the text of ``value``; a lazy object, as a request's user, is an instance of
        what it stands for."""
        if isinstance(value, Enum):
            if not isinstance(value, (str, int)):
                return "object", f"{type(value).__name__}.{value.name}"
            value = value.value
        if isinstance(value, str):
            return "", str(value)
        for kind, tag, write in _WRITTEN:
            if isinstance(value, kind):
                return tag, write(value)
        if isinstance(value, (list, tuple)):
            items = ", ".join(map(self._item, value))
            if isinstance(value, list):
                return "list", f"[{items}]"
            return "tuple", f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, Model):
            self._refuse_unsaved(value)
            label = value._meta.label_lower
            # Where it is written: it may have been read from any replica.
            database = router.db_for_write(value._meta.model, instance=value)
            return label if database == DEFAULT_DB_ALIAS else f"{label}@{database}", str(value.pk)
        if isinstance(value, _BY_TEXT) or getattr(value, "is_anonymous", False) is True:
            return "object", str(value)
        raise ValueError(
            f"{{{self.name}}} is or contains a value of type {value.__class__.__name__}, whose "
            "text may differ between processes or be that of another: name an attribute, such as "
            "its pk, or give a function, key=lambda …"
        )

    def _item(self, value: object) -> str:
        """Within a list or tuple: as Python writes it; what it has no sign for, with its type."""
        tag, text = self._encode(value)
        if not tag:  # A subclass of str may have one ``str()`` for all its values.
            is_text = isinstance(value, str) and not isinstance(value, Enum)
            return str.__repr__(value) if is_text else repr(text)
        return text if tag in _TAGS else f"{tag}({text!r})"

    def _refuse_unsaved(self, value: object) -> None:
        if isinstance(value, Model) and value.pk is None:
            raise ValueError(
                f"{{{self.name}}} is of a {value._meta.label} that is not saved, or deleted: it "
                "has no primary key, so that all such objects would have one name"
            )


class Template:
    """A name with ``{fields}``. Different values never give the same name: a character in a value
    that separates two fields is escaped as in a URL, ``%2D`` for ``-``.

    Args:
        typed: whether a value that is no text has its type before it, ``%(int)1`` for 1.
    """

    def __init__(self, text: str, typed: bool = False) -> None:
        if place := _PERCENT.search(text):
            raise ValueError(
                f"{text!r} is no template with {place[0]!r}: write the name of an argument between "
                "braces, as in {pk}"
            )
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
        filled = [self._fill(*field.encode(values)) for field in self._fields]
        return self._literals[0] + "".join(
            text + literal for text, literal in zip(filled, self._literals[1:], strict=True)
        )

    def _fill(self, tag: str, text: str) -> str:
        if tag:  # Without types, only the label of a model counts.
            tag = f"%({tag})" if self._typed else f"{tag}:" * ("." in tag)
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
