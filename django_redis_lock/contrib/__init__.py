"""The optional parts. Nothing of the core imports them; see ``extension``."""
