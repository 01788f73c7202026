"""Triton kernels run in its interpreter here: the switch must be set before any module with kernels is imported.

Tests of ahead-of-time compilation need it unset and therefore run in processes of their own.
"""

import os
import warnings

import pytest

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> object:
    # numpy warns of inf - inf and of casts that CUDA does silently; the results are what the tests look at.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield
