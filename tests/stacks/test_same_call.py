"""What is the same call and needs no other plan; what is planned for, and what runs plain."""

import pytest
import torch
import transformers
from exec_cases.training import assert_bitwise_equal, train
from stack_cases.models import assert_planned, assert_same_gradients, rematerialized
from torch import nn

from loop_cases.models import Blocks, batch, gpt2, made, square, tokens


@pytest.mark.sweep
def test_saving_between_steps_changes_the_config_and_needs_no_plan(tmp_path):
    model, eager, plans = rematerialized(gpt2()), gpt2(), []
    for step in range(3):
        for each in (model, eager):
            torch.manual_seed(step)
            each(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            each.save_pretrained(tmp_path)
        plans.append(model.plan)
    assert_planned(model)
    assert plans[2] is plans[1]  # the second is made for logits that nobody holds
    assert_same_gradients(model, eager)


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        vocab_size=64, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return made(transformers.BertForSequenceClassification, config)


def vit():
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=3,
    )  # fmt: skip
    return made(transformers.ViTForImageClassification, config)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [bert, vit])
def test_the_kind_of_problem_is_set_in_the_first_forward(kind):
    model, eager, plans = rematerialized(kind()), kind(), []
    assert eager.config.problem_type is None
    for step in range(3):
        if kind is bert:
            inputs = {"input_ids": tokens(step)}
        else:
            inputs = {"pixel_values": batch(step, 4 * 3 * 16).reshape(4, 3, 16, 16)}
        for each in (model, eager):
            torch.manual_seed(step)
            each(**inputs, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
            assert each.config.problem_type == "single_label_classification"
        plans.append(model.plan)
        assert_same_gradients(model, eager)
    assert_planned(model)
    assert plans[2] is plans[1]


class Several(Blocks):
    def forward(self, x, scale=1.0, shift=None):
        return super().forward(x) * scale + (0.0 if shift is None else shift)


def test_by_position_or_by_name_is_the_same_call():
    model, shift = rematerialized(made(Several)), torch.ones(4)
    square(model(batch(), 2.0, shift)).backward()
    plan = model.plan
    for call in (
        lambda: model(batch(), 2.0, shift=shift),
        lambda: model(batch(), scale=2.0, shift=shift),
        lambda: model(shift=shift, scale=2.0, x=batch()),
    ):
        model.zero_grad()
        torch.manual_seed(1)
        square(call()).backward()
        assert model.plan is plan
    eager = made(Several)
    torch.manual_seed(1)
    square(eager(batch(), 2.0, shift)).backward()
    assert_same_gradients(model, eager)


def test_a_default_that_is_handed_over_is_the_same_call():
    model = rematerialized(made(Several))
    square(model(batch())).backward()
    plan = model.plan
    square(model(batch(), 1.0, shift=None)).backward()
    assert model.plan is plan


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.blocks = nn.Linear(16, 16), nn.BatchNorm1d(16), Blocks()

    def forward(self, x):
        return self.blocks(self.norm(self.enter(x)))


@pytest.mark.parametrize("example", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_training_in_eval_mode_is_planned_for(example):
    """Batch norm frozen and dropout off, as in fine-tuning."""
    model, eager = made(Normed).eval(), made(Normed).eval()
    model = rematerialized(model, *([batch()] if example else []))
    records = [train(each, lambda m, step: m(batch(step)), square) for each in (model, eager)]
    assert_bitwise_equal(*records)
    assert_planned(model)
    assert not model.training
    assert int(model.norm.num_batches_tracked) == 0


def test_nothing_is_planned_where_nothing_requires_a_gradient():
    model, eager = rematerialized(made(Blocks)), made(Blocks)
    outputs = []
    for each in (model, eager):
        each.requires_grad_(False)
        torch.manual_seed(1)
        outputs.append(each(batch()))
    assert torch.equal(*outputs)
    assert not outputs[0].requires_grad
    assert "not made yet" in str(model.plan)


def test_all_parameters_frozen_but_an_input_requires_a_gradient():
    model, eager = rematerialized(made(Blocks)), made(Blocks)
    gradients = []
    for each in (model, eager):
        each.requires_grad_(False)
        x = batch().requires_grad_()
        torch.manual_seed(1)
        square(each(x)).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert_planned(model)
