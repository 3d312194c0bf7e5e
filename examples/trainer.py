"""The Trainer of transformers: hand it the rematerialized model."""

import copy
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def train(model: GPT2LMHeadModel) -> float:
    """Give the loss after a few steps."""
    words = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": sentence, "labels": sentence} for sentence in words]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=3, use_cpu=True, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=data).train().training_loss


def main() -> None:
    model = build()
    plain_loss = train(copy.deepcopy(model))
    model = remat.rematerialize(model, budget=0.7, limit_seconds=1)
    assert train(model) == plain_loss
    print(model.plan)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


if __name__ == "__main__":
    main()
