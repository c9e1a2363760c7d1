"""Model section of the TOML. In: `[model]`. Out: ModelConfig. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gyre.core.config import Section

# Beyond any model; what passes them is a mistake, or made to take memory and time.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 1024, 1 << 12, 1 << 20
MOST_VOCAB, MOST_CONTEXT = 1 << 26, 1 << 31


class ShapeConfig(Section):
    """Shape of a new, randomly initialized model; its vocabulary comes from the tokenizer."""

    family: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """Which architecture."""
    hidden_size: int = Field(
        default=256, ge=8, le=MOST_WIDTH, description="Width of the residual stream."
    )
    num_layers: int = Field(default=4, ge=1, le=MOST_LAYERS, description="Decoder layers.")
    num_heads: int = Field(
        default=4, ge=1, le=MOST_HEADS, description="Query heads; a multiple of num_kv_heads."
    )
    num_kv_heads: int = Field(default=2, ge=1, le=MOST_HEADS, description="Key and value heads.")
    head_dim: int = Field(
        default=64, ge=2, le=MOST_WIDTH, multiple_of=2, description="Width of one head; even."
    )
    mlp_size: int = Field(default=768, ge=1, le=MOST_WIDTH, description="Width of the gated MLP.")
    tied: bool = Field(default=True, description="Whether the output head is the embedding.")
    vocab_size: int = Field(
        default=0,
        ge=0,
        le=MOST_VOCAB,
        description="Rows of the embedding; 0 takes the tokenizer's entries.",
    )
    context_tokens: int = Field(
        default=2048,
        ge=2,
        le=MOST_CONTEXT,
        description="Longest sequence, prompt and completion, in tokens.",
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary embedding.")


class ModelConfig(Section):
    """Selects a checkpoint (`path`) or a new model (`shape`). Exactly one of them."""

    path: str | None = None
    """Folder in hub layout, or a hub name such as "Qwen/Qwen3-0.6B"."""
    shape: ShapeConfig | None = None
    """Shape of a fresh random model."""
    init_seed: int = Field(default=0, ge=0, description="Seed of a fresh model's weights.")

    @model_validator(mode="after")
    def check_one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.shape is None):
            raise ValueError(
                '[model] needs either path = "FOLDER or hub name" or a table [model.shape], not '
                "both"
            )
        return self
