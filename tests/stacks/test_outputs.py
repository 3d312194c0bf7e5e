"""A backward over some outputs: right, within the budget, and nothing captured meanwhile."""

import contextlib

import pytest
import torch
import transformers
from stack_cases.models import assert_planned, assert_same_gradients, llama, rematerialized
from torch import nn
from torch._subclasses import FakeTensorMode

import remat
from loop_cases.models import Heads, batch, gpt2, made, square, tokens


@contextlib.contextmanager
def nothing_captured(monkeypatch):
    """Fail if anything is traced; whatever traces does so on fake tensors."""
    entered = []
    enter = FakeTensorMode.__enter__

    def noted(mode):
        entered.append(mode)
        return enter(mode)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTensorMode, "__enter__", noted)
        yield
    assert not entered, "captured within a backward"


def train_both(model, eager, call, monkeypatch, steps=3, rtol=0.0):
    """Train by plain gradient descent; `call(model, step)` makes the loss."""
    for step in range(steps):
        for each in (model, eager):
            each.zero_grad()
            torch.manual_seed(step)
            loss = call(each, step)
            with nothing_captured(monkeypatch):
                loss.backward()
        assert_same_gradients(model, eager, rtol)
        for each in (model, eager):
            with torch.no_grad():
                for parameter in each.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
    assert_planned(model)


@pytest.mark.parametrize("example", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_heads_in_turn(monkeypatch, example):
    model = rematerialized(made(Heads), *([batch()] if example else []))
    eager = made(Heads)

    def call(each, step):
        return square(each(batch(step))[step % 2])

    train_both(model, eager, call, monkeypatch, steps=4)
    assert model.left.weight.grad is None
    assert model.right.weight.grad is not None
    for step in range(2):
        model.zero_grad()
        with remat.measure_peak() as peak:
            call(model, step).backward()
        assert peak.peak_bytes <= model.plan.budget_bytes


def test_losses_in_turn(monkeypatch):
    """Sometimes both, sometimes one, and one head twice."""
    losses = (
        lambda out: square(out[0]) + square(out[1]),
        lambda out: square(out[0]),
        lambda out: out[1].abs().mean() + square(out[1]),
        lambda out: square(out[0]) + square(out[1]),
    )
    train_both(
        rematerialized(made(Heads)),
        made(Heads),
        lambda each, step: losses[step](each(batch(step))),
        monkeypatch,
        steps=len(losses),
    )


@pytest.mark.sweep
def test_each_head_has_its_backward(monkeypatch):
    """Two forwards a step, one head of each used."""
    model, eager = rematerialized(made(Heads)), made(Heads)
    for step in range(2):
        for each in (model, eager):
            each.zero_grad()
            left, _ = each(batch(step))
            square(left).backward()
            _, right = each(batch(step))
            with nothing_captured(monkeypatch):
                square(right).backward()
        assert_same_gradients(model, eager)
    assert_planned(model)


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, vocab_size=8,
        apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    return made(transformers.Wav2Vec2Model, config)


def convnext():
    config = transformers.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2)
    return made(transformers.ConvNextModel, config)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:step 1 took:remat.BudgetWarning")
def test_only_the_last_hidden_state_of_wav2vec2(monkeypatch):
    def call(each, step):
        return square(each(batch(step, 4, 400)).last_hidden_state)

    # Its graph breaks: a step is recorded before the plan is made.
    train_both(rematerialized(wav2vec2()), wav2vec2(), call, monkeypatch, steps=6)


@pytest.mark.sweep
def test_only_the_pooled_output_of_convnext(monkeypatch):
    def call(each, step):
        images = batch(step, 4 * 3 * 32, 32).reshape(4, 3, 32, 32)
        return square(each(images).pooler_output)

    # A sum over a tensor of another memory format rounds otherwise.
    model = rematerialized(convnext(), budget=0.9)
    train_both(model, convnext(), call, monkeypatch, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        (gpt2, True),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in [(gpt2, False), (llama, True)]),
    ],
)
def test_a_loss_made_outside_from_the_logits(monkeypatch, kind, cache):
    """Cached keys and values are outputs that get no gradient."""

    def call(each, step):
        logits = each(input_ids=tokens(step), use_cache=cache).logits
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens(step)[:, 1:].flatten()
        )

    train_both(rematerialized(kind()), kind(), call, monkeypatch)
