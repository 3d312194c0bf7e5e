"""Models whose steps differ: layers left out by chance, loops over data, experts, other heads.

Each is tiny and in training mode. The batch of a step is drawn from the torch generator, so that
equal seeds give equal steps; the models draw from the generators of numpy and Python, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

__all__ = ["PATTERNS", "Pattern", "seed_everything"]

WORDS = 120
_ENCODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": WORDS,
}  # fmt: skip
_SPEECH = {
    **_ENCODER, "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.2, "mask_time_prob": 0.2, "mask_time_length": 4, "mask_feature_prob": 0.1,
    "mask_feature_length": 4, "ctc_zero_infinity": True, "ctc_loss_reduction": "mean",
}  # fmt: skip
_DETECTION = {
    "use_timm_backbone": False, "backbone": None, "d_model": 64, "num_queries": 12, "num_labels": 5,
    "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "auxiliary_loss": True,
    "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1,
}  # fmt: skip
_BACKBONE = {
    "embedding_size": 16, "hidden_sizes": [16, 16, 32, 64], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pattern:
    """A model in training mode, and the arguments of its call at a step; it returns `.loss`.

    `about` says what changes from step to step.
    """

    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and numpy: models draw from all three."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _class(name: str, config: str) -> Callable[..., Callable[[], nn.Module]]:
    def of(**entries: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**entries))
            return model.train()

        return build

    return of


def _detector() -> nn.Module:
    backbone = transformers.ResNetConfig(**_BACKBONE)
    config = transformers.DetrConfig(backbone_config=backbone, **_DETECTION)
    model: nn.Module = transformers.DetrForObjectDetection(config)
    return model.train()


def _speech(step: int) -> dict[str, Any]:
    length = 4000 + 1000 * (step % 4)
    lengths = torch.randint(length // 2, length + 1, (4, 1))
    lengths[0] = length
    return {
        "input_values": torch.randn(4, length),
        "attention_mask": (torch.arange(length) < lengths).long(),
        "labels": torch.randint(1, WORDS, (4, 6)),
    }


def _document(step: int) -> dict[str, Any]:
    length = 40 + 16 * (step % 5)
    tokens = torch.randint(4, WORDS, (4, length))
    marked = torch.zeros_like(tokens)
    marked[:, : 1 + step % 3] = 1
    return {"input_ids": tokens, "labels": tokens, "global_attention_mask": marked}


def _tokens(step: int) -> dict[str, Any]:
    tokens = torch.randint(0, WORDS, (4, 32 + 16 * (step % 3)))
    return {"input_ids": tokens, "labels": tokens}


def _image(step: int) -> dict[str, Any]:
    side = 96 + 32 * (step % 3)
    labels = [
        {
            "class_labels": torch.randint(0, 5, (count,)),
            "boxes": 0.25 + torch.rand(count, 4) / 4,
        }
        for count in torch.randint(1, 6, (3,)).tolist()
    ]
    return {"pixel_values": torch.randn(3, 3, side, side), "labels": labels}


def _rows(step: int) -> dict[str, Any]:
    rows = 192 if step % 7 else 128
    return {"x": torch.randn(rows, 64), "target": torch.randint(0, 10, (rows,)), "step": step}


@dataclass
class Output:
    """What a model of ours returns."""

    loss: torch.Tensor


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of `width` numbers in and out."""
        made: torch.Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return made


class Looping(nn.Module):
    """The same block, as often as the data say: between one and six times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor, step: int) -> Output:
        """Run the block, then the head."""
        for _ in range(1 + int(target.sum()) % 6):
            x = self.block(x)
        return Output(nn.functional.cross_entropy(self.head(x), target))


class EarlyExit(nn.Module):
    """A head after each block; the first that is sure enough of its answers ends the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(6))

    def forward(self, x: torch.Tensor, target: torch.Tensor, step: int) -> Output:
        """Sum the losses of the heads that were asked."""
        total = x.new_zeros(())
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            logits = head(x)
            total = total + nn.functional.cross_entropy(logits, target)
            if float(logits.detach().softmax(1).amax(1).mean()) > 0.23 + 0.01 * (step % 3):
                break
        return Output(total)


class TwoHeads(nn.Module):
    """A trunk, of blocks with breaks between them, and two heads, of which one is used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.classes = nn.Sequential(Block(), nn.Linear(64, 10))
        self.values = nn.Sequential(Block(), Block(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, target: torch.Tensor, step: int) -> Output:
        """Classify in even steps, predict numbers in odd ones."""
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        if step % 2 == 0:
            return Output(nn.functional.cross_entropy(self.classes(x), target))
        return Output((self.values(x).squeeze(1) - target).square().mean())


_MIXTRAL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": WORDS,
    "attention_dropout": 0.1, "output_router_logits": True,
}  # fmt: skip

PATTERNS = {
    "wav2vec2-ctc": Pattern(
        "layerdrop, masks drawn by numpy, CTC loss, four lengths",
        _class("Wav2Vec2ForCTC", "Wav2Vec2Config")(**_SPEECH),
        _speech,
    ),
    "data2vec-audio": Pattern(
        "layerdrop, masks drawn by numpy, CTC loss, four lengths",
        _class("Data2VecAudioForCTC", "Data2VecAudioConfig")(**_SPEECH),
        _speech,
    ),
    "longformer": Pattern(
        "five lengths, one to three global tokens",
        _class("LongformerForMaskedLM", "LongformerConfig")(
            **_ENCODER, attention_window=16, max_position_embeddings=256, pad_token_id=1
        ),
        _document,
    ),
    "mixtral": Pattern(
        "experts by grouped products, router loss, three lengths",
        _class("MixtralForCausalLM", "MixtralConfig")(**_MIXTRAL),
        _tokens,
    ),
    "mixtral-loop": Pattern(
        "a loop over the experts that tokens chose, three lengths",
        _class("MixtralForCausalLM", "MixtralConfig")(**_MIXTRAL, experts_implementation="eager"),
        _tokens,
    ),
    "detr": Pattern(
        "matching in eager, layerdrop, three sizes, one to five boxes", _detector, _image
    ),
    "loop": Pattern("one block, one to six times by the data", Looping, _rows),
    "early-exit": Pattern("ends after the first head that is sure", EarlyExit, _rows),
    "two-heads": Pattern("two heads in turn", TwoHeads, _rows),
}
