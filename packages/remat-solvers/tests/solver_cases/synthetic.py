"""Joint training graphs of transformer shape, without torch: a small tape with roofline costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat_graph import Graph, Op, Stage, Value


@dataclass
class Tape:
    """Records forward ops with their backward rules, then writes the joint graph."""

    flops_per_s: float = 1e13
    bytes_per_s: float = 1e12
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    resident: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)
    rules: list = field(default_factory=list)
    grads: dict[str, list[str]] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    stage: Stage = Stage.FORWARD
    boundary: str | None = None

    def constant(self, name: str, size: int) -> str:
        self.values.append(Value(name, size))
        self.size[name] = size
        self.resident.add(name)
        return name

    def op(self, name, inputs, outputs, flops=0.0, workspace=0, twin=None):
        """Append an op; `outputs` are (suffix, bytes)."""
        names = []
        for suffix, size in outputs:
            v = f"{name}.{suffix}"
            self.values.append(Value(v, size))
            self.size[v] = size
            names.append(v)
        moved = sum(self.size[v] for v in (*inputs, *names))
        time = max(flops / self.flops_per_s, moved / self.bytes_per_s) + 2e-6
        inputs = tuple(dict.fromkeys(inputs))
        self.ops.append(
            Op(name, inputs, tuple(names), time, workspace, stage=self.stage, twin=twin)
        )
        return names

    def grad_of(self, v: str) -> str:
        parts = self.grads[v]
        while len(parts) > 1:
            a, b = parts.pop(0), parts.pop(0)
            name = f"acc{len(self.ops)}"
            parts.insert(0, self.op(name, (a, b), [("out", self.size[a])])[0])
        return parts[0]

    def backward(self, loss: str, batch_last: str | None = None) -> Graph:
        self.stage = Stage.BACKWARD
        self.boundary = "bwd.seed"
        self.grads.setdefault(loss, []).append(
            self.op("bwd.seed", (loss,), [("out", self.size[loss])])[0]
        )
        for rule in reversed(self.rules):
            rule()
        return Graph(
            tuple(self.values),
            tuple(self.ops),
            frozenset(self.resident),
            frozenset(self.results | {loss}),
            self.boundary,
        )

    def linear(self, name, x, rows, fan_in, fan_out, dtype=4):
        w = self.constant(f"{name}.w", fan_in * fan_out * dtype)
        flops = 2.0 * rows * fan_in * fan_out
        (y,) = self.op(name, (x, w), [("y", rows * fan_out * dtype)], flops)

        def rule():
            g = self.grad_of(y)
            gx = self.op(f"{name}.dx", (g, w), [("g", self.size[x])], flops, twin=name)[0]
            gw = self.op(f"{name}.dw", (g, x), [("g", self.size[w])], flops, twin=name)[0]
            gb = self.op(f"{name}.db", (g,), [("g", fan_out * dtype)], twin=name)[0]
            self.grads.setdefault(x, []).append(gx)
            self.results.update({gw, gb})

        self.rules.append(rule)
        return y

    def unary(self, name, x, reads_output=False, extra=(), flops=0.0):
        """Elementwise; backward reads the input (gelu) or the output (softmax, tanh)."""
        (y, *rest) = self.op(name, (x,), [("y", self.size[x]), *extra], flops)

        def rule():
            saved = (y,) if reads_output else (x,)
            g = self.grad_of(y)
            gx = self.op(f"{name}.dx", (g, *saved, *rest), [("g", self.size[x])], twin=name)[0]
            self.grads.setdefault(x, []).append(gx)

        self.rules.append(rule)
        return y

    def dropout(self, name, x):
        y, mask = self.op(name, (x,), [("y", self.size[x]), ("mask", self.size[x] // 4)])

        def rule():
            g = self.grad_of(y)
            gx = self.op(f"{name}.dx", (g, mask), [("g", self.size[x])], twin=name)[0]
            self.grads.setdefault(x, []).append(gx)

        self.rules.append(rule)
        return y

    def copy(self, name, x, size=None):
        """A transposition or a scaling: backward needs nothing."""
        (y,) = self.op(name, (x,), [("y", size or self.size[x])])

        def rule():
            g = self.grad_of(y)
            gx = self.op(f"{name}.dx", (g,), [("g", self.size[x])], twin=name)[0]
            self.grads.setdefault(x, []).append(gx)

        self.rules.append(rule)
        return y

    def split3(self, name, x):
        """Views are free: three copies made contiguous."""
        parts = [self.op(f"{name}.{i}", (x,), [("y", self.size[x] // 3)])[0] for i in range(3)]

        def rule():
            gs = [self.grad_of(p) for p in parts]
            gx = self.op(f"{name}.cat", gs, [("g", self.size[x])], twin=f"{name}.0")[0]
            self.grads.setdefault(x, []).append(gx)

        self.rules.append(rule)
        return parts

    def bmm(self, name, a, b, out, flops):
        (y,) = self.op(name, (a, b), [("y", out)], flops)

        def rule():
            g = self.grad_of(y)
            ga = self.op(f"{name}.da", (g, b), [("g", self.size[a])], flops, twin=name)[0]
            gb = self.op(f"{name}.db", (g, a), [("g", self.size[b])], flops, twin=name)[0]
            self.grads.setdefault(a, []).append(ga)
            self.grads.setdefault(b, []).append(gb)

        self.rules.append(rule)
        return y

    def add(self, name, a, b):
        (y,) = self.op(name, (a, b), [("y", self.size[a])])

        def rule():
            g = self.grad_of(y)
            self.grads.setdefault(a, []).append(g)
            self.grads.setdefault(b, []).append(g)

        self.rules.append(rule)
        return y

    def norm(self, name, x, rows):
        y, mean, rstd = self.op(
            name, (x,), [("y", self.size[x]), ("mean", rows * 4), ("rstd", rows * 4)]
        )

        def rule():
            g = self.grad_of(y)
            gx, gw, gb = self.op(
                f"{name}.dx",
                (g, x, mean, rstd),
                [("g", self.size[x]), ("gw", 4096), ("gb", 4096)],
                twin=name,
            )
            self.grads.setdefault(x, []).append(gx)
            self.results.update({gw, gb})

        self.rules.append(rule)
        return y


def gpt2(layers=12, batch=8, seq=512, width=768, heads=12, vocab=8192) -> Graph:
    """A GPT-2-like joint graph with parameter gradients as results."""
    tape = Tape()
    rows = batch * seq
    tokens = tape.constant("tokens", rows * 8)
    wte = tape.constant("wte", vocab * width * 4)
    (x,) = tape.op("embed", (tokens, wte), [("y", rows * width * 4)])
    first = x

    def embed_rule():
        g = tape.grad_of(first)
        tape.results.add(tape.op("embed.dw", (g, tokens), [("g", vocab * width * 4)])[0])

    tape.rules.append(embed_rule)
    x = tape.dropout("embed.drop", x)
    scores = batch * heads * seq * seq * 4
    flops = 2.0 * batch * seq * seq * width
    for i in range(layers):
        p = f"h{i}."
        h = tape.norm(p + "ln1", x, rows)
        qkv = tape.linear(p + "qkv", h, rows, width, 3 * width)
        q, k, v = tape.split3(p + "split", qkv)
        s = tape.bmm(p + "qk", q, k, scores, flops)
        s = tape.copy(p + "scale", s)
        s = tape.unary(p + "softmax", s, reads_output=True)
        s = tape.dropout(p + "attn_drop", s)
        o = tape.bmm(p + "av", s, v, rows * width * 4, flops)
        o = tape.copy(p + "merge", o)
        o = tape.linear(p + "proj", o, rows, width, width)
        o = tape.dropout(p + "drop1", o)
        x = tape.add(p + "res1", x, o)
        h = tape.norm(p + "ln2", x, rows)
        h = tape.linear(p + "fc", h, rows, width, 4 * width)
        h = tape.unary(p + "gelu", h, flops=0.0)
        h = tape.linear(p + "out", h, rows, 4 * width, width)
        h = tape.dropout(p + "drop2", h)
        x = tape.add(p + "res2", x, h)
    x = tape.norm("ln_f", x, rows)
    logits = tape.linear("head", x, rows, width, vocab)
    logp = tape.unary("log_softmax", logits, reads_output=True)
    (loss,) = tape.op("nll", (logp,), [("y", 4)])

    def loss_rule():
        g = tape.grad_of(loss)
        gx = tape.op("nll.dx", (g, tokens), [("g", tape.size[logp])], twin="nll")[0]
        tape.grads.setdefault(logp, []).append(gx)

    tape.rules.append(loss_rule)
    return tape.backward(loss)
