"""What a command is about: `FILE.py:factory`, a model type of transformers, or a saved graph.

A factory returns `(model, args)` or `(model, args, kwargs)`; arguments are those of `remat.plan`.
It is called with what `--batch`, `--seq` and `--set` give, by name. A model type is built from its
configuration, without weights, and called with tokens and labels, or pixels and labels.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.errors import RematError

if TYPE_CHECKING:
    import torch

    from remat_graph.torch import Costs

__all__ = ["Device", "Example", "Precision", "Target", "read_settings"]

_BATCH, _LENGTH = 8, 1024


class Device(enum.StrEnum):
    """The devices of `remat.DEVICES`."""

    H100 = "h100"
    A100 = "a100"
    L4 = "l4"
    RTX_4090 = "4090"
    MI300X = "mi300x"


class Precision(enum.StrEnum):
    """Types of torch's that a model type can be of."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True)
class Example:
    """A model and an example call; as text, its class and the sizes of its tensors."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        arguments = [("", value) for value in self.args]
        arguments += [(f"{name}=", value) for name, value in self.kwargs.items()]
        call = ", ".join(name + _said(value) for name, value in arguments)
        return f"{type(self.model).__name__}({call})"


@dataclass(frozen=True, slots=True)
class Target:
    """What was named, with its sizes; `batch` and `seq` are `None` where they were not given."""

    name: str
    batch: int | None = None
    seq: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def with_batch(self, batch: int) -> Target:
        """Give the same of another batch."""
        return replace(self, batch=batch)

    def check(self) -> None:
        """Refuse what can name no model, before torch is imported.

        Raises:
            RematError: if it is a file without a function, or a saved graph or plan.
            OSError: if its file does not exist.
        """
        file, colon, _ = self.name.rpartition(":")
        if self.name.endswith(".py"):
            raise RematError(f"{self.name} is a file; name a function of it: {self.name}:FUNCTION")
        if self.name.endswith(".json"):
            raise RematError(
                f"{self.name} is no model; saved graphs and plans are for solve, check, tradeoff "
                f"and compare, plans for explain, report and trace, too"
            )
        if colon and file.endswith(".py") and not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {file!r}")

    def build(self, costs: Costs) -> Example:
        """Make the model and the call, without data unless they are to be measured.

        Raises:
            RematError: if there is no such model, or it cannot be made.
        """
        import torch

        file, colon, factory = self.name.rpartition(":")
        with nullcontext() if costs == "measure" else torch.device("meta"):
            try:
                if colon and file.endswith(".py"):
                    return _from_file(Path(file), factory, self._arguments())
                return _from_transformers(self)
            except (RematError, OSError):
                raise
            except SystemExit as error:  # a script that does its work when it is imported
                raise RematError(
                    f"{self.name} could not be made: its file ends Python (exit code {error.code})"
                    f'; what it does as a script belongs below if __name__ == "__main__":'
                ) from error
            except Exception as error:
                reason = f"{type(error).__name__}: {error}{_line(error, file)}"
                is_dry = costs != "measure" and isinstance(error, RuntimeError)  # of torch's
                hint = "; with --measure it is made with its data" if is_dry else ""
                raise RematError(f"{self.name} could not be made: {reason}{hint}") from error

    def _arguments(self) -> dict[str, Any]:
        sizes = {"batch": self.batch, "seq": self.seq}
        return {**{k: v for k, v in sizes.items() if v is not None}, **self.settings}


def _said(value: Any) -> str:
    if not hasattr(value, "shape"):
        return type(value).__name__
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return f"{sizes} {str(value.dtype).removeprefix('torch.')}"


def read_settings(entries: Sequence[str] | None) -> dict[str, Any]:
    """Read `key=value`; a value is a Python literal, or else a string.

    Raises:
        RematError: if an entry has no `=`.
    """
    read: dict[str, Any] = {}
    for entry in entries or ():
        key, equals, value = entry.partition("=")
        if not equals or not key.isidentifier():
            raise RematError(f"--set {entry!r}; give it as key=value")
        try:
            read[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            read[key] = value
    return read


def _line(error: Exception, file: str) -> str:
    """Give the last line of a file that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(Path(file).resolve())]
    return f" ({file}, line {lines[-1]})" if lines else ""


def _from_file(path: Path, name: str, arguments: Mapping[str, Any]) -> Example:
    path = path.resolve()
    sys.path.insert(0, str(path.parent))  # as Python does for a file that it runs
    spec = importlib.util.spec_from_file_location("remat_target", path)
    if spec is None or spec.loader is None:
        raise RematError(f"{str(path)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise RematError(f"{str(path)!r} has no function {name!r}")
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise RematError(
            f"{name}() of {str(path)!r} does not take what is given: {error}"
        ) from None
    return _read(factory(**arguments), f"{name}() of {str(path)!r}")


def _read(returned: Any, name: str) -> Example:
    import torch

    is_call = isinstance(returned, tuple) and 2 <= len(returned) <= 3
    if is_call and isinstance(returned[0], torch.nn.Module):
        model, args, *rest = returned
        kwargs = rest[0] if rest else {}
        if isinstance(kwargs, Mapping):
            as_tuple = tuple(args) if isinstance(args, tuple | list) else (args,)
            return Example(model, () if args is None else as_tuple, dict(kwargs))
    raise RematError(f"{name} must return (model, args) or (model, args, kwargs)")


def _from_transformers(target: Target) -> Example:
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError:
        raise RematError(
            f"{target.name!r} is no FILE.py:factory, and transformers, which may know a model type "
            f"of this name, is not installed"
        ) from None
    transformers.logging.set_verbosity_error()  # what it warns of is not the reader's doing
    try:
        config = transformers.AutoConfig.for_model(target.name, **target.settings)
    except ValueError:
        raise RematError(
            f"{target.name!r} is neither FILE.py:factory nor a model type of transformers, such as "
            f"gpt2, llama, bert, t5 or vit"
        ) from None
    settings = {*type(config)().to_dict(), *type(config).attribute_map}
    unknown = sorted(target.settings.keys() - settings)
    if unknown:
        raise RematError(f"the configuration of {target.name} has no {', '.join(unknown)}")
    for family, mapping, call in (
        ("Seq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _tokens),
        ("MaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _tokens),
        ("CausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _tokens),
        ("ImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _pixels),
    ):
        if target.name in getattr(modeling_auto, mapping):
            config.use_cache = False
            if family == "Seq2SeqLM" and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
            import torch

            automatic = getattr(transformers, f"AutoModelFor{family}")
            model = automatic.from_config(config, dtype=getattr(torch, target.dtype)).train()
            return Example(model, (), call(config, target))
    raise RematError(
        f"{target.name} makes neither language nor classes of images; write a FILE.py:factory"
    )


def _tokens(config: Any, target: Target) -> dict[str, Any]:
    import torch

    longest = getattr(config, "max_position_embeddings", None) or _LENGTH
    length = target.seq or min(_LENGTH, longest)
    tokens = torch.zeros(target.batch or _BATCH, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def _pixels(config: Any, target: Target) -> dict[str, Any]:
    import torch

    if target.seq is not None:
        raise RematError(f"{target.name} takes images; --seq is for language")
    config = getattr(config, "vision_config", None) or config
    batch = target.batch or _BATCH
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, tuple | list) else (side, side)
    pixels = torch.zeros(
        batch, config.num_channels, height, width, dtype=getattr(torch, target.dtype)
    )
    return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
