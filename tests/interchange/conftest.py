"""Keep the modules that transformers reads from an export apart from those of the user."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def modules_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give transformers a folder of its own for the modeling files that it has read."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield
