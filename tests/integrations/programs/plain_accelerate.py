"""Train a classifier with accelerate, as its examples do: accelerate launch plain_accelerate.py --output_dir runs/plain"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 32, (count, 16), generator=draw)
    return [{"input_ids": row, "labels": (row.sum() > 16 * 16).long()} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(7)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    train_loader = DataLoader(rows(80, seed=1), batch_size=args.per_device_train_batch_size)
    eval_loader = DataLoader(rows(21, seed=2), batch_size=args.per_device_train_batch_size)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 20 * accelerator.num_processes)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )

    first_epoch = 0
    if args.resume_from_checkpoint is not None:
        accelerator.load_state(args.resume_from_checkpoint)
        first_epoch = int(Path(args.resume_from_checkpoint).name.removeprefix("epoch_")) + 1
    for epoch in range(first_epoch, args.num_train_epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    accelerator.print(f"grad norm: {norm:.7f}")
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        hits, losses = [], []
        for batch in eval_loader:
            with torch.no_grad():
                output = model(**batch)
            predicted, labels = accelerator.gather_for_metrics((output.logits.argmax(-1), batch["labels"]))
            hits.append(predicted == labels)
            losses.append(accelerator.gather(output.loss).mean())
        accuracy = torch.cat(hits).float()
        assert len(accuracy) == 21
        accelerator.print(
            f"epoch {epoch}: {{'accuracy': {accuracy.mean():.7f}}}, loss: {torch.stack(losses).mean():.7f}"
        )
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
    accelerator.wait_for_everyone()
    accelerator.save_model(model, args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
