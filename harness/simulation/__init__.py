"""How well change points are found, on invented histories: ``python -m harness.simulation``."""
