import pytest
from hypothesis import settings

# The same examples in every run, and no deadline: a first call into torch takes longer than hypothesis allows.
settings.register_profile("ddtree_check", deadline=None, derandomize=True)
settings.load_profile("ddtree_check")


@pytest.fixture(autouse=True)
def no_width(monkeypatch):
    """Views are as wide as their text unless a test asks for a width; a worker of pytest-xdist has one."""
    monkeypatch.delenv("COLUMNS", raising=False)
