"""Rematerialized models, and how they are compared with plain ones."""

import torch
from exec_cases.training import train

import remat
from loop_cases.models import batch, made, square
from loop_cases.run import Run

LIMIT_SECONDS = 0.1


def rematerialized(model, *args, budget=0.7, **kwargs):
    """Plan at the first training call, or now if there is an example."""
    return remat.rematerialize(
        model, args or None, kwargs, budget=budget, limit_seconds=LIMIT_SECONDS
    )


class Watched:
    """Runs a loop with rematerialized models and in plain, and keeps the models of the first."""

    def __init__(self, loop, steps=5):
        self.models = []
        self.got = loop(Run(wrap=self._wrap, steps=steps))
        self.expected = loop(Run(steps=steps))

    def _wrap(self, model, **options):
        options = {"budget": 0.7, "limit_seconds": LIMIT_SECONDS} | options
        self.models.append(remat.rematerialize(model, **options))
        return self.models[-1]


def record(model, steps=3):
    """Train for some steps, and keep what they leave; all of them run by one plan."""
    plans = []

    def call(model, step):
        output = model(batch(step))
        plans.append(getattr(model, "plan", None))
        return output

    kept = train(model, call, square, steps=steps)
    assert all(plan is plans[0] for plan in plans), "planned more than once"
    return kept


def llama(**options):
    """Llama with two layers."""
    import transformers  # takes seconds, which processes of ranks need not spend

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=32, bos_token_id=0,
        eos_token_id=63, pad_token_id=0, **options,
    )  # fmt: skip
    model = made(transformers.LlamaForCausalLM, config)
    model.loss_type = "ForCausalLM"
    return model


def assert_planned(model):
    """A plan was made, it recomputes something, and it was measured to be within its budget."""
    assert "not made yet" not in str(model.plan)
    assert model.plan.recomputations > 0
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


def assert_same_state(got, expected):
    """Compare parameters and buffers of two models by name, bit by bit."""
    assert_same_tensors(got.state_dict(), expected.state_dict())


def assert_same_tensors(got, expected):
    """Compare tensors by name, bit by bit."""
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        difference = (got[name] - tensor).abs().max()
        assert torch.equal(got[name], tensor), f"{name} differs by {difference}"


def assert_moved_alike(got, expected, start, share=0.05):
    """Two models differ by no more than a share of how far training has moved them."""
    pairs = zip(got.parameters(), expected.parameters(), start.parameters(), strict=True)
    rows = [((a - b).square().sum(), (b - c).square().sum()) for a, b, c in pairs]
    apart, moved = (torch.stack(column).detach().sum().sqrt() for column in zip(*rows, strict=True))
    assert moved > 0
    assert apart <= share * moved, f"{apart} apart, moved by {moved}"


def assert_same_gradients(got, expected, rtol=0.0):
    """Compare gradients by name; what is missing in one is missing in the other.

    `rtol`, 0 for bit by bit, is a share of the largest number of each gradient.
    """
    got = {name: parameter.grad for name, parameter in got.named_parameters()}
    for name, parameter in expected.named_parameters():
        if parameter.grad is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            difference = (got[name] - parameter.grad).abs().max()
            assert difference <= rtol * parameter.grad.abs().max(), name
