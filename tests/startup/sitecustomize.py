"""Python imports this as it starts, in the processes that tests start: see ``processes.STARTUP``.

As it ends it would look for garbage among all that Django is made of, which takes a third of the
processor time of such a process. It does so only where a test is about the end (``WHOLE_END``).
"""

import atexit
import gc
import os

if "WHOLE_END" not in os.environ:
    atexit.register(gc.freeze)
