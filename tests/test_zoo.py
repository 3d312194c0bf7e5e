"""The models that tests and benchmarks share do train, and give the same numbers for a seed."""

import pytest
import torch

import zoo


def seeded_step(example):
    torch.manual_seed(7)
    loss = example.step()
    return loss, {name: p.grad for name, p in example.model.named_parameters()}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_trains_a_step(name):
    example = zoo.build(name)
    assert example.name == name
    assert all(module.training for module in example.model.modules())
    before = {key: value.clone() for key, value in example.model.state_dict().items()}
    loss, gradients = seeded_step(example)
    assert loss.isfinite()
    assert all(gradient is not None for gradient in gradients.values())
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > len(gradients) / 2
    torch.optim.SGD(example.model.parameters(), lr=1e-2).step()
    changed = [k for k, v in example.model.state_dict().items() if not torch.equal(v, before[k])]
    assert changed
    example.model.zero_grad()
    assert not torch.equal(seeded_step(example)[0], loss)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_equal_seeds_give_equal_numbers(name):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, two, other = (zoo.build(name, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    (loss, gradients), (loss_two, gradients_two) = seeded_step(one), seeded_step(two)
    assert torch.equal(loss, loss_two)
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, gradients_two[parameter]), parameter
    assert not torch.equal(seeded_step(other)[0], loss)


@pytest.mark.parametrize("name", ["gpt2", "t5", "transformer"])
def test_dropout_drops(name):
    example = zoo.build(name)
    losses = set()
    for seed in range(3):
        torch.manual_seed(seed)
        losses.add(float(example.step()))
    assert len(losses) == 3


@pytest.mark.parametrize("name", ["gpt2-no-dropout", "transformer-no-dropout"])
def test_no_dropout_drops_nothing(name):
    example = zoo.build(name)
    assert torch.equal(example.step(), example.step())


def test_the_models_have_what_they_are_here_for():
    t5 = zoo.build("t5").model
    assert t5.lm_head.weight is t5.shared.weight is t5.encoder.embed_tokens.weight
    assert any(p.is_complex() for p in zoo.build("fno").model.parameters())
    for name in ("resnet", "unet"):
        modules = list(zoo.build(name).model.modules())
        assert any(isinstance(m, torch.nn.BatchNorm2d) for m in modules)
        assert any(isinstance(m, torch.nn.ReLU) and m.inplace for m in modules)
    inplace = zoo.build("inplace")
    inplace.step()
    block = inplace.model.blocks[0]
    assert int(block.calls) == 1
    assert block.running_mean.any()


@pytest.mark.parametrize("name", zoo.PEERS)
def test_the_sizes_grow(name):
    counts = [
        sum(p.numel() for p in zoo.build(name, size).model.parameters())
        for size in ("tiny", "peers", "medium")
    ]
    assert counts[0] < counts[1] <= counts[2]


def test_a_model_moves_with_its_batch():
    example = zoo.build("inplace").to("meta")
    tensors = [*example.args, *example.kwargs.values(), *example.model.parameters()]
    assert {t.device.type for t in tensors if isinstance(t, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("name", zoo.PUBLISHED)
def test_the_published_models_train_a_step(name):
    example = zoo.published(name, tiny=True)
    assert example.name == name
    loss, gradients = seeded_step(example)
    assert loss.isfinite()
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > len(gradients) / 2
    again = zoo.published(name, tiny=True)
    assert torch.equal(seeded_step(again)[0], loss)


def test_the_published_models_have_the_published_depth():
    assert len(zoo.published("gpt-96").model.transformer.h) == 96
    assert len(zoo.published("transformer-36-36").model.decoder.layers) == 36
    convolutions = {
        name: sum(
            isinstance(module, torch.nn.Conv2d) for module in zoo.published(name).model.modules()
        )
        for name in ("resnet-101", "regnet-32", "unet")
    }
    assert convolutions == {"resnet-101": 104, "regnet-32": 74, "unet": 19}


def test_unknown_names_and_sizes_are_refused():
    with pytest.raises(ValueError, match="no model is called 'vgg'; there are gpt2, "):
        zoo.build("vgg")
    with pytest.raises(ValueError, match="'t5' has no size 'peers'"):
        zoo.build("t5", "peers")
    with pytest.raises(ValueError, match="no row is called 'gpt2'; there are gpt-24, "):
        zoo.published("gpt2")
