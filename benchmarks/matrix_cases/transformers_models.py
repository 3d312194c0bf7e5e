"""The architectures of transformers, tiny, from their configurations, with random weights."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from typing import Any

import torch
from torch import nn

from matrix_cases.architectures import ENTRIES, HEADS, INPUTS
from matrix_cases.case import Built, Case, NotRunnable, seed_everything, tensors_in
from matrix_cases.inputs import Recipe, make_inputs, recipes
from matrix_cases.shrinking import override, shrink

__all__ = ["case", "names"]

MOST_PARAMETERS = 8_000_000
MOST_ATTEMPTS = 12
_HEAD_ORDER = (
    "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM",
    "MULTIMODAL_LM", "CTC", "RNNT", "TDT", "AUDIO_CLASSIFICATION", "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION", "TIME_SERIES_PREDICTION", "IMAGE_TO_IMAGE", "PRETRAINING",
    "QUESTION_ANSWERING", "SEQUENCE_CLASSIFICATION", "MASK_GENERATION", "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING", "IMAGE_MATTING", "POSE_ESTIMATION", "TEXT_RECOGNITION",
    "TABLE_RECOGNITION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "VISUAL_QUESTION_ANSWERING",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "BACKBONE", "",
)  # fmt: skip
_MISMATCH = re.compile(r"tokens:\s*(\d+).{0,40}features:?\s*(\d+)", re.DOTALL)


def _mapping(head: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    middle = "" if head in ("", "PRETRAINING", "BACKBONE") else "FOR_"
    middle = {"PRETRAINING": "FOR_", "BACKBONE": "FOR_"}.get(head, middle)
    name = f"MODEL_{middle}{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES"
    return dict(getattr(modeling_auto, name))


@functools.cache
def _table() -> dict[str, tuple[str, str, str]]:
    """Choose for each package of models a type of configuration, a head, and the head's class."""
    from transformers.models.auto import configuration_auto  # noqa: PLC0415

    packages: dict[str, list[str]] = {}
    for key in configuration_auto.CONFIG_MAPPING_NAMES:
        package = configuration_auto.model_type_to_module_name(key)
        packages.setdefault(package, []).append(key)
    mappings = {head: _mapping(head) for head in _HEAD_ORDER}
    table: dict[str, tuple[str, str, str]] = {}
    for package, keys in sorted(packages.items()):
        of_that_name = [key for key in keys if key.replace("-", "_") == package]
        own = of_that_name + [key for key in keys if key not in of_that_name]
        heads = [HEADS[package]] if package in HEADS else _HEAD_ORDER
        found = ((key, head) for key in own for head in heads if key in mappings[head])
        key, head = next(found, (None, ""))
        if key is None or package.startswith("deprecated"):
            continue
        name = mappings[head][key]
        table[package] = key, head, name if isinstance(name, str) else name[0]
    return table


def names() -> list[str]:
    """List the packages that have a model."""
    return [f"transformers/{package}" for package in _table()]


def _config(package: str) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415

    key = _table()[package][0]
    config_class = type(AutoConfig.for_model(key))
    entries = shrink(config_class().to_dict())
    override(entries, ENTRIES.get(package, {}))
    for dropped in ("transformers_version", "_name_or_path", "architectures", "dtype"):
        entries.pop(dropped, None)
    return config_class.from_dict(entries)


def _model(package: str) -> tuple[nn.Module, Any]:
    import transformers  # noqa: PLC0415

    config = _config(package)
    model_class = getattr(transformers, _table()[package][2])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotRunnable(f"{size / 1e6:.0f} million parameters after shrinking")
    model: nn.Module = model_class(_config(package))
    model.train()
    return model, config


def _call(package: str, model: nn.Module, config: Any, recipe: Recipe) -> dict[str, Any]:
    inputs = make_inputs(model, config, _table()[package][1], recipe)
    if package in INPUTS:
        inputs.update(INPUTS[package](config, inputs))
        inputs = {name: value for name, value in inputs.items() if value is not None}
    return inputs


def _build(package: str, recipe: Recipe) -> Built:
    model, config = _model(package)
    return Built(model, (), _call(package, model, config, recipe), inputs=str(recipe))


def _attempt(package: str, recipe: Recipe) -> None:
    """Run one step of a model that is thrown away.

    Raises:
        Exception: whatever eager raises.
    """
    seed_everything(0)
    built = _build(package, recipe)
    loss = built.loss(built.model(**built.kwargs))
    loss.backward()  # type: ignore[no-untyped-call]
    if not loss.isfinite():
        raise NotRunnable("the loss is not finite")
    gradients = [p.grad for p in built.model.parameters() if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in tensors_in(gradients)):
        raise NotRunnable("a gradient is not finite")


def _choose(package: str) -> Recipe:
    """Find the fullest inputs with which the model runs in eager.

    Raises:
        NotRunnable: with the reason of the first that was tried.
    """
    seed_everything(0)
    try:
        model, _ = _model(package)
    except Exception as error:
        raise NotRunnable(f"cannot be built: {_line(error)}") from error
    reasons: list[str] = []
    pending = list(recipes(inspect.signature(model.forward).parameters))
    while pending and len(reasons) < MOST_ATTEMPTS:
        recipe = pending.pop(0)
        try:
            _attempt(package, recipe)
        except Exception as error:
            reasons.append(_line(error))
            mismatch = _MISMATCH.search(str(error))
            if mismatch and recipe.images and not recipe.image_tokens:
                count = int(mismatch[2])
                count = count // 3 if count % 3 == 0 else count
                pending.insert(0, Recipe(recipe.labels, True, recipe.layout, count))
        else:
            return recipe
    raise NotRunnable(reasons[0] + (f" / {reasons[-1]}" if len(reasons) > 1 else ""))


def _line(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        place = f" [{os.path.basename(code.co_filename)}:{trace.tb_lineno}]"  # noqa: PTH119
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def case(package: str) -> Case:
    """Make the case of one package of transformers.

    Raises:
        KeyError: if there is none.
    """
    if package not in _table():
        raise KeyError(package)

    def variants() -> list[tuple[str, Any]]:
        _quiet()
        recipe = _choose(package)
        return [("", functools.partial(_build, package, recipe))]

    return Case(f"transformers/{package}", variants)


def _quiet() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    assert "torch" in sys.modules
