"""``manage.py run_locked NAME -- COMMAND``: any management command or program, one at a time."""

from __future__ import annotations

import math
import signal
import sys
import threading
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from redis.exceptions import RedisError

from ...cache import lock_cache
from ...clock import time
from ...conf import Conf
from ...contention import Conflict, unavailable
from ...decorators.section import RetryUntil, outages_not_logged
from ...extension import PartMissing
from ...locking import Lock, unwinding
from ...transport.hints import explained
from .. import (
    Exit,
    Options,
    count_or_none,
    exit_code,
    seconds,
    seconds_or_forever,
    seconds_or_none,
    usage_error,
)
from ..job import ManagementCommand, Program

#: What runs while the lock is held. Both have the same methods.
Work = ManagementCommand | Program


class Command(BaseCommand):
    help = (
        "Runs a management command, or with --shell any program, while holding a lock, so that it "
        "runs once at a time across all hosts. The command comes after --: "
        "run_locked migrate --wait 300 -- migrate --noinput"
    )
    # The command that it runs makes them.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        def add(option: str, about: str, **kwargs: Any) -> None:
            parser.add_argument(option, help=about, **kwargs)

        add("name", "the lock's name, as in cache.lock(NAME)", metavar="NAME")
        wait = 'how long to wait for the lock: 90, 90s, 5m, 1h or "forever"; default: 0'
        add("--wait", wait, metavar="S", type=seconds_or_forever, default=0.0)
        timeout = (
            "lifetime of the lock between two renewals, which is how long others wait after a "
            "crash; default: the setting TIMEOUT. It does not limit the command"
        )
        add("--timeout", timeout, metavar="S", type=seconds)
        hold = "keep the lock taken for at least S seconds, even if the command ends earlier"
        add("--min-hold", hold, metavar="S", type=seconds_or_none, default=0.0)
        replicas = "replicas that must confirm the lock; default: the setting REPLICAS"
        add("--replicas", replicas, metavar="N", type=count_or_none)
        limit = "how many may run at a time across all hosts; default: 1"
        add("--limit", limit, metavar="N", type=int, default=1)
        skip = f"exit code if the lock is taken, 0 to skip quietly; default: {Exit.TAKEN}"
        add("--skip-exit-code", skip, metavar="N", type=exit_code, default=Exit.TAKEN)
        lost = (
            "what happens to the command if its lock is lost: SIGTERM, and after --grace "
            f"seconds SIGKILL, exit code {Exit.LOST} (the default); or only a message"
        )
        add("--on-lost", lost, choices=("terminate", "ignore"), default="terminate")
        grace = "seconds from the loss of the lock until the command is killed; default: 10"
        add("--grace", grace, metavar="S", type=seconds, default=10.0)
        add("--using", "cache alias; default: the setting USING", metavar="ALIAS")
        shell = "run a program; a single argument is a line for /bin/sh"
        add("--shell", shell, action="store_true")
        parser.set_defaults(command=[])
        parser.usage = "%(prog)s NAME [options] -- COMMAND [ARGS ...]"

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: object) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parse = parser.parse_known_args

        def parse_args(args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:
            # The command's options come after "--".
            words = list(sys.argv[2:] if args is None else args)
            at = words.index("--") if "--" in words else len(words)
            parsed: Namespace = namespace or Namespace()
            if rest := parse(words[:at], parsed)[1]:
                parser.error(f"unknown: {' '.join(rest)}. The command to run comes after --")
            parsed.command = words[at + 1 :]
            return parsed

        # Django does not let a command choose the class of its parser.
        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]
        return parser

    def handle(self, *args: object, **options: Any) -> None:
        if not options["command"]:
            raise usage_error("the command to run is missing: run_locked NAME -- COMMAND")
        grace = options["grace"]
        try:
            work: Work = (
                Program(options["command"], grace)
                if options["shell"]
                else ManagementCommand(options["command"], self)
            )
        except PartMissing as missing:
            raise CommandError(f"{missing}.") from None
        _show_lines_at_once()
        with unwinding():
            loss = Loss(self, work, options["name"], options["on_lost"] == "terminate", grace)
            lock = self._lock(work, loss, options)
            with outages_not_logged():
                acquired = self._acquired(lock, options)
            if not acquired:
                return
            loss.hold = lock.local.hold
            code = self._run(lock, work, loss, options)
        if code and getattr(self, "_called_from_command_line", False):
            sys.exit(code)
        if code:
            raise CommandError(f"it ended with exit code {code}", returncode=code)

    def _lock(self, work: Work, loss: Loss, options: Options) -> Lock:
        lifetime: dict[str, object] = {}
        if options["timeout"] is not None:
            lifetime = {"timeout": options["timeout"], "renew": True}
        try:
            options["using"] = options["using"] or Conf().USING
            return lock_cache(options["using"]).command_lock(
                options["name"],
                min_hold=options["min_hold"],
                replicas=options["replicas"],
                limit=options["limit"],
                label=work.label,
                on_lost=loss,
                raise_on_release_error=False,
                **lifetime,
            )
        except (ImproperlyConfigured, TypeError, ValueError) as error:
            raise usage_error(str(error)) from error

    def _acquired(self, lock: Lock, options: Options) -> bool:
        retry = RetryUntil(time.monotonic() + options["wait"])
        try:
            while True:
                try:
                    conflict = self._wait(lock, retry, options)
                    break
                except RedisError as error:
                    pause = retry.pause_after(error)
                    if retry.attempts == 1:
                        why, wait = explained(error).rstrip("."), _for(options["wait"])
                        self._say(f"Redis cannot be reached: {why}. Waiting {wait} …", options)
                    time.sleep(pause)
        except KeyboardInterrupt:
            raise CommandError(
                "interrupted while waiting", returncode=128 + signal.SIGINT
            ) from None
        except RedisError as error:
            raise unavailable(options["name"], error, Exit.UNAVAILABLE) from error
        if conflict is None:
            return True
        code = options["skip_exit_code"]
        if code:
            raise CommandError(f"nothing was run: {conflict.line()}", returncode=code)
        self._say(f"Nothing was run: {conflict.line()}", options)
        return False

    def _wait(self, lock: Lock, retry: RetryUntil, options: Options) -> Conflict | None:
        """Acquire the lock, waiting if `--wait` says so; returns None, or who holds it."""
        if lock.acquire(blocking=False):
            return None
        conflict = Conflict.of(options["name"], lock.held(), options["using"])
        if not options["wait"]:
            return conflict
        self._say(f"{conflict}. Waiting {_for(options['wait'])} …", options)
        began, left = time.monotonic(), retry.left()
        if lock.acquire(blocking=True, blocking_timeout=None if left == math.inf else left):
            waited = time.monotonic() - began
            self._say(f"{options['name']} was acquired after {waited:.1f} s.", options)
            return None
        return Conflict.of(options["name"], lock.held(), options["using"])

    def _run(self, lock: Lock, work: Work, loss: Loss, options: Options) -> int:
        environment = {"REDIS_LOCK_NAME": options["name"], "REDIS_LOCK_FENCE": str(lock.fence)}
        if lock.limit > 1:
            environment["REDIS_LOCK_PLACE"] = str(lock.place)
        try:
            try:
                # A lock renewed at each third of its lifetime has at least two thirds left.
                code = work.run(environment, (lock.timeout or math.inf) / 2)
            finally:
                loss.over.set()
                self._release(lock, options["name"])
        except BaseException as error:
            if not loss.ends_it:
                raise
            if not isinstance(error, (SystemExit, KeyboardInterrupt, CommandError)):
                self.stderr.write(traceback.format_exc())
        if loss.ends_it:
            raise CommandError(
                f"the lock {options['name']} was lost while the command ran ({lock.lost_reason}): "
                "another may have run at the same time",
                returncode=Exit.LOST,
            )
        return code

    def _release(self, lock: Lock, name: str) -> None:
        try:
            lock.__exit__(None, None, None)
        except RedisError as error:
            # The command has run: its exit code must not change.
            self.stderr.write(f"The lock {name} could not be released, and will expire: {error}")

    def _say(self, text: str, options: Options) -> None:
        with suppress(OSError):  # The reader of the pipe is gone.
            if options["verbosity"]:
                self.stderr.write(text, lambda words: words)
                self.stderr.flush()


class Loss:
    """Called in another thread when the lock is lost.

    Attributes:
        hold: what is lost, once it was acquired.
        over: set when the command has ended.
        ends_it: the lock was lost while the command ran, and the command must end.
    """

    hold: Any = None

    def __init__(
        self, command: BaseCommand, work: Work, name: str, terminates: bool, grace: float
    ) -> None:
        self._command, self._work, self._name = command, work, name
        self._terminates, self._grace = terminates, grace
        self.over = threading.Event()
        self.ends_it = False

    def __call__(self) -> None:
        if self.over.is_set():
            return
        self.ends_it = self._terminates
        doing = (
            f"ending {self._work.label}" if self._terminates else "the command continues without it"
        )
        try:
            why = f": {self.hold.reason}" if self.hold else ""
            self._command.stderr.write(f"The lock {self._name} is lost{why}; {doing}.")
            self._command.stderr.flush()
        finally:  # Also if the reader of the pipe is gone.
            if self._terminates:
                self._work.terminate()
                if not self.over.wait(self._grace):
                    self._work.kill()


def _show_lines_at_once() -> None:
    """Write each line at once, also into a pipe or a file."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # It is closed, or no file.
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # None is suppressed


def _for(wait: float) -> str:
    return "forever" if wait == math.inf else f"up to {wait:g} s"
