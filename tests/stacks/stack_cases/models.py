"""Models small enough to be planned and trained in a second, with something to recompute."""

import torch
import transformers
from exec_cases.training import train
from torch import nn

import remat

LIMIT_SECONDS = 0.2


def rematerialized(model, *args, budget=0.7, **kwargs):
    """Plan at the first training call, or now if there is an example."""
    return remat.rematerialize(
        model, args or None, kwargs, budget=budget, limit_seconds=LIMIT_SECONDS
    )


class Block(nn.Module):
    """A residual block with something cheap to compute again."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.leave = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.leave(torch.tanh(self.enter(self.norm(x))))


class Blocks(nn.Module):
    """A few blocks and a head."""

    def __init__(self, width=16, depth=3, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x))


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self, width=16):
        super().__init__()
        self.trunk = nn.Sequential(*(Block(width) for _ in range(3)))
        self.left, self.right = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, x):
        x = self.trunk(x)
        return self.left(x), self.right(x)


def made(kind, *args, **kwargs):
    """Make a model, the same one each time."""
    torch.manual_seed(0)
    return kind(*args, **kwargs).train()


def batch(step=0, size=32, width=16):
    """Make the batch of a step."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(step))


def tokens(step=0, size=4, length=16):
    """Make the tokens of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 60, (size, length), generator=generator)


def square(output):
    """A loss that uses every number of one tensor."""
    return output.square().mean()


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


def gpt2(**options):
    """GPT-2 with two layers and dropout."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=63, pad_token_id=0, **options,
    )  # fmt: skip
    model = made(transformers.GPT2LMHeadModel, config)
    model.loss_type = "ForCausalLM"
    return model


def llama(**options):
    """Llama with two layers."""
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
    got, expected = got.state_dict(), expected.state_dict()
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
