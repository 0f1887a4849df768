"""Which tests of kernels are long."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the CPU kernels are interpreted, which is slow: half precision is for the long runs, and for GPUs."""
    for item in items:
        of_kernels = item.path.parent.name == "kernels" and not item.get_closest_marker("gpu")
        if of_kernels and "float16" in item.name:
            item.add_marker(pytest.mark.slow)
