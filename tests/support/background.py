"""What a test does in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.processes import PATIENCE


class Background:
    """A function that runs in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._outcome: Any = None
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._outcome = function(*args)
        except BaseException as error:
            self._raised = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        """What it returned; what it raised is raised here."""
        self._thread.join(PATIENCE)
        assert self.done, "it hangs"
        if self._raised is not None:
            raise self._raised
        return self._outcome


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns in another thread."""
    return Background(function, *args).result()
