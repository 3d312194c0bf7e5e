"""`RematModule`: the plan for the call it was made for, the module as it is without gradients."""

import pytest
import torch
from exec_cases.models import HEADS, MLP, NORMED, SHARED

from remat_exec import RematModule
from remat_graph.torch import GuardMiss


def test_without_gradients_the_module_runs_as_it_is():
    model, eager = NORMED.remat(), NORMED.model()
    with torch.no_grad():
        got, expected = model(*NORMED.args()), eager(*NORMED.args())
    assert torch.equal(got, expected)
    assert not got.requires_grad
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_in_eval_mode_the_module_runs_as_it_is():
    model, eager = SHARED.remat().eval(), SHARED.model().eval()
    output = model(*SHARED.args())
    assert torch.equal(output, eager(*SHARED.args()))
    assert output.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.module[0].weight.requires_grad_(False), "requires_grad"),
        (lambda m: m.module[1].eval(), r"1\.training was True and is False"),
        (lambda m: m.module[1].register_forward_hook(lambda *_: None), "hooks"),
        (lambda m: m.module.__setitem__(1, torch.nn.ReLU()), "replaced"),
    ],
    ids=["frozen", "eval", "hook", "replaced"],
)
def test_a_module_that_changed_is_refused(change, message):
    model = MLP.remat()
    change(model)
    with pytest.raises(GuardMiss, match=message):
        model(*MLP.args())


def test_another_shape_is_refused():
    (x,) = MLP.args()
    with pytest.raises(GuardMiss, match=r"was \[32, 8\].* and is \[5, 8\]"):
        MLP.remat()(x[:5])


def test_autocast_is_refused():
    with torch.autocast("cpu"), pytest.raises(GuardMiss, match="autocast"):
        MLP.remat()(*MLP.args())


def test_a_module_of_the_same_shape_runs_by_the_same_capture():
    other = MLP.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model = RematModule(other, MLP.captured, MLP.store_all)
    torch.testing.assert_close(model(*MLP.args()), other(*MLP.args()))


def test_a_module_of_another_shape_is_refused():
    model = RematModule(torch.nn.Linear(8, 4), MLP.captured, MLP.store_all)
    with pytest.raises(GuardMiss):
        model(*MLP.args())


def test_keyword_arguments_are_part_of_the_call():
    with pytest.raises(GuardMiss, match="structure"):
        HEADS.remat()(x=HEADS.args()[0])
