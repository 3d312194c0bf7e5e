"""The Trainer of transformers trains a rematerialized model as it trains a plain one."""

import pytest
import torch
import transformers
from stack_cases.models import (
    assert_moved_alike,
    assert_planned,
    assert_same_state,
    rematerialized,
)

from loop_cases.frameworks import sentences, trainer
from loop_cases.models import gpt2, tokens


def examples(masked=False):
    """Make 24 sentences, all of one length; `masked` leaves out more of each label than before."""
    made = sentences()
    for position, sentence in enumerate(made):
        if masked:
            sentence["labels"][: position // 3] = -100
    return made


@pytest.mark.sweep
def test_weights_after_accumulated_steps_are_those_of_the_plain_model(tmp_path):
    model, eager = rematerialized(gpt2(depth=1)), gpt2(depth=1)
    for each in (model, eager):
        trainer(each, tmp_path, gradient_accumulation_steps=2)
    assert_planned(model)
    assert_same_state(model, eager)
    assert not torch.equal(eager.lm_head.weight, gpt2(depth=1).lm_head.weight)


@pytest.mark.sweep
def test_bf16_is_close_and_autocast_ends_with_the_training(tmp_path):
    model, eager = rematerialized(gpt2(depth=1)), gpt2(depth=1)
    for each in (model, eager):
        trainer(each, tmp_path, bf16=True, optim="sgd", learning_rate=0.1)
        assert not torch.is_autocast_enabled("cpu")
    assert_planned(model)
    assert_moved_alike(model, eager, gpt2(depth=1))


@pytest.mark.sweep
def test_bf16_with_an_example_at_construction(tmp_path):
    """The example was without autocast, and its larger budget is kept."""
    model, eager = rematerialized(gpt2(depth=1), input_ids=tokens(), labels=tokens()), gpt2(depth=1)
    example = model.plan
    for each in (model, eager):
        trainer(each, tmp_path, bf16=True, optim="sgd", learning_rate=0.1)
        assert not torch.is_autocast_enabled("cpu")
    assert model.plan is not example
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert_moved_alike(model, eager, gpt2(depth=1))


@pytest.mark.sweep
def test_another_number_of_labels_in_a_batch_is_no_new_plan(tmp_path):
    """The Trainer hands that number to the model as an argument."""
    plans = []
    model, eager = rematerialized(gpt2()), gpt2()
    model.register_forward_hook(lambda module, args, output: plans.append(module.plan))
    for each in (model, eager):
        trainer(each, tmp_path, examples(masked=True))
    assert_planned(model)
    assert_same_state(model, eager)
    assert len(plans) == 3
    assert all(plan is plans[0] for plan in plans)


@pytest.mark.sweep
def test_a_smaller_last_batch_and_evaluation(tmp_path):
    losses = []
    for model in (rematerialized(gpt2(depth=1)), gpt2(depth=1)):
        made = trainer(
            model, tmp_path, examples()[:10], max_steps=-1, num_train_epochs=1,
            eval_strategy="no",
        )  # fmt: skip
        losses.append(made.evaluate(examples()[10:14])["eval_loss"])
    assert losses[0] == losses[1]


@pytest.mark.sweep
def test_what_the_trainer_saves_is_the_model(tmp_path):
    model = rematerialized(gpt2(depth=1))
    trainer(model, tmp_path).save_model()
    assert_planned(model)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same_state(saved, model)
