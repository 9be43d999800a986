"""Test the log of an evaluation."""

import pytest

from configs.schema import UserError
from evaluation.item_log import ItemLog


def test_an_unwritable_folder_and_a_damaged_log_have_different_errors(tmp_path):
    (tmp_path / "file").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"file/log cannot be written .*; give --out=FOLDER"):
        ItemLog(tmp_path / "file" / "log", {})
    with pytest.raises(UserError, match=r"file cannot be continued .*; remove it"):
        ItemLog(tmp_path / "file", {})
