"""Loops that let outputs lie unread have them not made, also where a library handles them."""

import io

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32, gather, pad_across_processes
from stack_cases.models import assert_moved_alike, assert_same_gradients, assert_same_state
from transformers.trainer_pt_utils import nested_concat, nested_detach

import remat
from loop_cases.frameworks import trainer
from loop_cases.models import gpt2 as small_gpt2
from loop_cases.models import tokens
from remat_exec.deferred import DeferredTensor


def gpt2():
    model = small_gpt2(width=16)
    torch.manual_seed(0)
    model.resize_token_embeddings(2000)  # so that logits are large
    return model


def named(model):
    return remat.rematerialize(model, budget="1GiB", outputs="loss")


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_trainer_reads_no_logits(tmp_path, precision):
    model, eager = named(gpt2()), gpt2()
    returned = []
    model.register_forward_hook(lambda module, args, output: returned.append(output.logits))
    for each in (model, eager):
        trainer(each, tmp_path, bf16=precision == "bf16", optim="sgd", learning_rate=0.1)
    if precision == "no":
        assert_same_state(model, eager)
    else:
        assert_moved_alike(model, eager, gpt2())
    assert len(returned) == 3
    assert all(isinstance(logits, DeferredTensor) for logits in returned)
    with pytest.raises(remat.OutputGone):  # so it was not made before
        returned[0].sum()


@pytest.mark.sweep
def test_what_libraries_do_with_outputs():
    model, eager, ids = named(gpt2()), gpt2(), tokens()
    torch.manual_seed(1)
    expected = eager(input_ids=ids, labels=ids).logits
    torch.manual_seed(1)
    output = convert_outputs_to_fp32(model)(input_ids=ids, labels=ids)
    assert isinstance(output["logits"], DeferredTensor)
    loss, logits = output[:2]
    logits = nested_detach((logits,))[0]
    assert isinstance(logits, DeferredTensor)
    assert not logits.requires_grad
    loss.backward()
    assert torch.equal(gather(logits), expected)
    assert torch.equal(pad_across_processes(logits, dim=1), expected)
    assert torch.equal(nested_concat(logits, logits)[: len(expected)], expected)
    saved = io.BytesIO()
    torch.save({"logits": output.logits}, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["logits"], expected)


@pytest.mark.sweep
def test_a_plan_made_without_a_step_is_used_where_outputs_have_another_order(tmp_path):
    ids = tokens()
    plan = remat.plan(gpt2(), kwargs={"input_ids": ids, "labels": ids}, budget=0.97)
    assert plan.kinds[0].deferred, "the budget has room for the logits"
    plan.save(tmp_path / "saved.json")
    eager = gpt2()
    model = remat.rematerialize(gpt2(), budget=0.97, plan=tmp_path / "saved.json")
    for each in (model, eager):
        torch.manual_seed(1)
        each(input_ids=ids, labels=ids).loss.backward()
    assert model.plan.kinds[0].deferred != plan.kinds[0].deferred
    assert_same_gradients(model, eager)
