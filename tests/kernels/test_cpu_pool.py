"""The thread pool under the native kernels: any number of threads, several callers, a fork."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import torch


def products(linear, inputs, times):
    return [linear(inputs[i % len(inputs)]) for i in range(times)]


def test_more_threads_than_cores_or_tasks_compute_the_same(make_linears):
    weight, x = torch.randn(100, 64), torch.randn(5, 64)
    want = make_linears("native", 1).pack(weight, None)(x)
    for num_threads in (2, 3, 8, 61):
        linear = make_linears("native", num_threads).pack(weight, None)
        for _ in range(50):
            assert torch.equal(linear(x), want)


def test_callers_in_several_threads_do_not_disturb_each_other(make_linears):
    linear = make_linears("native", 2).pack(torch.randn(3000, 64), None)
    inputs = [torch.randn(rows, 64) for rows in (1, 5, 40)]
    want = products(linear, inputs, 3)
    wrong = []

    def work():
        for i, got in enumerate(products(linear, inputs, 60)):
            if not torch.equal(got, want[i % 3]):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORK = """
import os, torch
from kvctl_kernels.cpu_build import load_native
from kvctl_kernels.cpu_linear import NativeLinears
linear = NativeLinears(load_native(), 2).pack(torch.eye(512), None)
x = torch.randn(3, 512)
assert torch.equal(linear(x), x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(linear(x), x) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(linear(x), x)
"""


def test_a_forked_child_computes_without_the_parents_threads():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], env=environment, check=True, timeout=60)
