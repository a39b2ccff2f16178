"""The exit codes of the commands, except 0 and those of what they run; most are sysexits.h's."""

from __future__ import annotations

#: ``locks doctor``: there are warnings (with errors it is TROUBLE).
WARNED = 1
#: ``locks --exit-code``: a lock is held; or one with a silent holder, or without an end, is.
HELD, TROUBLE = 1, 3
#: ``locks release``: the lock had passed to another holder, who keeps it.
NOT_OWNER = 1
#: The command line makes no sense; argparse's own.
USAGE = 2
#: Redis could not be asked, or was not fit to keep the lock; nothing has run (EX_UNAVAILABLE).
UNAVAILABLE = 69
#: The lock is held by another; nothing has run (EX_TEMPFAIL: try again later).
TAKEN = 75
#: The lock was lost while the work was being done (EX_PROTOCOL).
LOST = 76
#: There is no such command; as in a shell.
NOT_FOUND = 127
#: The reader of the output has closed it; as in a shell, where SIGPIPE ends a program.
CLOSED = 141
