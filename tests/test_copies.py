"""Copies of the result: deep ones, pickles, checkpoints, a Hugging Face model that is saved."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from exec_cases.training import assert_bitwise_equal, assert_close
from integration_cases.one_net import LIMIT_SECONDS, Net, net, planned, step
from torch import nn

import remat


def test_a_deepcopy_trains_alone_and_is_planned_anew():
    model = planned()
    other = copy.deepcopy(model)
    assert type(other) is Net
    assert other.enter.weight is other.again.weight
    assert other.enter.weight is not model.enter.weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_bitwise_equal(step(other), step(planned()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert other.plan is not model.plan
    assert other.plan.budget_bytes == model.plan.budget_bytes


def test_pickling_keeps_the_settings_and_plans_anew():
    model = planned()
    other = pickle.loads(pickle.dumps(model))
    assert type(other) is Net
    stale = other.plan
    assert_bitwise_equal(step(other), step(model))
    assert other.plan is not stale
    assert other.plan.budget_bytes == model.plan.budget_bytes


def test_saving_and_loading_the_whole_model():
    model = planned()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert_bitwise_equal(step(other), step(model))


def test_a_checkpoint_goes_from_one_to_the_other():
    model, eager = planned(), net()
    step(model)
    eager.load_state_dict(model.state_dict())
    assert_close(step(model), step(eager))
    model.load_state_dict(net().state_dict())
    assert_close(step(model), step(net()))


@pytest.mark.sweep
def test_data_parallel_over_the_result(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel(planned())
        got = step(parallel, deep=True)
    finally:
        torch.distributed.destroy_process_group()
    assert_bitwise_equal(got, step(planned(), deep=True))


@pytest.fixture(scope="module")
def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=63, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


@pytest.mark.sweep
def test_a_hugging_face_model_stays_one(gpt2, tmp_path):
    tokens = torch.randint(1, 60, (4, 16), generator=torch.Generator().manual_seed(0))
    model = remat.rematerialize(
        copy.deepcopy(gpt2), (), {"input_ids": tokens, "labels": tokens}, budget=0.6,
        limit_seconds=LIMIT_SECONDS,
    )  # fmt: skip
    assert isinstance(model, transformers.PreTrainedModel)
    assert model.config.n_layer == 2
    results = []
    for each in (model, copy.deepcopy(gpt2)):
        torch.manual_seed(3)
        output = each(input_ids=tokens, labels=tokens)
        output.loss.backward()
        results.append((output, [p.grad for p in each.parameters()]))
    (output, gradients), (expected, expected_gradients) = results
    assert type(output) is type(expected)
    assert list(output) == list(expected)
    assert list(output)[:2] == ["loss", "logits"]
    ours, theirs = output[2], expected[2]  # keys and values: their name differs between releases
    assert type(ours) is type(theirs)
    torch.testing.assert_close(output.logits, expected.logits)
    assert output[0] is output.loss
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(our_layer.keys, their_layer.keys)
        torch.testing.assert_close(our_layer.values, their_layer.values)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    model.eval()
    generated = model.generate(tokens[:1, :4], max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 7)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)
