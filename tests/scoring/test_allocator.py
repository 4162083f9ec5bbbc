"""Freed memory is kept: large blocks are faulted in once."""

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
import torch
from treepack.scoring.allocator import keep_freed_memory

def faults_of_large_tensors():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.empty(10_000_000).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = faults_of_large_tensors()
assert keep_freed_memory()
for _ in range(3):
    faults_of_large_tensors()  # until what is kept suffices
print(returned, faults_of_large_tensors())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator is left as it is")
def test_large_blocks_are_faulted_in_once() -> None:
    ran = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    returned, kept = map(int, ran.stdout.split())
    assert kept < returned / 10  # which huge pages make small too
