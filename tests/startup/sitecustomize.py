"""Python imports this as it starts, in the processes that tests start: see ``processes.STARTUP``.

As it ends it would look for garbage among all that Django is made of, which takes a third of the
processor time of such a process. It does so only where a test is about the end (``WHOLE_END``).

redis-py imports OpenTelemetry's metrics wherever they are installed, for metrics that no test turns
on. That takes a fifth to two fifths of the time in which such a process starts, so they are hidden;
``processes``, which tests import, lets them be found again.
"""

import atexit
import gc
import os
import sys

if "WHOLE_END" not in os.environ:
    atexit.register(gc.freeze)

sys.modules.setdefault("opentelemetry.sdk.metrics", None)
