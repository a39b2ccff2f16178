"""A model of the lock protocol, for the checker spin."""
