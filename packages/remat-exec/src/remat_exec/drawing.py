"""Random operators of a plan: what is drawn again is what was drawn first.

An operator that is replayed saves the state of its generator at its first run, as Python bytes
outside the device's allocator: 5 KB on the CPU, 16 bytes on CUDA. A replay sets that state, and on
every path puts the stream back to where it found it. Generators belong to the process: on the CPU
one thread draws at a time, as far as threads run plans; where code of others draws meanwhile, the
state after a replay differs from that after the first run, and the replay is repeated or refused.
On CUDA there is that check alone, since a backward runs in threads of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from remat_exec.errors import BackwardError, ExecutionError
from remat_graph.torch import process_lock

__all__ = ["at_state", "draw", "draw_again", "draw_once", "read_state"]

_TRIES = 10


def draw_once(device: str, operator: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that is not replayed."""
    with _one_at_a_time(device):
        return operator(*args, **kwargs)


def draw(
    states: dict[str, Any],
    op: str,
    device: str,
    operator: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an operator for the first time; keep the state before, and a hash of that after."""
    generator = _generator(device)
    with _one_at_a_time(device):
        before = _read(generator)
        result = operator(*args, **kwargs)
        states[op] = before, hash(_read(generator))
    return result


def draw_again(
    states: dict[str, Any],
    op: str,
    device: str,
    operator: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an operator that was run before, and draw the same.

    Raises:
        BackwardError: if another thread drew at the same time, so that the same cannot be drawn.
    """
    generator = _generator(device)
    state, after = states[op]
    with _one_at_a_time(device):
        resume = _read(generator)
        try:
            for _ in range(_TRIES):
                _write(generator, state)
                result = operator(*args, **kwargs)
                if hash(_read(generator)) == after:
                    return result
                del result
        finally:
            _write(generator, resume)
    raise BackwardError(
        f"{op!r} cannot draw the same random numbers again: another thread drew from torch's "
        f"generator of {device} at the same time; give what that thread runs a torch.Generator of "
        f"its own"
    )


def read_state(device: torch.device) -> bytes:
    """Read where the generator of a device stands."""
    return _read(_generator(str(device)))


@contextlib.contextmanager
def at_state(states: Mapping[torch.device, bytes]) -> Iterator[None]:
    """Set generators of devices, and put them back; on the CPU one thread draws meanwhile."""
    generators = {_generator(str(device)): state for device, state in states.items()}
    with process_lock if generators else contextlib.nullcontext():
        resume = {generator: _read(generator) for generator in generators}
        try:
            for generator, state in generators.items():
                _write(generator, state)
            yield
        finally:
            for generator, state in resume.items():
                _write(generator, state)


def _one_at_a_time(device: str) -> contextlib.AbstractContextManager[Any]:
    return process_lock if torch.device(device).type == "cpu" else contextlib.nullcontext()


def _read(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _write(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generator(name: str) -> torch.Generator:
    device = torch.device(name)
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "cpu":
        return torch.default_generator
    raise ExecutionError(f"random operators on {device} cannot be replayed; only CPU and CUDA can")
