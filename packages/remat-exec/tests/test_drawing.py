"""Random operators that are run again: the same numbers, and a stream that is left alone."""

import pytest
import torch

from remat_exec import BackwardError
from remat_exec.drawing import draw, draw_again

CPU = "cpu"


def numbers():
    return torch.rand(5)


def draw_meanwhile(times):
    """Draw as an operator does, with as many draws of another thread just before."""
    left = iter(range(times))

    def operator():
        if next(left, None) is not None:
            torch.rand(3)
        return torch.rand(5)

    return operator


def test_a_replay_draws_the_same_and_leaves_the_stream_where_it_was():
    states = {}
    first = draw(states, "op", CPU, numbers)
    torch.rand(2)
    before = torch.get_rng_state()
    assert torch.equal(draw_again(states, "op", CPU, numbers), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_on_a_gpu_the_generator_of_that_gpu_is_set_and_put_back(monkeypatch):
    first, second = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (first, second))

    def numbers_there():
        return torch.rand(5, generator=second)

    states = {}
    drawn = draw(states, "op", "cuda:1", numbers_there)
    numbers_there()
    before = [generator.get_state() for generator in (first, second)]
    assert torch.equal(draw_again(states, "op", "cuda:1", numbers_there), drawn)
    after = [generator.get_state() for generator in (first, second)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_replay_that_fails_leaves_the_stream_where_it_was(error):
    def failing():
        torch.rand(2)
        raise error

    states = {}
    draw(states, "op", CPU, numbers)
    before = torch.get_rng_state()
    with pytest.raises(error):
        draw_again(states, "op", CPU, failing)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_replay_in_which_another_thread_draws_is_repeated():
    states = {}
    first = draw(states, "op", CPU, numbers)
    before = torch.get_rng_state()
    assert torch.equal(draw_again(states, "op", CPU, draw_meanwhile(3)), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_another_thread_made_impossible_to_draw_again_is_refused():
    states = {}
    draw(states, "op", CPU, draw_meanwhile(1))
    before = torch.get_rng_state()
    with pytest.raises(
        BackwardError, match=r"another thread drew .* a torch\.Generator of its own"
    ):
        draw_again(states, "op", CPU, numbers)
    assert torch.equal(torch.get_rng_state(), before)
