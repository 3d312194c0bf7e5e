"""What has no setting in TorchDynamo, changed while frames of ours are compiled."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._dynamo import guards, output_graph, pgo, side_effects, symbolic_convert, trace_rules
from torch._dynamo.exc import Unsupported
from torch._dynamo.pgo import CodeId, CodeState
from torch._dynamo.variables import (
    TensorVariable,
    builder,
    builtin,
    higher_order_ops,
    misc,
    nn_module,
)
from torch._dynamo.variables import torch as torch_variables
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedDictVariable
from torch._guards import GuardSource
from torch._logging._internal import log_state

from remat.dynamo.bounded_deques import know_bound, write_within_bound
from remat.dynamo.cached_draws import break_where_it_draws
from remat.dynamo.custom_functions import break_without_zeros
from remat.dynamo.drawn_numbers import DrawnNumbers
from remat.dynamo.growing_lists import GrowingLists
from remat.dynamo.inner_gradients import (
    allow_made_before,
    break_at_backward,
    leave_out_leaves,
    note_switches,
)
from remat.dynamo.lazy_modules import break_at_first_call
from remat.dynamo.loops import Loops
from remat.dynamo.nested_breaks import go_on_only_in_calls, note_call
from remat.dynamo.numpy_values import NumpyValues
from remat.dynamo.ordered_dicts import break_at_own_items
from remat.dynamo.own_methods import breaks_at_own_methods
from remat.dynamo.read_numbers import ReadNumbers
from remat.dynamo.telling import log_later, share_what_is_told, warn_later

__all__ = ["patched"]

_TORCH_MODULES = str(Path(torch.nn.modules.__file__).parent)
_TORCH_FUNCTIONS = torch.nn.functional.__file__
_BUILTINS = "BuiltinVariable", "GetAttrBuiltinVariable", "HasAttrBuiltinVariable"  # torch 2.13
_CHECK_LEAVES = "_check_requires_grad_intermediate_outputs"  # torch 2.11 breaks at every such leaf
_BACKWARD = "method_backward"  # traced as `autograd.grad` is, by the same setting
_ITEM = "method_item"
_OF_FUNCTION = "trace_backward_graph"  # of a custom `autograd.Function`
_MADE_BEFORE = "_collect_all_grad_fns"  # of inputs, which a gradient may not come to
_GO_ON = "should_compile_partial_graph", "_can_speculate_comprehension_nested"  # behind a break
_IN_LOOP = "maybe_has_backedge"


@contextmanager
def patched(
    report_break: Callable[[str], None],
    numbers: defaultdict[CodeId, CodeState],
    lists: GrowingLists,
    *,
    as_before: bool,
    loops: Loops | None,
) -> Iterator[None]:
    """Change what has no setting in Dynamo; only while `compile_lock` is held.

    `report_break` is called with what is checkpointed and cannot be one graph, and why. `numbers`
    are the numbers and sizes that were seen to change, which Dynamo keeps for all models together:
    another model of the same class, with other widths, would have them as symbols. `lists` are
    those that were seen to grow. `as_before`, breaks end the graphs of all callers. `loops` go on
    behind a break, if they are given.
    """
    drawn, of_numpy = DrawnNumbers(), NumpyValues()
    changes: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (misc.LoggingLoggerVariable, "call_method", log_later),
        (misc.DebuggingVariable, "call_function", warn_later),
        (pgo, "get_code_state", lambda _: lambda: numbers),
        (trace_rules, "check", _trace_modules),
        (
            builder.VariableBuilder,
            "_wrap",
            lambda _wrap: of_numpy.wrap(drawn.draw(know_bound(lists.wrap(_wrap)))),
        ),
        (builder, "is_int_specialization_case", _let_globals_change),
        (side_effects.SideEffects, "codegen_update_mutated", write_within_bound),
        (UserDefinedDictVariable, "call_method", break_at_own_items),
        (UserDefinedClassVariable, "call_method", break_at_own_items),
        (misc.SuperVariable, "call_method", break_at_own_items),
        *breaks_at_own_methods(),
        (nn_module, "initialize_lazy_module", break_at_first_call),
        (WrapperUserFunctionVariable, "call_function", break_where_it_draws),
        (misc.NumpyVariable, "call_function", of_numpy.call),
        (
            output_graph.SubgraphTracer,
            "create_proxy",
            lambda create_proxy: of_numpy.watch(drawn.watch(create_proxy)),
        ),
        (
            higher_order_ops.CheckpointHigherOrderVariable,
            "_call_function",
            lambda original: _tell_of_checkpoint(original, report_break),
        ),
        (logging.getLogger("torch._dynamo.variables.tensor"), "disabled", lambda _: True),
        (logging.getLogger("torch._guards"), "disabled", lambda _: True),  # what it tells is raised
        (symbolic_convert, "get_funcname", _named_in_logs),
        (guards, "profile_guard_manager", lambda _: lambda *rest: 0.0),  # empties the CPU's caches
    )
    for kind in _BUILTINS:
        if hasattr(builtin, kind):
            changes += ((getattr(builtin, kind), "call_function", of_numpy.ask),)
    if hasattr(higher_order_ops.AutogradFunctionApplyVariable, _OF_FUNCTION):
        of_function = higher_order_ops.AutogradFunctionApplyVariable
        changes += ((of_function, _OF_FUNCTION, note_switches),)
        changes += ((of_function, "trace_forward_graph", break_without_zeros),)
    if hasattr(TensorVariable, _ITEM):
        changes += ((TensorVariable, _ITEM, ReadNumbers().read),)
    if hasattr(TensorVariable, _BACKWARD):
        changes += ((TensorVariable, _BACKWARD, break_at_backward),)
    if hasattr(torch_variables, _MADE_BEFORE) and not as_before:
        changes += ((torch_variables, _MADE_BEFORE, allow_made_before),)
    frame, notes = symbolic_convert.InstructionTranslatorBase, list[Callable[[Any], Any]]()
    if loops is not None and hasattr(frame, _IN_LOOP):
        changes += ((frame, _IN_LOOP, loops.go_on),)
        notes.append(loops.iterate_over_tuples)
    called = symbolic_convert.InliningInstructionTranslator
    changes += ((called, "__init__", share_what_is_told),)
    if not as_before:
        notes.append(note_call)
        changes += tuple((called, name, go_on_only_in_calls) for name in _GO_ON)
    if hasattr(output_graph.OutputGraph, _CHECK_LEAVES):
        changes += ((output_graph.OutputGraph, _CHECK_LEAVES, leave_out_leaves),)
    if notes:
        changes += ((frame, "call_function", lambda original: reduce(_applied, notes, original)),)
    before = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for (owner, name, change), original in zip(changes, before, strict=True):
            setattr(owner, name, change(original))
        yield
    finally:
        for (owner, name, _), original in zip(changes, before, strict=True):
            setattr(owner, name, original)


def _applied(original: Any, change: Callable[[Any], Any]) -> Any:
    return change(original)


def _let_globals_change(original: Any) -> Any:
    """Let a number in a global variable be a symbol once it has changed, as one of a module."""

    def is_special(value: Any, source: Any) -> bool:
        return source.guard_source is not GuardSource.GLOBAL and original(value, source)

    return is_special


def _trace_modules(original: Any) -> Any:
    """Compile forwards of torch's own modules as frames: an `nn.Sequential` may hold breaks.

    So may functions of `torch.nn.functional`, such as one that checks its input's values.
    """

    def check(obj: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(obj, CodeType) and (obj.co_filename == _TORCH_FUNCTIONS or _is_forward(obj)):
            return False
        return original(obj, *rest, **named)

    return check


def _is_forward(code: CodeType) -> bool:
    return (
        code.co_name.startswith(("forward", "torch_dynamo_resume_in_forward"))
        and _TORCH_MODULES in code.co_filename
        and not code.co_filename.endswith("rnn.py")
    )


def _named_in_logs(original: Any) -> Any:
    """Find functions' names, for which whole source files are parsed, only if a log shows them."""
    is_on: Callable[[str], bool] = log_state.is_artifact_enabled
    return original if is_on("trace_call") or is_on("trace_source") else lambda *_: None


def _tell_of_checkpoint(original: Any, report_break: Callable[[str], None]) -> Any:
    """Say which call of `torch.utils.checkpoint` breaks the graph: all within runs as it is then.

    Dynamo runs it without looking into it, and its reason names the line within alone.
    """

    def call_function(self: Any, tx: Any, *rest: Any) -> Any:
        try:
            return original(self, tx, *rest)
        except Unsupported as error:
            line = tx.frame_summary()
            reason = str(error).strip().splitlines()[0]
            report_break(
                f"what torch.utils.checkpoint calls at {line.filename}:{line.lineno} "
                f"({line.line}) runs as it is, its memory is not planned: it cannot be one graph "
                f"({reason}). Leave the checkpoint out, or take the break out of it"
            )
            raise

    return call_function
