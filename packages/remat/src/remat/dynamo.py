"""The one door to TorchDynamo: every private name of it that the API uses is in this file.

`compile_frames` runs a function so that each graph that Dynamo finds in it is handed over, with
settings of ours that hold while frames of this function are compiled, and nowhere else. Tried with
torch 2.13.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo import config, trace_rules
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._dynamo.source import AttrSource
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables import ConstantVariable, builder, misc
from torch._guards import CompileContext
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from remat.errors import RematError
from remat_graph.torch import process_lock, quietly

__all__ = ["Found", "compile_frames", "found_in", "is_last_compilation"]

_NO_LIMIT = 1 << 30
_TRIES = 3
_TRACED = "Detected that you are using FX to symbolically trace"
_UNGUARDED = "Guard failed on the same frame it was created"
_WARN = frozenset({print, warnings.warn})
_TORCH_MODULES = str(Path(torch.nn.modules.__file__).parent)
_QUERIES = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers", "getChild"})


@dataclass(frozen=True, slots=True)
class Found:
    """A graph that Dynamo found: all of a frame, or the part before a break.

    `name` is that of the frame's function. `break_reason` says why the graph ends before the frame
    does, with the user's line; `None` if it does not. `whole` says that it is all of the function.
    """

    graph: torch.fx.GraphModule
    name: str
    break_reason: str | None
    whole: bool


_AS_IT_IS = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT),
    apply_to_code=False,
)


class _Frames:
    """What Dynamo calls for each frame: `compile_frame`, with settings of ours."""

    def __init__(
        self,
        compile_frame: Any,
        settings: dict[str, Any],
        skipped: Callable[[str], None],
        watched: torch.nn.Module | None,
    ) -> None:
        functools.update_wrapper(self, compile_frame, updated=())
        self._torchdynamo_orig_backend = compile_frame  # by which Dynamo tells back ends apart
        self._settings = settings
        self._skipped = skipped
        self._watched = watched
        self._failures: Counter[CodeType] = Counter()
        self.met = 0
        self.code: CodeType | None = None
        self.root: CodeType | None = None

    def __call__(self, frame: Any, *rest: Any) -> Any:
        code = frame.f_code
        if self._failures[code] >= _TRIES:
            return _AS_IT_IS
        settings = self._settings | {"skip_nnmodule_hook_guards": self._is_of_watched(frame)}
        with quietly(), compile_lock, config.patch(settings), _patched():
            before = self.code
            self.code = code
            self.root = self.root or code
            try:
                result = self._torchdynamo_orig_backend(frame, *rest)
            except (AssertionError, InternalTorchDynamoError) as error:  # a defect of Dynamo's
                if _UNGUARDED in str(error):
                    raise
                self._failures[code] += 1
                self._skipped(f"{_place(code)} runs as it is: {str(error).strip().splitlines()[0]}")
                return _AS_IT_IS
            finally:
                self.code = before
                self.met += 1
            if result.guarded_code is not None or trace_rules.check(code):
                return result
        # Dynamo would leave the code alone from now on, in every model, even if what failed was an
        # error of the user's: we count, for this model.
        self._failures[code] += 1
        if result.skip_reason:
            self._skipped(f"{_place(code)} runs as it is: {result.skip_reason}")
        return _AS_IT_IS

    def _is_of_watched(self, frame: Any) -> bool:
        """Whether a frame is the forward of the module whose hooks the caller watches."""
        return self._watched is not None and frame.f_locals.get("self") is self._watched


def _place(code: CodeType) -> str:
    return f"{code.co_qualname} at {code.co_filename}:{code.co_firstlineno}"


def compile_frames(
    function: Callable[..., Any],
    compile_graph: Callable[[Found, Sequence[Any]], Callable[..., Any]],
    skipped: Callable[[str], None],
    *,
    allow_rnn: bool = True,
    watched: torch.nn.Module | None = None,
) -> Callable[..., Any]:
    """Give `function` with each graph that Dynamo finds replaced by what `compile_graph` makes.

    Shapes are taken as they are: a call with others compiles anew, however often. What
    `compile_graph` raises comes out unchanged. `skipped` is told of functions that run as they are,
    and why; those that they call have graphs of their own. `watched` is a module the only one of
    its class, whose submodules have hooks, or none, where they had them in earlier calls: its
    forward does not check that again.

    Raises:
        RematError: if Dynamo is switched off.
    """
    settings = {
        "accumulated_recompile_limit": _NO_LIMIT,
        "allow_rnn": allow_rnn,
        "allow_unspec_int_on_nn_module": True,  # a counter that changes compiles anew once
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": True,
        "capture_dynamic_output_shape_ops": False,
        "capture_scalar_outputs": False,
        "fail_on_recompile_limit_hit": False,
        "optimize_ddp": False,
        "recompile_limit": _NO_LIMIT,
        "reorderable_logging_functions": set(_WARN),
        "specialize_float": True,
        "suppress_errors": False,
        "use_numpy_random_stream": True,  # else its random numbers come from torch's generator
    }

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        code = frames.code
        name = code.co_qualname if code is not None else ""
        first = frames.met == 0 and code is frames.root
        return compile_graph(_read(graph, name, first), inputs)

    context = torch._dynamo.optimize(
        backend,
        recompile_limit=_NO_LIMIT,
        isolate_recompiles=True,
    )
    if not isinstance(context, OptimizeContext):
        raise RematError(
            "TorchDynamo is switched off (TORCHDYNAMO_DISABLE=1), and plans are made of its "
            "graphs; switch it on"
        )
    frames = _Frames(context.callback, settings, skipped, watched)
    context.callback = frames  # type: ignore[assignment]
    compiled = context(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        frames.met = 0
        try:
            return compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            raise error.inner_exception from None
        except RuntimeError as error:
            if not str(error).startswith(_TRACED) or not _traced_elsewhere():
                raise
            return run(*args, **kwargs)
        except AssertionError as error:
            if _UNGUARDED not in str(error):
                raise
            raise RematError(
                "the forward reads something that TorchDynamo cannot see change, such as an "
                f"attribute through a weakref.proxy ({str(error).rpartition('reason: ')[2]}); "
                "hold the object itself, or a weakref.ref that is called"
            ) from None

    return run


def _traced_elsewhere() -> bool:
    """Wait for the end of what another thread traces: Dynamo takes it to be this one."""
    with process_lock:
        return not is_fx_symbolic_tracing()


def found_in(graph: torch.fx.GraphModule, known: set[int]) -> Found:
    """Describe a graph within a frame that Dynamo is compiling, for whoever asked it to.

    `known` are the frames of the same function that were met before, and is added to.
    """
    current = CompileContext.current_compile_id()
    frame = -1 if current is None or current.frame_id is None else current.frame_id
    known.add(frame)
    return _read(graph, f"frame {frame}", len(known) == 1)


def is_last_compilation() -> bool:
    """Whether Dynamo will compile the frame at work no more, whatever it is called with."""
    current = CompileContext.current_compile_id()
    if current is None or current.frame_compile_id is None:
        return False
    limit = min(config.recompile_limit, config.accumulated_recompile_limit)
    return current.frame_compile_id + 1 >= limit > 1


def _read(graph: torch.fx.GraphModule, name: str, first: bool) -> Found:
    reason: Any = graph.compile_subgraph_reason
    broken = _describe(reason) if reason.graph_break else None
    return Found(graph, name, broken, first and broken is None)


def _describe(reason: Any) -> str:
    lines = reason.user_stack
    where = f" at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})" if lines else ""
    return f"{reason.reason.splitlines()[0]}{where}"


@contextmanager
def _patched() -> Iterator[None]:
    """Change what has no setting in Dynamo; only while `compile_lock` is held."""
    changes: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (misc.LoggingLoggerVariable, "call_method", _log_later),
        (misc.DebuggingVariable, "call_function", _warn_later),
        (builder, "process_automatic_dynamic", _static_tensors),
        (trace_rules, "check", _trace_modules),
        (logging.getLogger("torch._dynamo.variables.tensor"), "disabled", lambda _: True),
    )
    before = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for (owner, name, change), original in zip(changes, before, strict=True):
            setattr(owner, name, change(original))
        yield
    finally:
        for (owner, name, _), original in zip(changes, before, strict=True):
            setattr(owner, name, original)


def _log_later(original: Any) -> Any:
    """Let a logger's methods run after the graph in which they are called, instead of breaking it.

    Dynamo has this for `print`; for loggers it can only leave the call out, and lose the message.
    """

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(self.value, name, None)
        if not callable(method) or self.source is None:
            return original(self, tx, name, args, kwargs)
        level = getattr(logging, name.upper(), None)
        if isinstance(level, int) and not self.value.isEnabledFor(level):
            return ConstantVariable.create(None)
        later = misc.DebuggingVariable(method, source=AttrSource(self.source, name))
        if name in _QUERIES or kwargs or not later.can_reorder_logs(method, args, kwargs):
            return original(self, tx, name, args, kwargs)
        tx.debug_locals.append((later, list(args)))
        return ConstantVariable.create(None)

    return call_method


def _warn_later(original: Any) -> Any:
    """Let `print` and `warnings.warn` run later with whatever is known while compiling."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is warnings.warn:  # its category matters, its other arguments do not
            args = [*args[:2], *(item for key, item in kwargs.items() if key == "category")]
            kwargs = {}
        known = [self.can_reorder_logs(self.value, [a], {}) or _is_known(a) for a in args]
        if kwargs or not all(known):
            return original(self, tx, args, kwargs)
        tx.debug_locals.append((self, list(args)))
        return ConstantVariable.create(None)

    return call_function


def _is_known(variable: Any) -> bool:
    return bool(variable.is_python_constant()) or variable.source is not None


def _static_tensors(original: Any) -> Any:
    """Take tensors of other sizes as they are, and only numbers that change as numbers that do."""

    def process(tx: Any, name: str, entry: Any, **rest: Any) -> Any:
        return entry if isinstance(entry.size, tuple) else original(tx, name, entry, **rest)

    return process


def _trace_modules(original: Any) -> Any:
    """Compile forwards of torch's own modules as frames: an `nn.Sequential` may hold breaks."""

    def check(obj: Any, *rest: Any, **named: Any) -> Any:
        if (
            isinstance(obj, CodeType)
            and obj.co_name.startswith(("forward", "torch_dynamo_resume_in_forward"))
            and _TORCH_MODULES in obj.co_filename
            and not obj.co_filename.endswith("rnn.py")
        ):
            return False
        return original(obj, *rest, **named)

    return check
