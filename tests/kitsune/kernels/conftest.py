"""Which tests of kernels are long."""

import pytest

LONG = (
    "test_a_second_gradient_is_added",
    "test_join_backward",
    "test_masks_that_are_computed",
    "test_rounds_to_the_dtype_when_it_reads",
    "test_sums_are_finished_without_a_launch",
    "test_the_operator_on_the_cpu",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the CPU kernels are interpreted, which is slow: half precision, and more, is for long runs and for GPUs."""
    for item in items:
        of_kernels = item.path.parent.name == "kernels" and not item.get_closest_marker("gpu")
        if of_kernels and ("float16" in item.name or item.name.startswith(LONG)):
            item.add_marker(pytest.mark.slow)
