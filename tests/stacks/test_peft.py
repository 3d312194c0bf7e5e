"""Adapters of PEFT: only they get gradients, the same ones as in the plain model."""

import pytest
import torch
from stack_cases.models import (
    assert_planned,
    assert_same_gradients,
    assert_same_state,
    rematerialized,
)

from loop_cases.frameworks import adapted
from loop_cases.models import gpt2, tokens

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def trained(model, steps=3):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        optimizer.step()
    return model


def assert_only_adapters_have_gradients(model):
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


@pytest.mark.sweep
def test_adapters_are_trained_as_in_the_plain_model():
    model, eager = trained(rematerialized(adapted(gpt2()))), trained(adapted(gpt2()))
    assert_planned(model)
    assert_only_adapters_have_gradients(model)
    assert_same_gradients(model, eager)
    assert_same_state(model, eager)


@pytest.mark.sweep
def test_inputs_that_are_made_to_require_gradients():
    """A hook on the embedding, which PEFT's users set for checkpointing: no break, one region."""
    model, eager = adapted(gpt2()), adapted(gpt2())
    for each in (model, eager):
        each.enable_input_require_grads()
    model = trained(rematerialized(model))
    trained(eager)
    assert_planned(model)
    assert model.plan.is_one_region
    assert_only_adapters_have_gradients(model)
    assert_same_gradients(model, eager)


@pytest.mark.sweep
def test_adapters_switched_off_and_on_again_and_merged():
    model, eager = trained(rematerialized(adapted(gpt2()))), trained(adapted(gpt2()))
    logits = []
    for each in (model, eager):
        with each.disable_adapter():
            torch.manual_seed(2)
            off = each(input_ids=tokens()).logits
        assert not off.requires_grad
        trained(each, steps=1)
        merged = each.merge_and_unload().eval()
        logits.append((off, merged(input_ids=tokens()).logits))
    for ours, theirs in zip(*logits, strict=True):
        assert torch.equal(ours, theirs)
