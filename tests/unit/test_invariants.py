"""Each invariant has a test that runs each time."""

from __future__ import annotations

from tests.invariants import by_invariant, invariants


def test_each_invariant_has_a_test() -> None:
    assert len(invariants()) >= 27
    assert set(by_invariant()) == set(invariants())
