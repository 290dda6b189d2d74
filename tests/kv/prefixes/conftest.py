from __future__ import annotations

import pytest

from tests.kv.prefixes.saved import Saved


@pytest.fixture
def saved(tmp_path):
    return Saved(tmp_path)
