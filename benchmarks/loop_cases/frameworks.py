"""Training by libraries: Trainer of transformers, Accelerate, PEFT; Lightning is on its own."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers
from torch import Tensor

from loop_cases.models import gpt2, square, tokens
from loop_cases.run import Kept, Run, state

__all__ = ["LOOPS", "accelerated", "adapted", "sentences", "trainer"]

Step = Callable[[], AbstractContextManager[Any]]


def sentences(count: int = 24, length: int = 16, first: int = 0) -> list[dict[str, Tensor]]:
    """Make sentences of one length, each its own label."""
    made = []
    for position in range(first, first + count):
        ids = tokens(position, size=1, length=length)[0]
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


class _Stepping(transformers.Trainer):  # type: ignore[misc]
    """Enters `step` around each forward and backward."""

    step: Step = nullcontext

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.step():
            return super().training_step(*args, **kwargs)  # type: ignore[no-any-return]


def trainer(
    model: Any, folder: Path, data: Any = None, step: Step = nullcontext, **options: Any
) -> Any:
    """Train by transformers' Trainer, and give it back; `options` are of `TrainingArguments`."""
    settings = {"max_steps": 3, "per_device_train_batch_size": 4} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, seed=0, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    made = _Stepping(model, arguments, train_dataset=data or sentences())
    made.step = step
    made.train()
    return made


def accelerated(
    model: Any,
    data: list[Tensor],
    wrap_last: Callable[[Any], Any] = lambda model: model,
    precision: str = "no",
    step: Step = nullcontext,
) -> tuple[Any, Any]:
    """Train by Accelerate, two batches to a step; `wrap_last` is done to the prepared model.

    Gives the model and the accelerator.
    """
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model = wrap_last(model)
    torch.manual_seed(1)
    for x in loader:
        with accelerator.accumulate(model):
            with step():
                output = model(x)
                assert output.dtype == torch.get_default_dtype()
                accelerator.backward(square(output))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model, accelerator


def adapted(model: Any) -> Any:
    """Give a model of transformers LoRA adapters, which alone are trained."""
    torch.manual_seed(0)
    gpt = model.config.model_type == "gpt2"
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, task_type="CAUSAL_LM", fan_in_fan_out=gpt,
        target_modules=["c_attn"] if gpt else ["q_proj", "v_proj"], init_lora_weights=False,
    )  # fmt: skip
    return peft.get_peft_model(model, settings).train()


def by_trainer(run: Run, **options: Any) -> Kept:
    """Train GPT-2 by the Trainer."""
    model = run.wrap(gpt2(run.size.width, run.size.depth))
    data = [ids for step in range(run.steps) for ids in sentences(4, run.words(step), 4 * step)]
    if run.draws:
        options["train_sampling_strategy"] = "sequential"  # the four of a step are of one length
    with tempfile.TemporaryDirectory() as folder:
        trainer(model, Path(folder), data, run.step, max_steps=run.steps, **options)
    return state(model)


def by_accelerate(run: Run, precision: str) -> Kept:
    """Train blocks by Accelerate."""
    data = [run.batch(step) for step in range(run.steps)]
    model, _ = accelerated(run.model(), data, precision=precision, step=run.step)
    return state(model)


def by_lightning(run: Run, inner: bool) -> Kept:
    """Train by Lightning, whose import takes two seconds: only where it is asked for."""
    module = importlib.import_module("loop_cases.by_lightning")
    return module.trained(run, inner)  # type: ignore[no-any-return]


def lora(run: Run) -> Kept:
    """Train adapters of a GPT-2."""
    model = run.wrap(adapted(gpt2(run.size.width, run.size.depth)))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01)
    torch.manual_seed(1)
    for step in range(run.steps):
        ids = run.tokens(step)
        optimizer.zero_grad()
        with run.step():
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return state(model)


LOOPS: dict[str, Callable[[Run], Kept]] = {
    "Trainer": by_trainer,
    "Trainer, bf16": partial(by_trainer, bf16=True, optim="sgd", learning_rate=0.1),
    "Accelerate": partial(by_accelerate, precision="no"),
    "Accelerate, bf16": partial(by_accelerate, precision="bf16"),
    "a LightningModule": partial(by_lightning, inner=False),
    "Lightning around an inner module": partial(by_lightning, inner=True),
    "LoRA": lora,
}
