"""How many pages fit: the KV cache as a share of the device's memory."""

from __future__ import annotations

import dataclasses

from isomodel import device_memory
from isomodel.config import ModelConfig
from isomodel.device_memory import OutOfDeviceMemory, amount
from isomodel.numerics import Numerics
from isomodel.rollout import programs
from isomodel.rollout.engine_config import EngineConfig


def sized(config: EngineConfig, cfg: ModelConfig, numerics: Numerics) -> EngineConfig:
    """The config with memory_fraction turned into kv_memory, once the weights are on the device.

    Compiles the largest programs once more, for the scratch that they take.

    Raises:
      OutOfDeviceMemory: not even one sample of max_model_len fits, or the device does not tell its memory.
    """
    if config.memory_fraction is None:
        return config
    memory = device_memory.device_memory()
    if memory is None:
        raise OutOfDeviceMemory(
            f"engine: memory_fraction={config.memory_fraction} needs a device that tells its memory, and this one (a CPU, it "
            "seems) does not; set kv_memory"
        )
    open_config = dataclasses.replace(config, memory_fraction=None)
    one = dataclasses.replace(open_config, max_seqs=1, seq_buckets=None).resolve(cfg, numerics.dtype).num_pages
    least = one * config.page_bytes(cfg, numerics.dtype)
    small = dataclasses.replace(open_config, num_pages=one).resolve(cfg, numerics.dtype)
    scratch = programs.scratch_bytes(cfg, numerics, programs.Shapes.of(small), small.token_buckets[-1], small.seq_buckets[-1])
    share = int(config.memory_fraction * memory.limit)
    left = share - memory.in_use - scratch - config.reserved_memory
    if left < least:
        raise OutOfDeviceMemory(
            f"engine: memory_fraction={config.memory_fraction} of {amount(memory.limit)} on {memory.device} is {amount(share)}; "
            f"{amount(memory.in_use)} are in use (the weights), programs need {amount(scratch)} of scratch, "
            f"{amount(config.reserved_memory)} are reserved, and one sample of {config.max_model_len or 'max_model_len'} tokens needs "
            f"{amount(least)} of KV cache: raise memory_fraction, or lower max_model_len, chunk_tokens or max_seqs"
        )
    return dataclasses.replace(open_config, kv_memory=left)
