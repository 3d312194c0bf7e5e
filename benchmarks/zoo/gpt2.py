"""GPT-2 of Hugging Face, with labels, so that the loss is part of the output."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from zoo.example import Example, Size

__all__ = ["build", "build_without_dropout", "make"]

# layers, width, heads, vocabulary, batch, sequence
_SIZES = {
    "tiny": (2, 32, 2, 64, 4, 24),
    "peers": (12, 192, 6, 2000, 4, 128),
    "medium": (12, 192, 6, 2000, 4, 128),
}


def build(size: Size, dropout: float = 0.1) -> Example:
    """Build with dropout wherever GPT-2 has one."""
    return make("gpt2" if dropout else "gpt2-no-dropout", _SIZES[size], dropout)


def build_without_dropout(size: Size) -> Example:
    """Build the deterministic one."""
    return build(size, dropout=0.0)


def make(name: str, setting: tuple[int, int, int, int, int, int], dropout: float = 0.1) -> Example:
    """Build of these layers, width, heads, vocabulary, batch and sequence."""
    layers, width, heads, vocabulary, batch, sequence = setting
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=sequence,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers derives none from this class's name, and warns
    tokens = torch.randint(vocabulary, (batch, sequence))
    return Example(name, model, (tokens,), {"labels": tokens}, lambda output: output.loss)
