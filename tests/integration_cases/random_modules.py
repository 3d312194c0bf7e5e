"""Random modules: a class as text, drawn line by line, and a call of it.

What shapes the variables have is found by running each line on zeros, so that every line drawn can
run; whether the whole trains is for eager to say.
"""

import itertools
import linecache
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from integration_cases.made import Doubled
from integration_cases.random_lines import BUFFERS, INPUTS, KINDS, LINES, OF_PARTS, PARTS, RETURNS

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
        kind = self.pick(KINDS)
        name = self.variable()
        if kind == "part":
            self.part()
        elif kind == "buffer":
            self.buffer()
        elif kind == "parameter":
            self.parameter()
        else:
            texts, prefix = LINES[kind]
            self.write(prefix + self.pick(texts), v=name, w=self.other(name))


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
        form = draw(st.sampled_from(RETURNS))
        keyed = form.startswith("dict")
        listed = [f"k{i}={name}" if keyed else name for i, name in enumerate(outputs)]
        returned = form.format(", ".join(listed) + ("," if form.startswith("(") else ""))
    return Drawn(tuple(writer.parts), tuple(writer.lines), tuple(inputs), returned, frozenset(used))
