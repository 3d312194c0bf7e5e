"""Making any configuration of transformers tiny, by the names of its entries."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["FIRST_ORDINARY_TOKEN", "VOCABULARY", "override", "shrink"]

VOCABULARY = 160
FIRST_ORDINARY_TOKEN = 64  # below are those with a meaning: padding, images, speech
WIDTH = 32
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS
LAYERS = 2
IMAGE = 32
PATCH = 8

_EXACT: dict[str, int] = {
    "d_kv": HEAD_WIDTH,
    "d_ff": 2 * WIDTH,
    "n_inner": 2 * WIDTH,
    "n_head": HEADS,
    "n_heads": HEADS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "head_dim": HEAD_WIDTH,
    "global_head_dim": HEAD_WIDTH,
    "attention_head_dim": HEAD_WIDTH,
    "kv_channels": HEAD_WIDTH,
    "qk_rope_head_dim": HEAD_WIDTH,
    "qk_nope_head_dim": HEAD_WIDTH,
    "qk_head_dim": 2 * HEAD_WIDTH,
    "v_head_dim": HEAD_WIDTH,
    "q_lora_rank": WIDTH // 2,
    "kv_lora_rank": WIDTH // 2,
    "o_lora_rank": WIDTH // 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "num_channels": 3,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_frames": 2,
    "prediction_length": 8,
    "context_length": 32,
    "mask_time_length": 2,
    "mask_feature_length": 2,
    "upsample_groups": 32,
    "tubelet_size": 1,
    "state_size": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_queries": 8,
    "num_query_tokens": 4,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "classifier_proj_size": 16,
    "num_codevectors_per_group": 8,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "forced_bos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "num_labels": 3,
    "mlp_ratio": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 2,
    "rotary_dim": HEAD_WIDTH,
    "projection_dim": WIDTH,
    "logit_scale_init_value": 1,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "next_n": 1,
}
_PATTERNS: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*", VOCABULARY),
    (r".*(num_)?(key_value|kv)_heads|num_kv_heads|.*num_key_value_heads", 2),
    (r".*(num|n)_.*heads|.*attention_heads|.*_heads", HEADS),
    (r".*num_.*layers|.*_layers|.*num_blocks|.*num_hidden_layers.*|num_layers", LAYERS),
    (r".*intermediate_(size|dim).*|.*ffn_dim.*|.*ffn_.*size|.*feedforward.*|mlp_dim", 2 * WIDTH),
    (r".*head_dim", HEAD_WIDTH),
    (r".*hidden_(size|dim).*|.*d_model|.*embed_dim|n_embd|.*embedding_size|.*embed_size", WIDTH),
    (r"(d|dim|width|.*_dim|.*_width|.*_channels|.*_hidden)", WIDTH),
    (r".*max_position.*|n_positions|n_ctx|max_seq_len.*|seq_length", 256),
    (r".*image_size", IMAGE),
    (r".*patch_size", PATCH),
)
_KEPT = re.compile(
    r"(in|num|input|out|output)_channels|.*(_stride|_kernel.*|_dilation|_padding|_factor|_layer)"
    r"|.*mamba_expand|conv_kernel|type_vocab_size|.*_loss.*|.*_coefficient|num_global_layers|"
    r"num_feat_extract_layers|.*dropout.*|num_register_tokens"
)
_SMALL_LISTS: tuple[tuple[str, int], ...] = (
    (r".*depths?|layers|num_layers|num_blocks.*|.*stage_repeats", 1),
    (r".*num_(attention_)?heads", 2),
)
_WIDE_LISTS = re.compile(
    r".*(hidden_sizes|hidden_dims?|embed_dims?|dims?|channels|conv_dim|tdnn_dim|sizes|widths?)"
)


_WHEN_ABSENT = {"vocab_size": VOCABULARY, "head_dim": HEAD_WIDTH, "prediction_length": 8}
_MADE_ANEW = (
    "out_features", "out_indices", "stage_names", "_out_features", "_out_indices",
    "per_layer_config",
)  # fmt: skip
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


def _number(key: str, value: int) -> int:
    if key in ("patch_size", "window_size"):
        return min(value, _EXACT[key])
    if key in _EXACT:
        return min(_EXACT[key], value) if key.startswith("num_experts") else _EXACT[key]
    if _KEPT.fullmatch(key):
        return value
    for pattern, small in _PATTERNS:
        if re.fullmatch(pattern, key):
            return min(value, small)
    return value


def _numbers(key: str, values: list[Any], layers: int | None) -> list[Any]:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        if key.endswith(("layer_types", "layers_block_type", "mlp_layer_types", "layer_type")):
            kinds = list(dict.fromkeys(values))
            return (kinds + kinds)[:LAYERS]
        return values
    for pattern, small in _SMALL_LISTS:
        if re.fullmatch(pattern, key):
            return [min(value, small) for value in values]
    if key in ("image_size", "img_size"):
        return [IMAGE] * len(values)
    if key == "patch_size":
        return [PATCH] * len(values)
    if _WIDE_LISTS.fullmatch(key) and values and "kernel" not in key:
        return [value if value <= 4 else 8 * -(-value // 64) for value in values]
    return values


def shrink(entries: dict[str, Any]) -> dict[str, Any]:
    """Make a configuration, as a dictionary, tiny; those inside of it, too."""
    small: dict[str, Any] = {}
    for key, value in entries.items():
        if key in _MADE_ANEW:
            continue
        if isinstance(value, dict):
            small[key] = value if key in ("id2label", "label2id") else shrink(value)
        elif isinstance(value, bool) or value is None:
            small[key] = _WHEN_ABSENT.get(key) if value is None else value
        elif isinstance(value, int):
            small[key] = _number(key, value)
        elif isinstance(value, list):
            small[key] = _numbers(key, value, None)
        else:
            small[key] = value
    _renumber_tokens(small)
    for key in _KEY_VALUE_HEADS:
        heads = entries.get("num_attention_heads")
        if isinstance(entries.get(key), int) and isinstance(heads, int):
            shared = entries[key] < heads and not entries.get("kv_lora_rank")
            small[key] = min(entries[key], 2) if shared else small["num_attention_heads"]
    if small.get("is_encoder_decoder"):
        for key, token in (("pad_token_id", 0), ("decoder_start_token_id", 2)):
            if key in small and small[key] is None:
                small[key] = token
    if "mrope_section" in small:
        small["mrope_section"] = [2, 1, 1]
    return small


def _renumber_tokens(entries: dict[str, Any]) -> None:
    """Give each token with a meaning an id within the small vocabulary."""
    taken = 4
    for key, value in entries.items():
        named = key.endswith(("token_id", "token_index", "_token"))
        if named and isinstance(value, int) and not isinstance(value, bool) and value >= taken:
            entries[key] = taken
            taken += 1
        elif named and isinstance(value, list) and value and isinstance(value[0], int):
            entries[key] = min(value[0], 2)


def override(entries: dict[str, Any], fixes: dict[str, Any]) -> None:
    """Set entries by dotted names: `text_config.hidden_size`; an absent dictionary is made."""
    for name, value in fixes.items():
        *folders, last = name.split(".")
        inner = entries
        for folder in folders:
            if not isinstance(inner.get(folder), dict):
                inner[folder] = {}
            inner = inner[folder]
        inner[last] = value
