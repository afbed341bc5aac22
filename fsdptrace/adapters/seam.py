"""Modules of PyTorch that fsdptrace waits for (2.6 to 2.15): where ``fully_shard`` is defined, and the state-dict functions.
Imports nothing."""

FULLY_SHARD_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
