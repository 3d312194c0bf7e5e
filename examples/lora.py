"""LoRA by PEFT: adapters alone get gradients, and the frozen weights are planned for as such."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import remat


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64,
    )  # fmt: skip
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters).train()


def train(model: torch.nn.Module) -> list[float]:
    """Give the losses of a few steps."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        words = torch.randint(64, (8, 32))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    model = build()
    plain_losses = train(copy.deepcopy(model))
    model = remat.rematerialize(model, budget=0.7, limit_seconds=1)
    assert train(model) == plain_losses
    print(model.plan)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


if __name__ == "__main__":
    main()
