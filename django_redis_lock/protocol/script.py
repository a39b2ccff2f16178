"""How a Lua script is put together, from its body and the functions that scripts share."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple


class Script(NamedTuple):
    """``body``: without the shared functions, and for one lock."""

    source: str
    sha: str
    body: str = ""


class Call(NamedTuple):
    script: Script
    keys: tuple[bytes, ...]
    args: tuple[bytes | str | int, ...]


#: What finds a call of one of the functions that scripts share, and their text.
Library = list[tuple[re.Pattern[str], str]]
shared_functions: Library = []


def shared(functions: str, library: Library = shared_functions) -> str:
    """For each script that calls these functions; those behind a blank line, if it calls them. They
    may call those that are shared before."""
    for part in functions.split("\n\n"):
        names = "|".join(re.findall(r"local function (\w+)", part))
        library.append((re.compile(rf"(?<![.\w])({names})\("), part))
    return functions


def script(body: str, library: Library = shared_functions, *, first: str = "") -> Script:
    """A script of a body and the shared functions that it calls. Each part of ``first``, which
    answers most calls, comes before the functions that only what follows calls: to make a dozen of
    them takes a quarter of the time of a script. A blank line ends a part."""
    source = ""
    for part in (*first.split("\n\n"), body):
        source += _with_functions(part, library, known=source)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(source, sha, first + body)


def _with_functions(source: str, library: Library, known: str) -> str:
    for calls, functions in reversed(library):
        if calls.search(source) and functions not in known:
            source = f"{functions}\n{source}"
    return source
