"""Long runs with real processes, servers and faults: ``make soak``."""
