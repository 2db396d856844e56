"""The rollout engine: paged keys and values, continuous batching, sampling with the contract's log-probabilities."""

from isomodel.rollout.engine import Engine, PromptsRefused
from isomodel.rollout.engine_config import EngineConfig
from isomodel.rollout.outputs import Completion, EngineStats
from isomodel.rollout.pages import PagePool
from isomodel.rollout.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "EngineStats", "PagePool", "PromptsRefused", "SamplingParams"]
