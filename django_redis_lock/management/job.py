"""``run_locked`` of a management command: the process that holds the lock also runs the command,
so a kill ends both."""

from __future__ import annotations

import difflib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.core.management.base import BaseCommand

from ..decorators import interrupt_main_thread
from .exit_codes import LOST, NOT_FOUND, USAGE


class ManagementCommand:
    """A management command with its arguments, as behind ``manage.py``.

    Args:
        argv: the command's name and its arguments.
        called_by: the command that runs it. Unless that was called from a command line, errors
            are raised, as by ``call_command``.

    Attributes:
        label: the label of the lock; without arguments, which may be secret.

    Raises:
        CommandError: there is no such command, or its options name other settings.
    """

    def __init__(self, argv: Sequence[str], called_by: BaseCommand) -> None:
        name, *self._args = argv
        for option in ("--settings", "--pythonpath"):
            if any(arg.partition("=")[0] == option for arg in self._args):
                raise CommandError(
                    f"{option} has no effect on {name}, which runs in this process: put it before "
                    "the --",
                    returncode=USAGE,
                )
        self.label = f"manage.py {name}"
        self._name = name
        self._called_by = called_by
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._command = _load(name)

    @property
    def _from_command_line(self) -> bool:
        return bool(getattr(self._called_by, "_called_from_command_line", False))

    def run(self, environment: dict[str, str], within: float) -> int:
        """Run it and return its exit code, or raise its exception.

        Args:
            environment: variables to add to its environment.
            within: seconds in which it must end if this process is killed: later, another process
                may have the lock.
        """
        argv = sys.argv
        with _environment(environment):
            if not self._from_command_line:
                out, err = self._called_by.stdout, self._called_by.stderr
                call_command(self._command, *self._args, stdout=out, stderr=err)
                return 0
            # The command must see itself there: runserver starts itself again from it.
            sys.argv = [argv[0], self._name, *self._args]
            try:
                self._command.run_from_argv(sys.argv)
            finally:
                sys.argv = argv
        return 0

    def terminate(self) -> None:
        """Ask it to end. Called from another thread."""
        if self._in_main_thread:
            interrupt_main_thread()

    def kill(self) -> None:
        """End it. Called from another thread."""
        if self._from_command_line:
            os._exit(LOST)


def _load(name: str) -> BaseCommand:
    known = get_commands()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "manage.py help lists them"
        raise CommandError(
            f"there is no management command {name!r}; {hint} (--shell runs a program)",
            returncode=NOT_FOUND,
        )
    app = known[name]
    return app if isinstance(app, BaseCommand) else load_command_class(app, name)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before: dict[str, Any] = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
