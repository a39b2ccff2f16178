"""Which process runs which tests, where there are several.

``testpaths`` begins with tests that wait most of their time and ends with those that compute. Half
of the processes take from the beginning and half from the end, so that while some wait, the others
use the cores. Each test function may run in another process, so that none is left with much when
the others end; but a file stays together whose fixtures are made once, and so do those that read
the same sources.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
#: What starts for these is started once.
TOGETHER = "tests/browser/"
#: What a file has that stays together: a fixture for all of it, or something that it remembers.
MADE_ONCE = ('scope="module"', "from functools import cache")
#: What all files have that read the package's sources.
SOURCES = "from tests.support.sources import"


class FromBothEnds(LoadScopeScheduling):
    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid.partition("[")[0])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        assert self.collection is not None
        return {nodeid: number for number, nodeid in enumerate(self.collection)}

    def _assign_work_unit(self, node: Any) -> None:
        from_the_end = self.nodes.index(node) % 2 == 1
        scope, unit = self.workqueue.popitem(last=from_the_end)
        assigned = self.assigned_work[node]
        for done in [each for each, tests in assigned.items() if all(tests.values())]:
            del assigned[done]  # All are counted at the end of each test.
        assigned[scope] = unit
        left = [self._numbers[nodeid] for nodeid, is_done in unit.items() if not is_done]
        node.send_runtest_some(left)


@cache
def _scope(function: str) -> str:
    if function.startswith(TOGETHER):
        return TOGETHER
    file = function.partition("::")[0]
    text = _text(file)
    if SOURCES in text:
        return SOURCES
    return file if any(made in text for made in MADE_ONCE) else function


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text()
