"""The model of the lock protocol: a brief look. ``make model`` takes its time."""

from __future__ import annotations

import pytest

from tests.model.checker import BRIEF, MISTAKES, check, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing()),
        reason=f"The model of the protocol is not checked without {' and '.join(missing())} "
        "(Debian: apt-get install spin gcc libc6-dev)",
    ),
]


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize("macros", BRIEF)
def test_no_run_breaks_the_protocols_word(macros: str) -> None:
    outcome = check(macros)
    assert not outcome.error
    assert outcome.states > 10_000, "that cannot have been all"


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "macros",
    [
        *("KEEP_LIST", "NO_FAREWELL", "PROMPT FAULTS=1 NO_WATCH", "PROMPT FAULTS=1 FORGET_OWN"),
        *("PLACES NO_TAKE_BACK", "PLACES TAKE_BACK_AT_ONCE", "PLACES VOID_ALL"),
        *("PLACES WATCH_FIRST", "PLACES TAKE_ANY"),
    ],
)
def test_a_mistake_is_found(macros: str) -> None:
    assert macros in MISTAKES
    assert check(macros).error
