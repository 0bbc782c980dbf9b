"""A good export, and copies of it that a test changes."""

import pytest

from tests.support.charts import without_charts
from tests.support.drafts import changed_copy, write_draft


@pytest.fixture(autouse=True, scope="module")
def no_charts():
    with without_charts():
        yield


@pytest.fixture(scope="package")
def ours(tmp_path_factory):
    return write_draft(tmp_path_factory.mktemp("ours") / "export")


@pytest.fixture
def published(ours, tmp_path):
    """A function that copies `ours`, or another folder, and changes it into what somebody else would write."""

    def make(change_config=None, change_tensors=None, source=ours):
        return changed_copy(source, tmp_path / "published", change_tensors, change_config)

    return make
