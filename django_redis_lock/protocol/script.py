"""How a Lua script is put together, from its body and the functions that scripts share."""

import hashlib
from typing import Any, ClassVar, NamedTuple, TypeAlias

#: The text of some functions that scripts share, by what calls of them begin with.
Library = list[tuple[list[str], str]]
shared_functions: Library = []


class Script:
    """A Lua script, which is put together when it is first sent.

    Args:
        body: the script without the shared functions.
        library: the functions that it may call.
        first: parts that answer most calls, with a blank line between two. Each comes before the
            functions that only what follows calls: to make a dozen of them takes a quarter of the
            time of a script.
        before: a text before all of this.
        urgent: whether the script keeps or ends a lock that is held, or leaves a queue: no
            circuit breaker refuses it.
    """

    def __init__(
        self,
        body: str,
        library: Library = shared_functions,
        *,
        first: str = "",
        before: str = "",
        urgent: bool = False,
    ) -> None:
        self.body = first + body
        self.urgent = urgent
        self._parts = (*first.split("\n\n"), body)
        self._before = before
        self._library = library  # It is complete when the first script is sent.
        self._source = self._sha = ""

    @property
    def source(self) -> str:
        if not self._source:
            source = ""
            for part in self._parts:
                source += self._with_functions(part, known=source)
            self._source = self._before + source
        return self._source

    #: Those that were sent, by their sha: errors name no more.
    sent: ClassVar["dict[str, Script]"] = {}

    @property
    def sha(self) -> str:
        """The name by which Redis knows the script."""
        if not self._sha:
            sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
            self.sent[sha], self._sha = self, sha
        return self._sha

    def _with_functions(self, source: str, known: str) -> str:
        for calls, functions in reversed(self._library):
            if functions not in known and any(call in source for call in calls):
                source = f"{functions}\n{source}"
        return source


#: Defines a script, under its contract: KEYS, ARGV, what it returns, why it is atomic.
script = Script


class Call(NamedTuple):
    """A script to run.

    Attributes:
        unanswered: of a script that takes something, where it is noted with its server that nobody
            waits for a reply any more, although Redis may yet carry the call out.
    """

    script: Script
    keys: tuple[bytes, ...]
    args: tuple[bytes | str | int, ...]
    unanswered: "list[Unanswered] | None" = None


#: A server and a call.
Unanswered: TypeAlias = tuple[Any, Call]


#: What a call returns: None, an int, bytes, or a list of these. Which of them, the script's
#: contract says; a function ``parse_…`` makes it a type of our own.
Reply: TypeAlias = Any


def shared(functions: str, library: Library = shared_functions) -> str:
    """For each script that calls these functions; those behind a blank line, if it calls them. They
    may call those that are shared before. No name ends with another's."""
    for part in functions.split("\n\n"):
        names = [text.partition("(")[0] for text in part.split("local function ")[1:]]
        library.append(([f"{name}(" for name in names], part))
    return functions
