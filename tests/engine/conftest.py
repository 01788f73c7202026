"""Tiny model folders, built once per session."""

import pytest

from tests.support import tiny_models


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Returns a function: TinyModel -> (transformers model in float32, its saved folder)."""
    built = {}

    def get(tiny):
        if tiny.name not in built:
            folder = tmp_path_factory.mktemp(tiny.name)
            built[tiny.name] = (tiny_models.save(tiny, folder), folder)
        return built[tiny.name]

    return get
