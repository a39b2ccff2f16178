"""The processes of a team: each takes orders on its standard input and reports on its standard
output, both of which are one socket. They are forked from a process that has imported the site.

Both are lines of JSON. An order to start something names a function, which is called with this
process's ``Member`` and the arguments in the order; what else it needs to hear, it asks for.

The process ends when its input does, so it cannot outlive the demo, however that ends.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, NoReturn

import django
from django.utils.module_loading import import_string

__all__ = ["Member"]


class Member:
    """This process's line to whoever has started it."""

    def __init__(self) -> None:
        self._reports = sys.stdout
        sys.stdout = sys.stderr  # Whatever else is printed must not get between the reports.
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
        threading.Thread(target=self._listen, daemon=True).start()

    def hear(self) -> Any:
        """The next order, as soon as it comes."""
        return self._orders.get()

    def say(self, what: str, **facts: Any) -> None:
        """Report ``what`` with its ``facts``."""
        print(json.dumps({"what": what, **facts}), file=self._reports, flush=True)

    def _listen(self) -> None:
        # Not sys.stdin: the interpreter cannot end while a thread holds its buffer.
        rest = b""
        while chunk := os.read(0, 4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._orders.put(json.loads(line))
        # In the main thread this leaves every `with`, so that locks are released.
        os.kill(os.getpid(), signal.SIGTERM)


def main(sockets: list[int]) -> None:
    """Fork into one member for each of ``sockets``, and end when all of them have ended."""
    django.setup()
    gc.freeze()  # Nothing that was imported is copied only to be collected when a member ends.
    for number in sockets:
        if os.fork() == 0:
            os.dup2(number, 0)
            os.dup2(number, 1)
            _close(sockets)
            _serve()
    _close(sockets)
    for _ in sockets:
        os.wait()


def _close(sockets: list[int]) -> None:
    for number in sockets:
        os.close(number)


def _serve() -> NoReturn:
    member = Member()
    member.say("here")
    while True:
        order = member.hear()
        import_string(order["function"])(member, **order["arguments"])


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
