"""Which process runs which tests, where there are several.

``testpaths`` begins with tests that wait most of their time and ends with those that compute. Half
of the processes take from the beginning and half from the end, so that while some wait, the others
use the cores. What is long is split, so that no process is left with much when the others end.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from xdist.scheduler import LoadScopeScheduling

#: Folders of which each test function may run in another process; elsewhere a file stays together.
SPLIT = ("tests/faults/", "tests/integration/locks/", "tests/integration/topologies/")
#: What starts for these is started once.
TOGETHER = "tests/browser/"


class FromBothEnds(LoadScopeScheduling):
    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(TOGETHER):
            return TOGETHER
        return nodeid.partition("[" if nodeid.startswith(SPLIT) else "::")[0]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        assert self.collection is not None
        return {nodeid: number for number, nodeid in enumerate(self.collection)}

    def _assign_work_unit(self, node: Any) -> None:
        from_the_end = self.nodes.index(node) % 2 == 1
        scope, unit = self.workqueue.popitem(last=from_the_end)
        self.assigned_work[node][scope] = unit
        left = [self._numbers[nodeid] for nodeid, is_done in unit.items() if not is_done]
        node.send_runtest_some(left)
