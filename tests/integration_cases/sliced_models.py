"""Small models of many kinds, parts of which can be made in slices."""

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, BATCH, TOKENS = 96, 8, 2, 6


class Model(nn.Module):
    """A module with the given forward and parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def words(count=WORDS):
    return torch.randint(count, (BATCH, TOKENS))


def hidden():
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)


def head(loss=functional.cross_entropy, bias=False, **options):
    def forward(m, x, y):
        scores = m.out(m.norm(x))
        return loss(scores.view(-1, WORDS), y.view(-1), **options)

    parts = {"norm": nn.LayerNorm(WIDTH), "out": nn.Linear(WIDTH, WORDS, bias=bias)}
    return Model(forward, **parts), (hidden(), words())


def ignoring():
    model, (x, y) = head(ignore_index=3)
    y[:, ::2] = 3
    return model, (x, y)


def weighted():
    def forward(m, x, y, weight):
        scores = m.out(x).flatten(0, 1)
        return functional.cross_entropy(scores, y.flatten(), weight)

    args = hidden(), words(), torch.rand(WORDS, dtype=torch.float64) + 0.1
    return Model(forward, out=nn.Linear(WIDTH, WORDS)), args


def soft_capped():
    def forward(m, x, y):
        scores = 5 * torch.tanh(m.out(x) / 5)
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum")

    return Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)), (hidden(), words())


def shifted():
    def forward(m, x, y):
        scores = m.out(x)[:, :-1].contiguous().view(-1, WORDS)
        return functional.cross_entropy(scores, y[:, 1:].reshape(-1))

    return Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)), (hidden(), words())


def tied():
    def forward(m, ids, y):
        x = torch.tanh(m.words(ids))
        scores = functional.linear(x, m.words.weight)
        return functional.cross_entropy(scores.view(-1, WORDS), y.view(-1))

    return Model(forward, words=nn.Embedding(WORDS, WIDTH)), (words(), words())


def gated():
    def forward(m, x):
        x = m.first(x)
        for layer in m.layers:
            x = x + layer["down"](functional.silu(layer["gate"](x)) * layer["up"](x))
        return x.square().mean()

    def layer():
        wide = 16 * WIDTH
        return nn.ModuleDict(
            {
                "gate": nn.Linear(WIDTH, wide, bias=False),
                "up": nn.Linear(WIDTH, wide, bias=False),
                "down": nn.Linear(wide, WIDTH, bias=False),
            }
        )

    layers = nn.ModuleList([layer() for _ in range(3)])
    return Model(forward, first=nn.Linear(WIDTH, WIDTH), layers=layers), (hidden(),)


def images():
    def forward(m, x):
        return m.body(x).square().mean()

    body = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1)
    )
    return Model(forward, body=body), (torch.randn(4, 2, 6, 6, dtype=torch.float64),)


def attention():
    def forward(m, x):
        q, k, v = m.qkv(x).view(BATCH, TOKENS, 3, 2, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return m.out((weights @ v).transpose(1, 2).flatten(2)).square().sum()

    parts = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}
    return Model(forward, **parts), (hidden(),)


MODELS = {
    "head": head,
    "head with a bias": lambda: head(bias=True),
    "smoothed labels": lambda: head(label_smoothing=0.1),
    "ignored labels": ignoring,
    "weighted classes": weighted,
    "soft-capped scores": soft_capped,
    "shifted labels": shifted,
    "tied head": tied,
    "gated MLPs": gated,
    "images": images,
    "attention": attention,
}


def built(name):
    torch.manual_seed(0)
    model, args = MODELS[name]()
    return model.double(), args


def trained(run, model, args):
    model.zero_grad(set_to_none=True)
    run(*args).backward()
    return [parameter.grad for parameter in model.parameters()]
