"""A text of token ids that no tokenizer made."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def k2_cut(cut: Path) -> Path:
    return cut


@pytest.fixture(scope="session")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four windows of 32 token ids."""
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, (4, 32)))
    return path
