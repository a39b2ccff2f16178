"""Check the models of the lock protocol, ``lock.pml`` and, of a lock with a limit, ``places.pml``:
``make model``.

Without arguments all of it is checked: first that no run breaks the protocol's word, then that
each mistake a model can be given is found. With arguments, a model is checked with just these
macros (``PLACES`` chooses the second), and a shortest run that breaks it is shown, with the state
after each step::

    make model ARGS="PROMPT NO_WATCH"

It needs spin and gcc (Debian: ``apt-get install spin gcc libc6-dev``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["BRIEF", "MISTAKES", "THOROUGH", "Outcome", "check", "missing"]

MODEL, PLACES = (Path(__file__).with_name(name) for name in ("lock.pml", "places.pml"))

#: The macros of each check, as words.
THOROUGH = (
    "",
    "CHOSEN",
    "PROMPT FAULTS=2 ROUNDS=2",
    "PROMPT FAULTS=3 ROUNDS=1",
    "PROMPT CHOSEN FAULTS=1 ROUNDS=2",
    "PLACES FAULTS=2",
    "PLACES FAULTS=1 CLIENTS=4",
)
#: The same in seconds, for the test suite.
BRIEF = ("LIFETIME=2 GRANT_TIMEOUT=2 FRESH=1", "PROMPT FAULTS=1 ROUNDS=1", "PLACES FAULTS=1")

#: What could be done wrong, and what it would mean.
MISTAKES = {
    "KEEP_LIST": "a fresh SET leaves an older grant on the list",
    "BELIEVE_STALE": "a grant is believed however old it is",
    "DEADLINE_FROM_ANSWER": "a deadline is reckoned from the answer",
    "RELEASE_ANY": "RELEASE does not look whose lock it is",
    "TAKE_ANY": "TAKE_GRANT does not look whether the grant still counts",
    "WATCH_BLINDLY": "WATCH makes a grant although the lock is held",
    "GRANT_OLD_FENCE": "a grant is given no fence of its own",
    "NO_FAREWELL": "whoever leaves does not look what the pop was answered",
    "PROMPT FAULTS=1 NO_WATCH": "nobody looks whether the holder has vanished",
    "PROMPT FAULTS=1 REGISTER_APART": "asking and registering are two steps",
    "PROMPT FAULTS=1 FORGET_OWN": "ACQUIRE, sent again, does not know its own token",
    "PROMPT FAULTS=1 FORGET_GRANT": "a grant asked about without an answer is not given back",
    "PROMPT CHOSEN FAULTS=1 FORGET_GRANT": "and TAKE_GRANT does not note whose attempt it is",
    "PROMPT FAULTS=1 NO_CLEANUP": "nobody releases what an unheard ACQUIRE got",
    "PROMPT FAULTS=1 SEE_NO_OWN_GRANT": "a keeper does not see its own grants lying about",
    "PROMPT FAULTS=1 AWAIT_SILENCE": "after a last try that won, a dead pop is waited for",
    "PROMPT FAULTS=1 LOOK_LATE": "who waits relies on companion keys until the lifetime is over",
    "PROMPT FAULTS=1 RELEASE_NEEDS_MEMORY": "RELEASE is refused when Redis is out of memory",
    "PROMPT FAULTS=1 RESET_ANY": "RESET, sent again, ends the next holder's lock",
    "PROMPT FAULTS=1 TAKE_BOTH": "after a last try that won, a late grant is taken and dropped",
    "PLACES NO_TAKE_BACK": "a grant without a waiter stays on the list",
    "PLACES TAKE_BACK_AT_ONCE": "grants are taken back although others wait",
    "PLACES VOID_ALL": "a fresh SET at one place deletes the grants of the other",
    "PLACES KEEP_GRANTS": "a fresh SET leaves the place's grant on the list",
    "PLACES GRANT_WITHOUT_PLACE": "a grant does not say for which place it is",
    "PLACES WATCH_FIRST": "the keeper watches the first place only",
    "PLACES TAKE_ANY": "TAKE_GRANT does not look whether the grant still counts",
    "PLACES REGISTER_APART": "asking and registering are two steps",
    "PLACES RELEASE_ANY": "RELEASE does not look whose place it is",
    "PLACES FORGET_OWN": "ACQUIRE, sent again, takes a second place",
    "PLACES NO_FIND": "RELEASE of an unknown place looks at the first one only",
    "PLACES FORGET_GRANT": "a client that leaves keeps the grant that came all the same",
}


class Outcome(NamedTuple):
    """What spin says.

    Attributes:
        error: the assertion a run breaks, or how it gets stuck; empty if none does.
        trail: how it is after each step of a shortest such run, if asked for.
    """

    error: str
    states: int
    seconds: float
    megabytes: float
    trail: str = ""


def missing() -> list[str]:
    """The programs that are needed and not there."""
    return [name for name in ("spin", "gcc") if shutil.which(name) is None]


def check(macros: str = "", *, optimise: bool = False, trail: bool = False) -> Outcome:
    """Look at every state of the model; with the macro PLACES, of that of a lock with a limit.

    Args:
        macros: separated by spaces, each with a value (``FAULTS=1``) or without.
        optimise: spend more time on compiling the checker; it pays for millions of states.
        trail: also tell how an error comes about.

    Raises:
        RuntimeError: the check could not be carried out, or not to its end.
    """
    model = PLACES if "PLACES" in macros.split() else MODEL
    defines = [f"-D{macro}" for macro in macros.split() if macro != "PLACES"]
    if trail:
        defines.append("-DTELL_CLIENTS_APART")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model, folder)

        def run(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder, check=False, capture_output=True, text=True, errors="replace"
            )
            said = done.stdout + done.stderr
            if done.returncode and "assertion violated" not in said:
                raise RuntimeError(f"{' '.join(command)} failed:\n{said[-2000:]}")
            return said

        run("spin", "-a", *defines, model.name)
        # Breadth first, so that what goes wrong is shown in as few steps as possible.
        options = ("-DBFS", "-DCOLLAPSE", "-DSAFETY", "-DNOREDUCE", "-DMEMLIM=4000")
        run("gcc", "-O1" if optimise else "-O0", "-w", *options, "-o", "pan", "pan.c")
        said = run("./pan")
        outcome = _read(said)
        if trail and outcome.error:
            steps, _, _ = run("spin", "-t", "-T", *defines, model.name).partition("spin: trail")
            outcome = outcome._replace(trail=_readable(steps))
        return outcome


def _read(said: str) -> Outcome:
    def number(pattern: str) -> float:
        found = re.search(pattern, said)
        return float(found[1]) if found else 0.0

    error = re.search(r"pan:\d+: (.*) \(at depth", said)
    whole = "Search not completed" not in said and "errors: 0" in said
    if error is None and not whole:
        raise RuntimeError(f"the check was not carried out to its end:\n{said[-2000:]}")
    return Outcome(
        error[1] if error else "",
        int(number(r"(\d+) states, stored")),
        number(r"elapsed time ([\d.]+) seconds"),
        number(r"([\d.]+)\s+total actual memory usage"),
    )


def _readable(steps: str) -> str:
    steps = re.sub(r"^By 4:", "Time, server or network:", steps, flags=re.MULTILINE)
    return re.sub(r"^By (\d):", r"Client \1:", steps, flags=re.MULTILINE)


def main(macros: list[str]) -> int:
    if absent := missing():
        print(f"These programs are needed and not there: {', '.join(absent)}", file=sys.stderr)
        return 2
    if macros:
        outcome = check(" ".join(macros))
        if outcome.error:
            print(check(" ".join(macros), trail=True).trail)
        else:
            print(f"{outcome.states:,} states, and nothing wrong in any")
        return bool(outcome.error)
    failures = 0
    print("The protocol as it is meant to be")
    for each in THOROUGH:
        outcome = check(each, optimise=True)
        figures = f"{outcome.states:>10,} states {outcome.megabytes:>6,.0f} MB"
        print(f"  {each or 'at any pace':36} {figures} {outcome.seconds:>5.0f} s {outcome.error}")
        failures += bool(outcome.error)
    print("With a mistake in it")
    for each, meaning in MISTAKES.items():
        outcome = check(each)
        found = "found" if outcome.error else "NOT FOUND"
        print(f"  {each:36} {found:9} {meaning}")
        failures += not outcome.error
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
