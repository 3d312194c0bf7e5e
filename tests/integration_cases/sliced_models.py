"""Small models of many kinds, parts of which can be made in slices."""

import functools

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


def read_twice(loss):
    """A loss of the scores that more than one of its operators reads."""

    def forward(m, x, y):
        return loss(m, m.out(torch.tanh(x)).flatten(0, 1), y.flatten())

    model = Model(forward, out=nn.Linear(WIDTH, WORDS))
    model.register_buffer("right", torch.zeros(()))
    return model, (hidden(), words())


def large_scores_cost(m, scores, y):
    return functional.cross_entropy(scores, y) + 0.01 * scores.logsumexp(-1).square().mean()


def focal(m, scores, y):
    logs = scores.log_softmax(-1).gather(1, y[:, None])[:, 0]
    return -((1 - logs.exp()) ** 2 * logs).mean()


def counting_right(m, scores, y):
    m.right += (scores.argmax(-1) == y).double().mean()
    return functional.cross_entropy(scores, y)


def of_shares(m, scores, y):
    return functional.cross_entropy(scores, functional.one_hot(y, WORDS) * 0.9 + 0.1 / WORDS)


def entropy_beside(m, scores, y):
    shares = scores.softmax(-1)
    entropy = -(shares * shares.log()).sum(-1).mean()
    return functional.nll_loss(shares.log(), y) - 0.1 * entropy


def of_each_word(m, scores, y):
    wanted = functional.one_hot(y, WORDS).double()
    return functional.binary_cross_entropy_with_logits(scores, wanted)


def straight_through(m, scores, y):
    shares = scores.softmax(-1)
    chosen = functional.one_hot(shares.argmax(-1), WORDS).double()
    made = (chosen + shares - shares.detach()) @ m.out.weight
    return made.square().mean() + functional.cross_entropy(scores, y)


def routed(m, scores, y):
    shares = scores.softmax(-1)
    largest = shares.topk(2, -1)
    first = functional.one_hot(largest.indices[:, 0], WORDS).double().mean(0)
    return largest.values.square().mean() + (first * shares.mean(0)).sum()


LOSSES = {
    "large scores cost": large_scores_cost,
    "focal loss": focal,
    "right ones are counted": counting_right,
    "shares of words": of_shares,
    "entropy beside": entropy_beside,
    "each word alone": of_each_word,
    "straight-through choice": straight_through,
    "routed and balanced": routed,
}


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
    **{name: functools.partial(read_twice, loss) for name, loss in LOSSES.items()},
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
