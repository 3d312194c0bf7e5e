"""Random arguments, and where a sample of them is registered for operators."""

import torch
from hypothesis import strategies as st


class Draw:
    """Random arguments, of one floating type."""

    def __init__(self, draw):
        self._draw = draw
        self.dtype = self.of(torch.float64, torch.float64, torch.float64, torch.float32)
        self.generator = torch.Generator().manual_seed(self.int(0, 999))

    def int(self, least, most):
        return self._draw(st.integers(least, most))

    def of(self, *choices):
        return self._draw(st.sampled_from(choices))

    def sizes(self, least=1, most=4, longest=6):
        return [self.int(1, longest) for _ in range(self.int(least, most))]

    def tensor(self, *shape):
        """Numbers between 0.1 and 0.9."""
        numbers = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (numbers * 0.8 + 0.1).to(self.dtype)

    def signed(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def indices(self, end, *shape):
        return torch.randint(end, shape, generator=self.generator)

    def axis(self, rank):
        """An axis, as often counted from the back."""
        return self.int(-rank, rank - 1)

    def cuts(self, units):
        """Bounds of one to five slices of any sizes."""
        inner = self._draw(st.lists(st.integers(1, max(units - 1, 1)), max_size=4, unique=True))
        return [0, *sorted(cut for cut in inner if cut < units), units]


SAMPLES = {}


def sample(*operators):
    """Give arguments and those by name, `make(draw, operator)`, for each of these operators."""

    def register(make):
        SAMPLES.update(dict.fromkeys(operators, make))
        return make

    return register
