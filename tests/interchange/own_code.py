"""Networks that transformers needs our code for, and the modules of that code."""

import pytest

from tests.helpers import together
from tests.interchange.exported import EXPORTED

ALL_EXPORTED = together(EXPORTED)


@pytest.fixture(scope="module", autouse=True)
def modules_of_their_own(tmp_path_factory):
    """Give transformers a folder of its own for the modeling files that it has read."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield
