"""Settings of every test run: one thread, since the tensors are tiny, and examples that repeat from run to run."""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # a warning at import is an error here

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
