"""For all tests."""

import moesaic  # noqa: F401  before torch, as in every program that uses the engine
