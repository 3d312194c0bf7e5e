"""The one door to TorchDynamo, whose private names are in this folder alone.

`compile_frames` runs a function so that each graph that Dynamo finds in it is handed over, with
settings of ours that hold while frames of this function are compiled, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import config, trace_rules
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizeContext, cached_backends
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    TorchRuntimeError,
)
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardManagerWrapper
from torch._dynamo.pgo import CodeId, CodeState
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from remat.dynamo.deferred_inputs import reads_deferred
from remat.dynamo.graphs import (
    APART,
    EACH_TENSOR,
    WITHIN,
    DynamoGraph,
    name_of_frame,
    note_provenance,
    read_graph,
)
from remat.dynamo.growing_lists import GrowingLists
from remat.dynamo.inner_gradients import TRACED
from remat.dynamo.loops import Loops, check_lists, lists_of_modules
from remat.dynamo.nested_breaks import ALONE, NESTED, Across
from remat.dynamo.patches import patched
from remat.dynamo.reasons import ended_by, failure, first_lines, is_in_loop
from remat.errors import RematError
from remat_graph.torch import collector_at_rest, process_lock, quietly, symbols_kept

__all__ = ["compile_frames"]

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 30
_IN_A_ROW = 8  # calls that traced the same code anew, for no other sizes
_TRIES = 3
_TRACED = "Detected that you are using FX to symbolically trace"
_NO_TENSORS = "no tensor-related objects found in frame"
_SUPPRESSED = "an error was suppressed during compilation"
_KEEPS_FIRST = "automatic_dynamic_exclusion_guard"  # the first size has its own graph; torch 2.13
_UNGUARDED = "Guard failed on the same frame it was created"
_WARN = frozenset({print, warnings.warn})
_LOOKED_AT = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
_AS_IT_IS = ConvertFrameReturn(frame_exec_strategy=_LOOKED_AT, apply_to_code=False)


class _Held:
    """What runs a graph, as long as the model that it belongs to is there."""

    __slots__ = ("__weakref__", "graph")

    def __init__(self, graph: Callable[..., Any]) -> None:
        self.graph: Callable[..., Any] | None = graph

    def __call__(self, *inputs: Any) -> Any:
        assert self.graph is not None
        return self.graph(*inputs)


class _Frames:
    """What Dynamo calls for each frame: `compile_frame`, with settings of ours."""

    def __init__(
        self,
        compile_frame: Any,
        settings: dict[str, Any],
        skipped: Callable[[str], None],
        watched: torch.nn.Module | None,
        roots: set[CodeType],
        allow_rnn: Callable[[], bool],
        across: Across,
    ) -> None:
        functools.update_wrapper(self, compile_frame, updated=())
        self._torchdynamo_orig_backend = compile_frame  # by which Dynamo tells back ends apart
        self._settings = settings
        self._skipped = skipped
        self._allow_rnn = allow_rnn
        self._watched = None if watched is None else weakref.ref(watched)
        self.guards: WeakSet[GuardManagerWrapper] = WeakSet()
        self.graphs: WeakSet[_Held] = WeakSet()
        self._failures: Counter[CodeType] = Counter()
        self._alone: set[CodeType] = set()  # what Dynamo fails to go on from, behind a break
        self._in_loops: set[CodeType] = set()  # whose graphs break in one
        self.loops = Loops()
        self._across = across
        self._goes_on = across.asked
        self._numbers: defaultdict[CodeId, CodeState] = defaultdict(CodeState)
        self._lists = GrowingLists()
        self._traced: dict[CodeType, tuple[int, int]] = {}
        self.calls = 0
        self.met = 0
        self.has_graph = False
        self._reported: set[str] = set()
        self.code: CodeType | None = None
        self.name = ""
        self.roots = roots
        self.codes: set[CodeType] = set()

    def __call__(self, frame: Any, *rest: Any) -> Any:
        code = frame.f_code
        if self._failures[code] >= _TRIES or reads_deferred(frame.f_locals):
            return _AS_IT_IS
        met = self.met
        goes_on = self._goes_on and code not in self._alone
        result = self._compiled(frame, rest, NESTED if goes_on else ALONE)
        if result is None:
            self._alone.add(code)
            self.met = met
            result = self._compiled(frame, rest, ALONE)
        return result

    def _compiled(self, frame: Any, rest: Any, nested: dict[str, Any]) -> Any:
        """Compile a frame; `None` if that failed, and is to be tried without what is `nested`."""
        code = frame.f_code
        of_frame = {
            "allow_rnn": self._allow_rnn(),
            "skip_nnmodule_hook_guards": self._is_of_watched(frame),
        }
        with (
            quietly(),
            collector_at_rest(),
            compile_lock,
            config.patch(self._settings | nested | of_frame),
            symbols_kept(),
            patched(
                self._skipped,
                self._numbers,
                self._lists,
                as_before=nested is ALONE,
                loops=self.loops if code in self._in_loops else None,
            ),
        ):
            before = self.code, self.name
            breaks, unsupported = (counters[k].copy() for k in ("graph_break", "unimplemented"))
            self.has_graph = False
            self.code, self.name = code, name_of_frame(frame)
            try:
                result = self._torchdynamo_orig_backend(frame, *rest)
            except (AssertionError, InternalTorchDynamoError, TorchRuntimeError) as error:
                # A defect of Dynamo's, or an error of the user's, which eager tells in its words.
                if _UNGUARDED in str(error):
                    raise
                if nested is not ALONE:
                    return None
                self._failures[code] += 1
                self._skipped(f"{_place(frame)} runs as it is: {failure(error)}")
                return _AS_IT_IS
            finally:
                self.code, self.name = before
                self.met += 1
            if result.guarded_code is not None:
                self.codes.add(code)
                self.guards.add(result.guarded_code.guard_manager)
                self._warn_of_tracing(code)
            new = counters["graph_break"] - breaks
            self._across.see(new)
            if not self.has_graph:
                self._tell(new)
            if result.guarded_code is not None or trace_rules.check(code):
                return result
        ended = list(counters["unimplemented"] - unsupported)
        if code not in self._in_loops and any(map(is_in_loop, ended)):
            self._in_loops.add(code)
            self.met -= 1
            return self._compiled(frame, rest, nested)
        # Dynamo would leave the code alone from now on, in every model, even if what failed was an
        # error of the user's: we count, for this model.
        self._failures[code] += 1
        reason = getattr(result, "skip_reason", None)  # torch 2.11 gives none
        if reason == _SUPPRESSED:
            reason = ended_by(ended) or reason
        if reason and reason != _NO_TENSORS:
            self._skipped(f"{_place(frame)} runs as it is: {reason}")
        return _AS_IT_IS

    @contextlib.contextmanager
    def forgiving(self) -> Iterator[None]:
        """Do not count failures in a call that raises, as one of other sizes than fit together."""
        before = self._failures.copy(), self._alone.copy()
        try:
            yield
        except Exception:  # a call that only prepares ends by no error
            self._failures, self._alone = before
            raise

    def _tell(self, breaks: Iterable[str]) -> None:
        """Say why there is no graph before a break; the frames around that one break there, too."""
        for reason in map(first_lines, breaks):
            if reason not in self._reported:
                self._reported.add(reason)
                self._skipped(reason)

    def _warn_of_tracing(self, code: CodeType) -> None:
        """Warn once of code that is traced anew at each call, with what differs each time."""
        metrics = get_compilation_metrics()
        reason = metrics[-1].recompile_reason if metrics else None
        if reason is None or "size mismatch at" in reason:
            return
        last, in_a_row = self._traced.get(code, (0, 0))
        if last != self.calls:
            in_a_row = in_a_row + 1 if last == self.calls - 1 else 1
            self._traced[code] = self.calls, in_a_row
            if in_a_row == _IN_A_ROW:
                logger.warning(
                    "the forward was traced anew in each of the last %d calls, which is slow; what "
                    "was expected, and differs each time: %s",
                    in_a_row,
                    " ".join(reason.partition(": ")[2].splitlines()[0].split()),
                )

    def _is_of_watched(self, frame: Any) -> bool:
        """Whether a frame is the forward of the module whose hooks the caller watches."""
        return self._watched is not None and frame.f_locals.get("self") is self._watched()


def _place(frame: Any) -> str:
    return f"{name_of_frame(frame)} at {frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"


def compile_frames(
    function: Callable[..., Any],
    compile_graph: Callable[[DynamoGraph, Sequence[Any]], Callable[..., Any]],
    skipped: Callable[[str], None],
    *,
    across: Across,
    allow_rnn: Callable[[], bool] = lambda: True,
    model: torch.nn.Module | None = None,
    watched: torch.nn.Module | None = None,
) -> Callable[..., Any]:
    """Give `function` with each graph that Dynamo finds replaced by what `compile_graph` makes.

    A size is taken as it is until a call has another: then it is a symbol of the graph. What
    `compile_graph` raises comes out unchanged. `skipped` is called with what runs as it is,
    and why; those that they call have graphs of their own. `allow_rnn` is asked at each frame
    whether RNNs are part of graphs. `across` is told of gradients that are asked for across breaks;
    if it was before, graphs go on behind those. Operations of submodules of `model` are named after
    them. `watched` is a module, the only one of its class, whose submodules have hooks, or none,
    where they had them in earlier calls: its forward does not check that again. What
    Dynamo compiled goes with the function that is returned.

    Raises:
        RematError: if Dynamo is switched off.
    """
    settings = {
        "accumulated_recompile_limit": _NO_LIMIT,
        "allow_unspec_int_on_nn_module": True,  # a counter that changes compiles anew once
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": True,
        "capture_dynamic_output_shape_ops": False,
        "capture_scalar_outputs": False,
        "fail_on_recompile_limit_hit": False,
        "invalidate_compile_context_weakrefs": True,  # else no parameter can be swapped
        "optimize_ddp": False,
        "recompile_limit": _NO_LIMIT,
        "reorderable_logging_functions": set(_WARN),
        "specialize_float": False,
        "suppress_errors": False,
        "use_numpy_random_stream": True,  # else its random numbers come from torch's generator
        **TRACED,
        **EACH_TENSOR,
    }
    if hasattr(config, _KEEPS_FIRST):
        settings[_KEEPS_FIRST] = True

    whole = None if model is None else weakref.ref(model)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        frames.has_graph = True
        first = frames.met == 0 and frames.code in frames.roots
        note_provenance(graph, None if whole is None else whole())
        held = _Held(compile_graph(read_graph(graph, frames.name, first), inputs))
        frames.graphs.add(held)
        return held

    context = torch._dynamo.optimize(backend, **APART)
    if not isinstance(context, OptimizeContext):
        raise RematError(
            "TorchDynamo is switched off (TORCHDYNAMO_DISABLE=1), and plans are made of its "
            "graphs; switch it on"
        )
    codes = [WITHIN]
    codes += [code for each in _run_by(function, model) for code in _codes_of(each)]
    roots = {WITHIN, next(_codes_of(function), WITHIN)}
    frames = _Frames(context.callback, settings, skipped, watched, roots, allow_rnn, across)
    context.callback = frames  # type: ignore[assignment]
    compiled = context(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for code in list(frames.codes) if frames.calls else codes:  # another thread may add
            set_code_exec_strategy(code, _LOOKED_AT)
        frames.met = 0
        frames.calls += 1
        here = None if whole is None else whole()
        looks = frames.loops.went_on or frames.calls == 1
        before = lists_of_modules(here) if looks and here is not None else None
        try:
            with frames.forgiving():
                returned = compiled(*args, **kwargs)
            if frames.loops.went_on and here is not None and before is not None:
                check_lists(before, here)
            return returned
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

    weakref.finalize(
        run, _released_outputs, frames.guards, frames.graphs, id(backend)
    ).atexit = False
    return run


def _run_by(function: Any, model: torch.nn.Module | None) -> Iterator[Any]:
    """Yield functions that may have graphs when `function` is run."""
    yield function
    for part in () if model is None else model.modules():
        if not isinstance(part, torch.jit.ScriptModule):  # whose forward is no code of Python's
            yield type(part).forward
        yield vars(part).get("forward")
    yield from vars(torch.nn.functional).values()


def _codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function and of those that it wraps, unless Dynamo is to leave it alone.

    Code in which TorchDynamo has found no graph, as that of torch's own modules beside a graph
    break, it passes by for whoever compiles: for us, too, if another `torch.compile` was first.
    """
    inner = function.__func__ if isinstance(function, MethodType) else function
    if getattr(inner, "_torchdynamo_disable", False):
        return
    if isinstance(code := getattr(inner, "__code__", None), CodeType):
        yield code
    if (wrapped := getattr(inner, "__wrapped__", None)) is not None:
        yield from _codes_of(wrapped)


def _released_outputs(
    guards: WeakSet[GuardManagerWrapper], graphs: WeakSet[_Held], backend: int
) -> None:
    """Empty what Dynamo keeps on code objects, which outlive a model: its graphs and plans.

    Entries are taken out as Dynamo does it where an object dies that it guards by identity. Names
    that a broken frame left among the globals of its module stay, and hold nothing any more.
    """
    cached_backends.pop(backend, None)
    for guard in guards:
        if guard.cache_entry is not None and guard.extra_state is not None:
            reason = "the rematerialized model is gone"
            guard.extra_state.invalidate(guard.cache_entry, DeletedGuardManagerWrapper(reason))
    for held in graphs:
        held.graph = None


def _traced_elsewhere() -> bool:
    """Wait for the end of what another thread traces: Dynamo takes it to be this one."""
    with process_lock:
        return not is_fx_symbolic_tracing()
