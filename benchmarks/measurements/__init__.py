"""One measurement a module; each has ``measure(bench)``, which gives one or more results."""
