"""Test that the diffs in docs/extending.md apply to the present code."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


def test_there_is_a_diff_for_each_kind_of_addition():
    assert len(DIFFS) == PAGE.count("\n## ") == 7


@pytest.mark.parametrize("diff", DIFFS, ids=range(len(DIFFS)))
def test_every_diff_applies(diff):
    done = subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=diff, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
