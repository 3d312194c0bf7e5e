"""Models of tokens, of tables, of sound and of time series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from matrix_cases.case import Built
from wild_cases.packages import load

__all__ = ["MODELS"]

TOKENS = 64


def _tokens(length: int = 32, batch: int = 2) -> Tensor:
    return torch.randint(0, TOKENS, (batch, length))


def _x_decoder(**options: Any) -> Built:
    package = load("x_transformers")
    layers = package.Decoder(dim=32, depth=3, heads=2, attn_dim_head=16, **options)
    model = package.TransformerWrapper(num_tokens=TOKENS, max_seq_len=32, attn_layers=layers)
    return Built(package.AutoregressiveWrapper(model), (_tokens(),))


def _x_encoder_decoder() -> Built:
    model = load("x_transformers").XTransformer(
        dim=32, enc_num_tokens=TOKENS, enc_depth=2, enc_heads=2, enc_max_seq_len=24,
        dec_num_tokens=TOKENS, dec_depth=2, dec_heads=2, dec_max_seq_len=16,
    )  # fmt: skip
    return Built(model, (_tokens(24), _tokens(16)))


def _x_continuous() -> Built:
    package = load("x_transformers")
    model = package.ContinuousTransformerWrapper(
        dim_in=8, dim_out=8, max_seq_len=32,
        attn_layers=package.Encoder(dim=32, depth=2, heads=2, attn_dim_head=16, rel_pos_bias=True),
    )  # fmt: skip
    return Built(model, (torch.randn(2, 32, 8),))


def _language(package: str, name: str, length: int = 32, **options: Any) -> Built:
    return Built(getattr(load(package), name)(**options), (_tokens(length),))


def _performer() -> Built:
    return _language(
        "performer_pytorch", "PerformerLM", num_tokens=TOKENS, max_seq_len=32, dim=32, depth=2,
        heads=2, dim_head=16, nb_features=16,
    )  # fmt: skip


def _linformer() -> Built:
    return _language(
        "linformer", "LinformerLM", num_tokens=TOKENS, dim=32, seq_len=32, depth=2, k=8, heads=2,
        dropout=0.1,
    )  # fmt: skip


def _reformer() -> Built:
    return _language(
        "reformer_pytorch", "ReformerLM", num_tokens=TOKENS, dim=32, depth=2, max_seq_len=32,
        heads=2, dim_head=16, bucket_size=8, n_hashes=2, ff_chunks=2, causal=True,
    )  # fmt: skip


def _routing() -> Built:
    return _language(
        "routing_transformer", "RoutingTransformerLM", num_tokens=TOKENS, dim=32, depth=2,
        max_seq_len=32, heads=4, dim_head=8, window_size=8, n_local_attn_heads=2, causal=True,
    )  # fmt: skip


def _linear_attention() -> Built:
    return _language(
        "linear_attention_transformer", "LinearAttentionTransformerLM", num_tokens=TOKENS, dim=32,
        depth=2, max_seq_len=32, heads=4, dim_head=8, causal=True, n_local_attn_heads=2,
        local_attn_window_size=8, blindspot_size=2,
    )  # fmt: skip


def _nystromformer() -> Built:
    model = load("nystrom_attention").Nystromformer(
        dim=32, depth=2, dim_head=16, heads=2, num_landmarks=8
    )
    return Built(model, (torch.randn(2, 32, 32),))


def _g_mlp() -> Built:
    return _language("g_mlp_pytorch", "gMLP", num_tokens=TOKENS, dim=32, depth=3, seq_len=32)


def _perceiver_io() -> Built:
    model = load("perceiver_pytorch").PerceiverIO(
        depth=2, dim=24, queries_dim=16, logits_dim=8, num_latents=8, latent_dim=32,
        latent_heads=2, cross_dim_head=16, latent_dim_head=16, seq_dropout_prob=0.2,
    )  # fmt: skip
    return Built(model, (torch.randn(2, 32, 24),), {"queries": torch.randn(2, 12, 16)})


def _mamba(**options: Any) -> Built:
    package = load("mambapy.mamba")
    model = package.Mamba(package.MambaConfig(d_model=32, n_layers=2, d_state=8, **options))
    return Built(model, (torch.randn(2, 32, 32),))


def _experts(package: str, name: str, **options: Any) -> Built:
    kind = getattr(load(package), name)

    class Experts(nn.Module):
        """Experts between two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Sequential(nn.Linear(16, 32), nn.GELU())
            self.experts = kind(dim=32, **options)
            self.after = nn.Linear(32, 16)

        def forward(self, values: Tensor) -> tuple[Tensor, ...]:
            found = self.experts(self.before(values))
            found, *losses = found if isinstance(found, tuple) else (found,)
            return (self.after(found), *losses)

    return Built(Experts(), (torch.randn(2, 32, 16),))


def _tab_transformer(name: str, **options: Any) -> Built:
    model = getattr(load("tab_transformer_pytorch"), name)(
        categories=(5, 7, 3), num_continuous=6, dim=32, depth=2, heads=2, **options
    )
    return Built(model, (torch.randint(0, 3, (16, 3)), torch.randn(16, 6)))


def _tab_net(name: str, **options: Any) -> Built:
    model = getattr(load("pytorch_tabnet.tab_network"), name)(
        input_dim=16, n_steps=3, virtual_batch_size=16,
        group_attention_matrix=torch.eye(16), **options,
    )  # fmt: skip
    return Built(model, (torch.randn(32, 16),))


def _rtdl(name: str, *inputs: Tensor, **options: Any) -> Built:
    return Built(getattr(load("rtdl_revisiting_models"), name)(**options), inputs)


def _rtdl_transformer() -> Built:
    options = load("rtdl_revisiting_models").FTTransformer.get_default_kwargs()
    return _rtdl(
        "FTTransformer", torch.randn(16, 6), torch.randint(0, 3, (16, 3)), n_cont_features=6,
        cat_cardinalities=[5, 7, 3], **options | {"n_blocks": 2, "d_block": 32, "d_out": 2},
    )  # fmt: skip


def _entmax(name: str) -> Built:
    package = load("entmax")

    class Attention(nn.Module):
        """Attention with sparse weights, and a sparse loss of its answers."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, 32)
            self.projections = nn.Linear(32, 96)
            self.output = nn.Linear(32, TOKENS)
            self.loss = package.Entmax15Loss()

        def forward(self, tokens: Tensor) -> Tensor:
            query, key, value = self.projections(self.embedding(tokens)).chunk(3, -1)
            weights = getattr(package, name)(query @ key.transpose(-1, -2), dim=-1)
            loss: Tensor = self.loss(self.output(weights @ value).flatten(0, 1), tokens.flatten())
            return loss.mean()

    return Built(Attention(), (_tokens(),))


def _einops() -> Built:
    layers = load("einops.layers.torch")
    model = nn.Sequential(
        layers.Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4),
        layers.EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=48, d=32),
        nn.GELU(),
        layers.EinMix("b t d -> b s d", weight_shape="t s", t=16, s=8),
        layers.Reduce("b s d -> b d", "mean"),
        nn.Linear(32, 10),
    )
    return Built(model, (torch.randn(2, 3, 16, 16),))


def _conformer() -> Built:
    model = load("conformer").Conformer(
        dim=32, depth=2, dim_head=16, heads=2, conv_kernel_size=7, ff_dropout=0.1
    )
    return Built(model, (torch.randn(2, 32, 32),))


def _separation(name: str, **options: Any) -> Built:
    model = getattr(load("asteroid.models"), name)(n_src=2, **options)
    return Built(model, (torch.randn(2, 400),))


def _vocos() -> Built:
    backbone = load("vocos.models").VocosBackbone(
        input_channels=16, dim=32, intermediate_dim=64, num_layers=2
    )
    head = load("vocos.heads").ISTFTHead(dim=32, n_fft=32, hop_length=8)
    return Built(nn.Sequential(backbone, head), (torch.randn(2, 16, 24),))


def _encodec() -> Built:
    modules, quantization = load("encodec.modules"), load("encodec.quantization")
    options = {"dimension": 16, "n_filters": 4, "ratios": [4, 2], "norm": "weight_norm"}

    class Codec(nn.Module):
        """A codec's encoder, quantizer and decoder."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = modules.SEANetEncoder(**options)
            self.quantizer = quantization.ResidualVectorQuantizer(dimension=16, n_q=2, bins=16)
            self.decoder = modules.SEANetDecoder(**options)

        def forward(self, sound: Tensor) -> tuple[Tensor, Tensor]:
            found = self.quantizer(self.encoder(sound), 100, 3.0)
            return self.decoder(found.quantized), found.penalty

    return Built(Codec(), (torch.randn(2, 1, 256),))


def _n_hits() -> Built:
    model = load("pytorch_forecasting.models.nhits.sub_modules").NHiTS(
        context_length=24, prediction_length=8, output_size=[1], static_size=0,
        encoder_covariate_size=0, decoder_covariate_size=0, static_hidden_size=1,
        n_blocks=[1, 1, 1], n_layers=[2] * 3, hidden_size=[[32, 32]] * 3, pooling_sizes=[4, 2, 1],
        downsample_frequencies=[4, 2, 1], pooling_mode="max", interpolation_mode="linear",
        dropout=0.0, activation="ReLU", initialization="lecun_normal", batch_normalization=False,
        shared_weights=False, naive_level=True,
    )  # fmt: skip
    return Built(model, (torch.randn(8, 24, 1), torch.ones(8, 24), None, None, None))


def _n_beats() -> Built:
    block = load("pytorch_forecasting.models.nbeats.sub_modules").NBEATSGenericBlock

    class Blocks(nn.Module):
        """Blocks, each of what the one before has left."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                block(32, 8, backcast_length=24, forecast_length=8) for _ in range(3)
            )

        def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
            forecast = series.new_zeros(series.shape[0], 8)
            for one in self.blocks:
                backcast, part = one(series)
                series, forecast = series - backcast, forecast + part
            return series, forecast

    return Built(Blocks(), (torch.randn(16, 24),))


def _tcn() -> Built:
    model = load("pytorch_tcn").TCN(num_inputs=8, num_channels=[16, 16, 16], kernel_size=3)
    return Built(model, (torch.randn(2, 8, 48),))


def _liquid(name: str) -> Built:
    package = load("ncps.torch")
    wiring = load("ncps.wirings").AutoNCP(12, 4)
    return Built(getattr(package, name)(6, wiring), (torch.randn(4, 6, 6),))


def _spiking(name: str) -> Built:
    package = load("snntorch")

    class Spiking(nn.Module):
        """Layers of spiking neurons, over some steps of time."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 10)
            slope = load("snntorch.surrogate").fast_sigmoid(slope=25)
            options = {"alpha": 0.8} if name == "Synaptic" else {}
            self.neurons = getattr(package, name)(
                beta=0.9, spike_grad=slope, init_hidden=True, **options
            )
            self.last = package.Leaky(beta=0.9, spike_grad=slope, init_hidden=True, output=True)

        def forward(self, values: Tensor) -> Tensor:
            load("snntorch.utils").reset(self)
            voltages = [
                self.last(self.second(self.neurons(self.first(step))))[-1] for step in values
            ]
            return torch.stack(voltages)

    return Built(Spiking(), (torch.randn(8, 4, 16),))


MODELS: dict[str, Callable[[], Built]] = {
    "x-transformers/Decoder rotary": lambda: _x_decoder(rotary_pos_emb=True, ff_glu=True),
    "x-transformers/Decoder layer dropout": lambda: _x_decoder(layer_dropout=0.3),
    "x-transformers/Decoder sparse": lambda: _x_decoder(attn_sparse_topk=8, use_rmsnorm=True),
    "x-transformers/XTransformer": _x_encoder_decoder,
    "x-transformers/ContinuousTransformerWrapper": _x_continuous,
    "performer-pytorch/PerformerLM": _performer,
    "linformer/LinformerLM": _linformer,
    "reformer-pytorch/ReformerLM": _reformer,
    "routing-transformer/RoutingTransformerLM": _routing,
    "linear-attention-transformer/LinearAttentionTransformerLM": _linear_attention,
    "nystrom-attention/Nystromformer": _nystromformer,
    "g-mlp-pytorch/gMLP": _g_mlp,
    "perceiver-pytorch/PerceiverIO": _perceiver_io,
    "mambapy/Mamba": _mamba,
    "mambapy/Mamba sequential": lambda: _mamba(pscan=False),
    "mixture-of-experts/MoE": lambda: _experts("mixture_of_experts", "MoE", num_experts=4),
    "soft-moe-pytorch/SoftMoE": lambda: _experts(
        "soft_moe_pytorch", "SoftMoE", seq_len=32, num_experts=4
    ),
    "tab-transformer-pytorch/TabTransformer": lambda: _tab_transformer(
        "TabTransformer", mlp_act=nn.ReLU()
    ),
    "tab-transformer-pytorch/FTTransformer": lambda: _tab_transformer("FTTransformer"),
    "pytorch-tabnet/TabNet": lambda: _tab_net("TabNet", output_dim=4),
    "pytorch-tabnet/TabNet entmax": lambda: _tab_net("TabNet", output_dim=4, mask_type="entmax"),
    "pytorch-tabnet/TabNetPretraining": lambda: _tab_net("TabNetPretraining"),
    "rtdl-revisiting-models/FTTransformer": _rtdl_transformer,
    "rtdl-revisiting-models/ResNet": lambda: _rtdl(
        "ResNet",
        torch.randn(32, 16),
        d_in=16,
        d_out=2,
        n_blocks=3,
        d_block=32,
        d_hidden=64,
        d_hidden_multiplier=None,
        dropout1=0.1,
        dropout2=0.1,
    ),
    "entmax/sparsemax": lambda: _entmax("sparsemax"),
    "entmax/entmax15": lambda: _entmax("entmax15"),
    "entmax/entmax_bisect": lambda: _entmax("entmax_bisect"),
    "einops/EinMix": _einops,
    "conformer/Conformer": _conformer,
    "asteroid/ConvTasNet": lambda: _separation(
        "ConvTasNet", n_blocks=2, n_repeats=2, bn_chan=16, hid_chan=32, skip_chan=16, n_filters=32
    ),
    "asteroid/DPRNNTasNet": lambda: _separation(
        "DPRNNTasNet", bn_chan=16, hid_size=16, chunk_size=20, n_repeats=1, n_filters=16
    ),
    "vocos/VocosBackbone": _vocos,
    "encodec/EncodecModel": _encodec,
    "pytorch-forecasting/NHiTS": _n_hits,
    "pytorch-forecasting/NBEATS": _n_beats,
    "pytorch-tcn/TCN": _tcn,
    "ncps/CfC": lambda: _liquid("CfC"),
    "ncps/LTC": lambda: _liquid("LTC"),
    "snntorch/Leaky": lambda: _spiking("Leaky"),
    "snntorch/Synaptic": lambda: _spiking("Synaptic"),
}
