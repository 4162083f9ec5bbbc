"""FSDP2 on a CPU: accelerate has it for accelerators alone and would fall back to DDP without a word."""

import os

from accelerate import state
from accelerate.utils import DistributedType

FSDP_ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def use_fsdp():
    """From now on accelerators of this process shard with FSDP2. Check `distributed_type` all the same."""
    os.environ.update(FSDP_ENVIRONMENT)
    construct = state.AcceleratorState.__init__

    def construct_sharded(self, *args, fsdp_plugin=None, **kwargs):
        construct(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = construct_sharded
