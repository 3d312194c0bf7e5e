"""T5 of Hugging Face: encoder, decoder, and one embedding matrix used three times."""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

from zoo.example import Example, Size

__all__ = ["build"]

# layers of each half, width, heads, vocabulary, batch, sequence
_SIZES = {"tiny": (2, 32, 2, 64, 6, 24), "medium": (6, 192, 6, 2000, 8, 96)}


def build(size: Size) -> Example:
    """Build with dropout and tied weights."""
    layers, width, heads, vocabulary, batch, sequence = _SIZES[size]
    config = T5Config(
        num_layers=layers, d_model=width, num_heads=heads, d_kv=width // heads, d_ff=4 * width,
        vocab_size=vocabulary, dropout_rate=0.1, tie_word_embeddings=True, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, vocabulary, (batch, sequence))
    labels = torch.randint(1, vocabulary, (batch, sequence // 2))
    model = T5ForConditionalGeneration(config)
    return Example(
        "t5", model, (), {"input_ids": tokens, "labels": labels}, lambda output: output.loss
    )
