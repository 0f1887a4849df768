"""How often the harness errs on this machine: ``python -m harness.selftest``."""
