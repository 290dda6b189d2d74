"""The model that these tests share."""

from tests.api.conftest import model  # noqa: F401 - a fixture
