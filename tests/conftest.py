"""For all tests."""

import logging

import pytest

import moesaic  # noqa: F401  before torch, as in every program that uses the engine


@pytest.fixture(autouse=True)
def _default_log_level() -> None:
    """An Engine sets the level of the package's logger for the whole process."""
    logging.getLogger("moesaic").setLevel(logging.NOTSET)
