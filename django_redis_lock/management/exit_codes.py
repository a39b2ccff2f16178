"""The exit codes of the commands, mostly those of sysexits.h."""

#: ``locks doctor``: there are warnings (with errors it is TROUBLE).
WARNED = 1
#: ``locks --exit-code``: a lock is held; a holder is silent, or a lock never expires.
HELD, TROUBLE = 1, 3
#: ``locks release``: the lock had passed to another holder, who keeps it.
NOT_OWNER = 1
#: The command line is wrong (argparse's code).
USAGE = 2
#: Redis is down, or too few replicas confirmed the lock; nothing has run (EX_UNAVAILABLE).
UNAVAILABLE = 69
#: Another process holds the lock; nothing has run (EX_TEMPFAIL: try again later).
TAKEN = 75
#: The lock was lost while the command ran (EX_PROTOCOL).
LOST = 76
#: There is no such command (a shell's code).
NOT_FOUND = 127
#: The reader closed the output (a shell's code for SIGPIPE).
CLOSED = 141
