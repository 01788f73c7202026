"""The kernels under test: plain torch, the native ones for this CPU, and their portable builds."""

import functools
import platform
import shutil

import pytest
import torch

from kvctl_kernels.cpu_build import compile_to, load_native, open_library
from kvctl_kernels.cpu_linear import NativeLinears
from kvctl_kernels.cpu_ops import NativeCpuOps
from kvctl_kernels.reference import TorchOps

# Other instruction sets than this CPU's own, so that their code paths run too.
PORTABLE = {"avx2": "-march=x86-64-v3", "generic": "-march=x86-64"} if platform.machine() == "x86_64" else {}
NATIVE_BUILDS = ("native", *PORTABLE)


@pytest.fixture(scope="session")
def native_library(tmp_path_factory):
    @functools.cache
    def get(build):
        if build == "native":
            return load_native()
        path = tmp_path_factory.mktemp("native") / f"{build}.so"
        compile_to(path, shutil.which("c++"), PORTABLE[build])
        return open_library(path)

    return get


@pytest.fixture(scope="session")
def make_ops(native_library):
    """(name, dtype, num_threads) -> Ops."""

    def make(name, dtype, num_threads=2):
        return TorchOps() if name == "torch" else NativeCpuOps(native_library(name), dtype, num_threads)

    return make


@pytest.fixture(scope="session")
def make_linears(native_library):
    return lambda name, num_threads=2: NativeLinears(native_library(name), num_threads)


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
