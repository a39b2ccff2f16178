"""The package measured side by side with its peers: ``python -m benchmarks``.

Every figure comes with its peers' from the same run: absolute ones say more about the machine than
about the code.
"""
