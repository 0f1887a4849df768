"""What the tests of the workloads share."""

import pytest

import models


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A workload that can be built here."""
    reason = models.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)
