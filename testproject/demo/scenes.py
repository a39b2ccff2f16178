"""The scenes of the demo, with the words that go with them."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.management.base import CommandError

from testproject.demo.line import WaitQueue, line
from testproject.demo.screen import Screen
from testproject.demo.stampede import stampede
from testproject.demo.team import Team

__all__ = ["show_line", "show_stampede"]

PLAIN, OURS = "django-redis", "django_redis_lock"


def show_stampede(team: Team, screen: Screen) -> None:
    size = len(team.numbers)
    screen.heading(f"1. A cached report has expired, and {size} processes ask for it at once")
    screen.say(f"{PLAIN}: cache.get_or_set(...)")
    plain = stampede(team, screen, "plain")
    screen.say(f"{OURS}: the same call, with another BACKEND")
    ours = stampede(team, screen, "default")
    screen.table(
        ("", PLAIN, OURS),
        (
            ("Computations", str(plain.computations), str(ours.computations)),
            ("Slowest answer", _seconds(plain.slowest), _seconds(ours.slowest)),
            ("Mean answer", _seconds(plain.mean), _seconds(ours.mean)),
            ("Processor time", _seconds(plain.processor), _seconds(ours.processor)),
            ("Load saved", "-", f"{1 - ours.processor / plain.processor:.0%}"),
        ),
    )
    words = f"computed {_times(ours.computations)}, with {PLAIN} {_times(plain.computations)}"
    _report([(ours.computations == 1, words)], screen)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def show_line(team: Team, screen: Screen) -> None:
    size = len(team.numbers)
    screen.heading(f"2. One lock, and {size} processes that want it")
    screen.say("They come one after the other while it is held; then it is released.")
    result = line(team, screen)
    opened = result.served[0].entered
    screen.table(
        ("Order", "Arrived", "Served", "Waited", "At work", "Fence"),
        (
            (
                str(place),
                f"process {arrival.number}",
                f"process {served.number}",
                f"{served.waited:.2f} s",
                f"{served.entered - opened:.3f} to {served.left - opened:.3f} s",
                str(served.fence),
            )
            for place, (arrival, served) in enumerate(
                zip(result.arrivals, result.served, strict=True), 1
            )
        ),
    )
    _judge(result, size, screen)


def _judge(result: WaitQueue, size: int, screen: Screen) -> None:
    findings = (
        (result.in_order, "served in order of arrival"),
        (
            result.overlaps == 0 and result.most_inside == 1,
            "one at a time: each process entered after the previous one had left (Redis's clock)",
        ),
        (
            result.shared == size,
            f"no update lost: a counter that all read, then wrote, went from 0 to {size}",
        ),
        (result.fences_rise, "each fencing token is higher than the one before"),
    )
    _report(findings, screen)


def _report(findings: Sequence[tuple[bool, str]], screen: Screen) -> None:
    """Say in words what was to be seen, and fail if it was not."""
    for is_so, words in findings:
        verdict, style = ("PASS", "") if is_so else ("FAIL", "bold red")
        screen.say(f"{verdict}  {words}", style=style, indent=6)
    if not all(is_so for is_so, _ in findings):
        raise CommandError("The package has not kept its promise; see above.")
