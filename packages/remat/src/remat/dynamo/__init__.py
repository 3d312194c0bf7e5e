"""TorchDynamo as a front door: the graphs of a function, and what runs instead of them."""

from remat.dynamo.frames import Found, compile_frames, found_in, is_last_compilation, let_through

__all__ = ["Found", "compile_frames", "found_in", "is_last_compilation", "let_through"]
