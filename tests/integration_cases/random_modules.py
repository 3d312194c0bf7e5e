"""Random modules: a class as text, drawn line by line, and a call of it.

What shapes the variables have is found by running each line on zeros, so that every line drawn can
run; whether the whole trains is for eager to say.
"""

import itertools
import linecache
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from integration_cases.odd_models import Doubled
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

__all__ = ["Drawn", "drawn_modules"]

_numbers = itertools.count()


class Broken(nn.Module):
    """A layer with a graph break in it."""

    def forward(self, x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x) + x


def rows(*shape):
    return torch.randn(*shape)


def triple(gradient):
    return 3 * gradient


NAMESPACE = {
    "Broken": Broken,
    "Doubled": Doubled,
    "F": F,
    "checkpoint": checkpoint,
    "nn": nn,
    "rows": rows,
    "torch": torch,
    "triple": triple,
    "double": lambda module, args, output: 2 * output,
    "halve": lambda module, args: (args[0] * 0.5,),
    "triple_all": lambda module, into, out: tuple(None if g is None else 3 * g for g in into),
}


@dataclass(frozen=True)
class Drawn:
    """A module and its call, as text; `used` are the outputs in the loss, by position."""

    parts: tuple[str, ...]
    lines: tuple[str, ...]
    inputs: tuple[str, ...]
    returned: str
    used: frozenset[int]

    @property
    def source(self):
        """The class, to be read or run on its own."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = [line for block in self.lines for line in block.splitlines()]
        return "\n".join(
            [
                "class Drawn(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {part}" for part in self.parts),
                "",
                f"    def forward(self, {names}):",
                *(f"        {line}" for line in body),
                f"        return {self.returned}",
                "",
                "",
                f"# inputs: {', '.join(self.inputs)}; in the loss: {sorted(self.used)}",
                "",
            ]
        )

    __repr__ = __str__ = lambda self: "\n" + self.source

    def make(self):
        """Make the module, with weights that are always the same."""
        torch.manual_seed(0)
        filename = f"<drawn module {next(_numbers)}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[filename] = (len(self.source), None, lines, filename)
        namespace = dict(NAMESPACE, __name__=__name__)
        exec(compile(self.source, filename, "exec"), namespace)
        return namespace["Drawn"]().train()

    def call(self):
        """Make the arguments, out of torch's generator as it is."""
        return tuple(eval(text, dict(NAMESPACE)) for text in self.inputs)


ELEMENTWISE = (
    "torch.tanh({v})",
    "torch.sin({v})",
    "F.relu({v})",
    "F.gelu({v})",
    "torch.sigmoid({v})",
    "F.silu({v})",
    "torch.exp(torch.tanh({v}))",
    "{v} * 1.5",
    "{v} / (1 + {v}.abs())",
    "{v}.clone()",
    "{v}.detach()",
    "{v}.view_as({v})",
    "{v}.contiguous()",
    "({v}.double() * 1.5).float()",
    "{v}.bfloat16().float()",
    "torch.where({v} > 0, {v}, 0.1 * {v})",
    "F.softmax({v}, -1)",
    "F.normalize({v}, dim=-1)",
    "{v} - {v}.mean(-1, keepdim=True)",
    "{v}.cumsum(-1)",
    "{v}.sort(-1)[0]",
    "{v}.flip(0)",
    "{v}.gather(-1, {v}.argsort(-1))",
    "Doubled.apply({v}, 1.5)",
    "F.dropout({v}, 0.3)",
    "{v} + torch.rand_like({v})",
    "{v} * torch.bernoulli(torch.full_like({v}, 0.7))",
    "checkpoint(torch.sin, {v}, use_reentrant=False)",
    "checkpoint(lambda y: F.dropout(torch.tanh(y), 0.2), {v}, use_reentrant=False)",
)
VIEWS = (
    "{v}.transpose(0, -1)",
    "{v}.mT",
    "{v}[..., 1:]",
    "{v}[::2]",
    "{v}[:, ::2]",
    "{v}[0]",
    "{v}[:, None]",
    "{v}.flatten(1)",
    "{v}.reshape(-1, 8)",
    "{v}.reshape(4, -1, 8)",
    "{v}.reshape(2, -1, 4, 4)",
    "{v}.unflatten(-1, (2, -1))",
    "{v}.squeeze()",
    "{v}.narrow(0, 0, 2)",
    "{v}.select(-1, 0)",
    "{v}.diagonal()",
    "{v}.expand(2, *{v}.shape)",
    "{v}.unfold(-1, 2, 1)",
)
OTHER_SHAPES = (
    "{v}.mean(0)",
    "{v}.sum(-1, keepdim=True)",
    "{v}.amax(0)",
    "{v}.square().mean()",
    "{v} @ {v}.mT",
    "F.avg_pool1d({v}, 2)",
    "F.max_pool2d({v}, 2)",
    "F.pad({v}, (1, 1))",
    "{v}[{v}.flatten(1).argmax(-1) % {v}.shape[0]]",
    "F.scaled_dot_product_attention({v}, {v}, {v})",
    "torch.cat([{v}, {v}], 0)",
    "F.one_hot({v}.argmax(-1), {v}.shape[-1]).float()",
)
PAIRS = (
    "{v} + {w}",
    "{v} * {w}",
    "{v} - {w}",
    "torch.maximum({v}, {w})",
    "torch.where({v} > {w}, {v}, {w})",
    "torch.cat([{v}, {w}], -1)",
    "torch.stack([{v}, {w}])",
    "{v} @ {w}.mT",
    "torch.addcmul({v}, {w}, {w})",
)
IN_PLACE = (
    "{v}.add_(1)",
    "{v}.mul_(0.5)",
    "{v} += 0.1",
    "{v}.relu_()",
    "{v}.tanh_()",
    "{v}.sigmoid_()",
    "{v}.clamp_(min=-0.5)",
    "{v}.zero_()",
    "{v}.sin_()",
    "{v}[..., 1:3] = 0.25",
    "{v}[..., 0] *= 2",
    "{v}[0].zero_()",
    "{v}.t().add_(0.1)",
    "{v}.masked_fill_({v} > 1, 0.5)",
    "{v}.add_(torch.randn_like({v}))",
    "F.leaky_relu({v}, 0.1, inplace=True)",
    "F.dropout({v}, 0.2, inplace=True)",
    "{v}.chunk(2, -1)[0].mul_(2)",
    "{v}.detach().add_(0.5)",
    "{v}.register_hook(triple)",
)
IN_PLACE_PAIRS = (
    "{v}.add_({w})",
    "{v}.mul_({w})",
    "{v} -= {w}",
    "{v}.copy_({w})",
    "{v}[..., :2] = {w}[..., :2]",
    "{v}[0] += {w}[-1]",
    "{v}.sub_({w}, alpha=0.5)",
)
BREAKS = (
    "torch._dynamo.graph_break()",
    "if {v}.sum().item() > 0:\n    {n} = {v} * 2\nelse:\n    {n} = torch.sin({v})",
    "if {v}.mean() > 0:\n    {n} = torch.tanh({v})\nelse:\n    {n} = {v} - 1",
    "{n} = {v} * float({v}.detach().abs().max())",
    "{n} = torch.from_numpy({v}.detach().numpy()) + {v}",
)
OTHER_LINES = (
    "with torch.no_grad():\n    {n} = torch.sin({v}) + 1",
    "{n}, _ = {v}.chunk(2, -1)",
    "_, {n} = {v}.split([1, {v}.shape[0] - 1])",
    "{n} = {v}.unbind(0)[-1]",
    "{n}, _ = {v}.max(-1)",
    "{n} = {v}\nfor _ in range(3):\n    {n} = torch.sin({n}) + {v}",
)
PARTS = (  # of the last size, which they change or not
    "nn.Linear({size}, {out})",
    "nn.Linear({size}, {out}, bias=False)",
    "nn.LayerNorm({size})",
    "nn.Sequential(nn.Linear({size}, {out}), nn.ReLU(inplace=True), nn.Dropout(0.2))",
    "nn.Sequential(nn.LayerNorm({size}), nn.Linear({size}, {out}), nn.Tanh())",
    "nn.Sequential(nn.Linear({size}, {out}), nn.GELU(), nn.Linear({out}, {size}))",
    "nn.Sequential(nn.Linear({size}, {size}), Broken(), nn.Linear({size}, {out}))",
    "nn.BatchNorm1d({second})",
    "nn.BatchNorm1d({second}, momentum=None)",
    "nn.BatchNorm1d({second}, track_running_stats=False)",
    "nn.BatchNorm1d({second}, affine=False)",
    "nn.BatchNorm1d({second}).eval()",
    "nn.BatchNorm2d({second})",
    "nn.GroupNorm(2, {second})",
    "nn.InstanceNorm1d({second}, affine=True)",
    "nn.Conv1d({second}, {out}, 3, padding=1)",
    "nn.Conv2d({second}, {out}, 3, padding=1)",
    "nn.Sequential(nn.Conv2d({second}, {out}, 3, padding=1), nn.BatchNorm2d({out}), nn.ReLU(True))",
    "nn.ConvTranspose1d({second}, {out}, 2)",
    "nn.PReLU()",
    "nn.Dropout(0.4)",
    "nn.Dropout(0.2, inplace=True)",
    "nn.ReLU(inplace=True)",
    "nn.MultiheadAttention({size}, 2, batch_first=True, dropout=0.1)",
    "Broken()",
)
OF_PARTS = (  # what is done to a part once it is made
    "",
    "",
    "",
    "{p}.requires_grad_(False)",
    "{p}.register_forward_hook(double)",
    "{p}.register_forward_pre_hook(halve)",
    "{p}.register_full_backward_hook(triple_all)",
    "{p}.weight.requires_grad_(False)",
    "{p}.weight.register_hook(triple)",
)
BUFFERS = (
    "self.{b}.add_({v}.detach().mean())",
    "self.{b} = 0.9 * self.{b} + 0.1 * {v}.detach().mean()",
    "self.{b}.mul_(0.9).add_({v}.detach().mean(), alpha=0.1)",
    "self.{b} += 1",
    "with torch.no_grad():\n    self.{b}.copy_({v}.mean() + self.{b})",
    "{n} = {v} * self.{b}",
    "{n} = {v} + self.{b}.sin()",
)
INPUTS = (
    "rows(16, 16)",
    "rows(8, 4, 8)",
    "rows(4, 2, 8, 8)",
    "rows(16, 32)[:, ::2]",
    "rows(16, 8).t()",
    "rows(1, 16).expand(16, 16)",
    "rows(16, 16).requires_grad_()",
    "(rows(16, 16).requires_grad_() * 1)",
    "(rows(16, 32).requires_grad_() * 1)[:, ::2]",
)


def _has_statistics(part):
    """Whether eager writes to a part a second time when a checkpoint computes it again."""
    return any(isinstance(module, _BatchNorm) for module in part.modules())


@dataclass
class _Writer:
    """Writes lines, and knows what each variable looks like."""

    draw: object
    parts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    model: nn.Module = field(default_factory=nn.Module)
    made: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    count: int = 0

    def pick(self, items):
        return self.draw(st.sampled_from(items))

    def variable(self):
        """Pick a variable, most often the last."""
        names = list(self.tensors)
        return names[-1] if self.draw(st.integers(0, 3)) else self.pick(names)

    def other(self, name):
        """Pick another variable, of the same shape if there is one."""
        shape = self.tensors[name].shape
        same = [n for n, t in self.tensors.items() if t.shape == shape and n != name]
        return self.pick(same or list(self.tensors))

    def write(self, text, **names):
        """Write a line if it can run; give whether it could."""
        new = f"v{self.count}"
        line = text.format(n=new, **names)
        namespace = dict(NAMESPACE, self=self.model, **self.tensors)
        try:
            exec(line, namespace)
        except (RuntimeError, IndexError, ValueError, AssertionError, NotImplementedError):
            return False
        self.lines.append(line)
        made = namespace.get(new)
        if isinstance(made, torch.Tensor) and 0 < made.numel() <= 4096 and made.is_floating_point():
            self.tensors[new] = made
            self.count += 1
        return True

    def part(self):
        name = self.variable()
        if self.made and not self.draw(st.integers(0, 3)):
            part = self.pick(self.made)
        else:
            part = self._new_part(name)
        if part is not None:
            made = getattr(self.model, part)
            if isinstance(made, nn.MultiheadAttention):
                call = f"self.{part}({name}, {name}, {name})[0]"
            elif self.draw(st.integers(0, 5)) or _has_statistics(made):
                call = f"self.{part}({name})"
            else:
                call = f"checkpoint(self.{part}, {name}, use_reentrant=False)"
            if not self.draw(st.integers(0, 2)):
                call = f"{name} + {call}"
            self.write(f"{{n}} = {call}")

    def _new_part(self, name):
        shape = self.tensors[name].shape
        if not shape:
            return None
        sizes = {
            "size": shape[-1],
            "second": shape[1] if len(shape) > 1 else 1,
            "out": self.pick([shape[-1], 8, 12]),
        }
        text = self.pick(PARTS).format(**sizes)
        part = f"p{len(self.made)}"
        try:
            made = eval(text, dict(NAMESPACE))
        except (ValueError, AssertionError):
            return None
        self._declare(part, text, made)
        after = self.pick(OF_PARTS)
        if after and (".weight" not in after or getattr(made, "weight", None) is not None):
            self.parts.append(after.format(p=f"self.{part}"))
        if isinstance(made, nn.Linear):
            if self.weights and not self.draw(st.integers(0, 2)):
                other = self.pick(self.weights)
                if getattr(self.model, other).weight.shape == made.weight.shape:
                    self.parts.append(f"self.{part}.weight = self.{other}.weight")
            self.weights.append(part)
        return part

    def _declare(self, name, text, made):
        self.parts.append(f"self.{name} = {text}")
        self.made.append(name)
        setattr(self.model, name, made)

    def buffer(self):
        if not self.buffers or not self.draw(st.integers(0, 3)):
            name = f"b{len(self.buffers)}"
            text = self.pick(["torch.ones(())", "torch.ones(1)"])
            self.parts.append(f'self.register_buffer("{name}", {text})')
            self.model.register_buffer(name, eval(text))
            self.buffers.append(name)
        self.write(self.pick(BUFFERS), v=self.variable(), b=self.pick(self.buffers))

    def parameter(self):
        name = self.variable()
        size = self.tensors[name].shape[-1:].numel()
        new = f"w{len(self.parts)}"
        text = f"nn.Parameter(torch.linspace(-1, 1, {size}))"
        self.parts.append(f"self.{new} = {text}")
        setattr(self.model, new, eval(text))
        self.write(self.pick(["{n} = {v} * self.{p}", "{n} = {v} + self.{p}.sin()"]), v=name, p=new)

    def step(self):
        kind = self.pick(_KINDS)
        name = self.variable()
        if kind == "part":
            self.part()
        elif kind == "buffer":
            self.buffer()
        elif kind == "parameter":
            self.parameter()
        else:
            texts, prefix = _LINES[kind]
            self.write(prefix + self.pick(texts), v=name, w=self.other(name))


_LINES = {
    "elementwise": (ELEMENTWISE, "{n} = "),
    "view": (VIEWS, "{n} = "),
    "other": (OTHER_SHAPES, "{n} = "),
    "pair": (PAIRS, "{n} = "),
    "in place": (IN_PLACE, ""),
    "in place pair": (IN_PLACE_PAIRS, ""),
    "line": (OTHER_LINES, ""),
    "break": (BREAKS, ""),
}
_KINDS = (
    "part", "part", "part", "part", "elementwise", "elementwise", "elementwise", "view", "other",
    "pair", "in place", "in place pair", "line", "buffer", "parameter", "break",
)  # fmt: skip
_RETURNS = ("({})", "[{}]", "dict({})", "(({}), None, 3)")


@st.composite
def drawn_modules(draw, most=12):
    """Draw a module, a call of it, and which of its outputs are in the loss."""
    writer = _Writer(draw)
    inputs = draw(st.lists(st.sampled_from(INPUTS), min_size=1, max_size=2))
    for number, text in enumerate(inputs):
        writer.tensors[f"x{number}"] = eval(text, dict(NAMESPACE))
    for _ in range(draw(st.integers(3, most))):
        writer.step()
    names = list(writer.tensors)
    extra = draw(st.lists(st.sampled_from(names), max_size=2))
    trained = [name for name in names if writer.tensors[name].requires_grad]
    outputs = [(trained or names)[-1], *extra]
    used = draw(st.sets(st.integers(0, len(extra)), max_size=len(extra))) | {0}
    if len(outputs) == 1 and draw(st.booleans()):
        returned = outputs[0]
    else:
        form = draw(st.sampled_from(_RETURNS))
        keyed = form.startswith("dict")
        listed = [f"k{i}={name}" if keyed else name for i, name in enumerate(outputs)]
        returned = form.format(", ".join(listed) + ("," if form.startswith("(") else ""))
    return Drawn(
        tuple(writer.parts), tuple(writer.lines), tuple(inputs), returned, frozenset(used)
    )
