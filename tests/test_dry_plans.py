"""Plans of models without data: on the meta device, or made under a `FakeTensorMode`."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers
from integration_cases.sweeps import swept
from torch._subclasses import FakeTensorMode

import remat
import zoo

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def language(name, config, **extra):
    model = getattr(transformers, name)(config)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return model.train(), (), {"input_ids": tokens, "labels": tokens, **extra}


def vision(name, config):
    model = getattr(transformers, name)(config)
    labels = torch.zeros(2, dtype=torch.long)
    return model.train(), (), {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": labels}


def llama():
    mask = torch.ones(2, 8, dtype=torch.long)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return language("LlamaForCausalLM", config, attention_mask=mask)


def bert():
    return language("BertForMaskedLM", transformers.BertConfig(**SMALL))


def bart():
    sides = {
        f"{side}_{key}": size
        for side in ("encoder", "decoder")
        for key, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))
    }
    config = transformers.BartConfig(d_model=32, vocab_size=64, max_position_embeddings=16, **sides)
    return language("BartForConditionalGeneration", config)


def mamba():
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=64, state_size=2
    )
    return language("MambaForCausalLM", config)


def vit():
    sizes = {key: size for key, size in SMALL.items() if key != "vocab_size"}
    return vision(
        "ViTForImageClassification", transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    )


def convnext():
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16
    )
    return vision("ConvNextForImageClassification", config)


def of_zoo(name):
    def make():
        example = zoo.build(name)
        return example.model, example.args, dict(example.kwargs)

    return make


MODELS = {
    "llama": llama,
    "bert": bert,
    "bart": bart,
    "mamba": mamba,
    "vit": vit,
    "convnext": convnext,
    **{name: of_zoo(name) for name in ("gpt2", "resnet", "unet", "inplace")},
}
NOT_UNDER_FAKE = {"vit", "convnext"}  # transformers looks at the weights that it makes


def plan_of(made):
    return remat.plan(*made, budget="1GiB", costs="estimate")


def plan_under(mode, make, *, within=False):
    with mode:
        made = make()
        if within:
            return plan_of(made)
    return plan_of(made)


@pytest.mark.parametrize("name", swept(MODELS, ["vit"]))
def test_a_dry_plan_is_that_of_the_real_model(name):
    make = MODELS[name]
    real = plan_of(make())
    dry = [plan_under(torch.device("meta"), make)]
    if name not in NOT_UNDER_FAKE:
        dry.append(plan_under(FakeTensorMode(), make))
    for plan in dry:
        assert [op.name for op in plan.graph.ops] == [op.name for op in real.graph.ops]
        assert plan.graph == real.graph
        assert plan.store_all_peak_bytes == real.store_all_peak_bytes
        assert plan.predicted_peak_bytes == real.predicted_peak_bytes


@pytest.mark.sweep
def test_a_dry_plan_is_made_within_the_mode_of_its_model_or_beside_real_tensors():
    real = plan_of(llama())
    model, _, tokens = llama()
    with torch.device("meta"):
        on_meta, _, tokens_on_meta = llama()
    for plan in (
        plan_under(torch.device("meta"), llama, within=True),
        plan_under(FakeTensorMode(), llama, within=True),
        plan_of((on_meta, (), tokens)),
        plan_of((model, (), tokens_on_meta)),
    ):
        assert plan.graph == real.graph


def test_no_cycles_are_looked_for_while_nothing_holds_data():
    looked = []

    class Looking(torch.nn.Linear):
        def forward(self, x):
            looked.append(gc.isenabled())
            return super().forward(x).relu().sum()

    with torch.device("meta"):
        model, x = Looking(4, 4), torch.ones(2, 4)
    remat.plan(
        model, x, budget=1.0, costs="estimate", progress=lambda _: looked.append(gc.isenabled())
    )
    assert set(looked) == {False}
    assert gc.isenabled()
