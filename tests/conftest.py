"""Fixtures and settings of the whole suite.

Triton reads its interpreter switch while it is imported, and any test may import it (torch does): so it is set here,
before all of them, on machines with a GPU too: the tests compute on CPU tensors. scripts/gpu_check.py is for GPUs.
"""

import os
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The folder of the demo model in the user's cache; `scripts/test` has put it there before pytest starts."""
    from kvctl.engine.model_source import resolve_model

    return resolve_model(None).folder
