"""The test project with commands that do what the tests of ``run_locked`` tell them."""
