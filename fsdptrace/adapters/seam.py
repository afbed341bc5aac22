"""Where ``fully_shard`` is defined (2.6 to 2.15): the module that zero-code recording waits for. Imports nothing."""

FULLY_SHARD_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
