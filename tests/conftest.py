"""Fixtures for tests of any folder."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The folder of the demo model in the user's cache; `scripts/test` has put it there before pytest starts."""
    from kvctl.engine.model_source import resolve_model

    return resolve_model(None).folder
