"""ModelConfig: the shape of a model, read from and written to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its weights and its forward depend on. Sizes in elements."""

    family: str  # "qwen3" or "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    qk_norm: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def groups(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads
