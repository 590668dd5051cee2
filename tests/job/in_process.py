"""The command in this process, for tests that run it often."""

import pytest

from k2convert.cli.app import main


def run(*words: object) -> int:
    """Run the command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code
