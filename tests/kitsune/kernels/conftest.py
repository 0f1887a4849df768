"""Which tests of kernels are long."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the CPU kernels are interpreted: what float16 does there, bfloat16 does as well, in the same code."""
    for item in items:
        of_kernels = item.path.parent.name == "kernels" and not item.get_closest_marker("gpu")
        if of_kernels and "float16" in item.name and "bfloat16" not in item.name:
            item.add_marker(pytest.mark.slow)
