"""Config of the tokenizer. In: the `[tokenizer]` table. Out: a TokenizerConfig."""

from __future__ import annotations

from pydantic import Field

from gyre.core.config import Section


class TokenizerConfig(Section):
    """A tokenizer of a hub folder, or one trained on the run's own data."""

    path: str = ""
    """Local hub-format folder or hub name; empty: the model's own, or trained when the model starts
    from a shape."""

    end_token: str = ""
    """Token that ends a turn, in examples, rollouts and chat: one entry of the vocabulary, such as
    "<|im_end|>". Empty: the one that the chat template writes after an assistant's turn, else
    eos_token. The other end tokens stop too."""

    vocab_size: int = Field(default=512, ge=270)
    """Entries at most when trained: specials, 256 bytes and merges. Fewer when nothing else is
    worth merging."""

    num_texts: int = Field(default=2000, ge=1)
    """Rendered training examples that it is trained on."""

    min_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """A merge must occur at least this many times per text, so that boilerplate merges and rare
    content does not."""
