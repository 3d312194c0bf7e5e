"""A Llama of Hugging Face with a real vocabulary, small otherwise, with labels."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zoo.example import Example, Size

__all__ = ["build"]

# layers, width, heads, vocabulary, batch, sequence
_SIZES = {
    "tiny": (2, 32, 2, 64, 2, 16),
    "peers": (6, 256, 4, 32000, 2, 128),
    "medium": (6, 256, 4, 32000, 2, 128),
}


def build(size: Size) -> Example:
    """Build one with rotary embeddings and gated activations."""
    layers, width, heads, vocabulary, batch, sequence = _SIZES[size]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=3 * width, vocab_size=vocabulary, max_position_embeddings=sequence,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.randint(vocabulary, (batch, sequence))
    return Example("llama", model, (tokens,), {"labels": tokens}, lambda output: output.loss)
