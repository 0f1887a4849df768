"""Which tests of kernels are long."""

import pytest


LONG = ("test_a_second_gradient_is_added", "test_masks_that_are_computed", "test_join_backward")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the CPU kernels are interpreted, which is slow: half precision and some more is for long runs, and for GPUs."""
    for item in items:
        of_kernels = item.path.parent.name == "kernels" and not item.get_closest_marker("gpu")
        if of_kernels and ("float16" in item.name or item.name.startswith(LONG)):
            item.add_marker(pytest.mark.slow)
