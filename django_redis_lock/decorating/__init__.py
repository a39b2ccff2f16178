"""What ``locked()`` is made of; ``decorators`` puts it together."""
