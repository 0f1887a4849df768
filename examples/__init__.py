"""Training scripts that use Kitsune. Each runs from the checkout: `python -m examples.mnist --help`."""
