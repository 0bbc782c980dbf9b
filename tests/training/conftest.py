"""Training runs of the tests draw no charts."""

import pytest

from tests.support.charts import without_charts


@pytest.fixture(autouse=True, scope="module")
def no_charts():
    with without_charts():
        yield
