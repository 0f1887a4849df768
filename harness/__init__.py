"""Measures eager PyTorch, what experts do by hand, and Kitsune side by side; keeps, judges and draws the results."""
