"""Names made from the arguments of a call, for ``locked()`` and ``cached()``."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["namer"]


def namer(
    key: str | Callable[..., str] | None, function: Callable[..., Any], dotted: str
) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """How to name one call of ``function``.

    Args:
        key: a name, a template over the arguments of the call, or a callable that takes them; None
            for ``dotted``.
        dotted: the function's own name, for messages too.

    Raises:
        ValueError: the template names an argument that the function does not have. At the call:
            it cannot be filled in, or gives an empty name.
    """
    if key is None:
        return lambda args, kwargs: dotted
    if callable(key):
        return lambda args, kwargs: _usable(key(*args, **kwargs), dotted)
    fields = list(_fields(key))
    if not fields:
        name = key.format()  # Doubled braces may stand in it.
        return lambda args, kwargs: name
    signature = inspect.signature(function)
    any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for field in fields:
        argument = field.partition(".")[0].partition("[")[0]
        if not argument or argument.isdigit():
            raise ValueError(f"{key!r}: name the argument between the braces, such as {{pk}}")
        if argument not in signature.parameters and not any_name:
            known = ", ".join(signature.parameters) or "none"
            raise ValueError(f"{key!r}: {dotted} has no argument {argument!r} (it has: {known})")

    def name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values = {**values[name], **values}
        try:
            return _usable(key.format(**values), dotted)
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the key {key!r} of {dotted} cannot be made from this call's arguments: {error!r}"
            ) from error

    return name_of


def _fields(template: str) -> Iterator[str]:
    """What stands between braces, also where a field's format has fields of its own."""
    for _, field, spec, _ in string.Formatter().parse(template):
        if field is not None:
            yield field
            yield from _fields(spec or "")


def _usable(name: Any, dotted: str) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the key of {dotted} must give a non-empty str, not {name!r}")
    return name
