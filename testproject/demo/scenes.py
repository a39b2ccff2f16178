"""The scenes of the demo, with the words that go with them."""

from __future__ import annotations

from django.core.management.base import CommandError

from testproject.demo.line import Line, line
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
    screen.say(
        f"{PLAIN} computed the report {_times(plain.computations)}, "
        f"{OURS} {_times(ours.computations)}."
    )
    if ours.computations != 1:
        raise CommandError(f"{OURS} was to compute the report once.")


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
        ("Place", "Arrived", "Served", "Waited", "At work", "Fence"),
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


def _judge(result: Line, size: int, screen: Screen) -> None:
    """Say in words what was to be seen, and fail if it was not."""
    findings = (
        (result.in_order, "The order of service is the order of arrival."),
        (
            result.overlaps == 0 and result.most_inside == 1,
            "No two were at work at once: each entered after the one before it had left, by the "
            "clock of Redis.",
        ),
        (
            result.shared == size,
            f"A number they all read, and wrote back one higher, went from 0 to {size}: no "
            "addition was lost.",
        ),
        (result.fences_rise, "Every fence is higher than the one before."),
    )
    for is_so, words in findings:
        verdict, style = ("yes", "") if is_so else ("NO!", "bold red")
        screen.say(f"{verdict}  {words}", style=style, indent=5)
    if not all(is_so for is_so, _ in findings):
        raise CommandError("The lock has not kept its promise; see above.")
