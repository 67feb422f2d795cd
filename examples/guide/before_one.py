"""One process."""

import torch
from model import Model, batches
from torch.nn.functional import cross_entropy


def main() -> list[float]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, labels in batches(0, 1):
        loss = cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"loss {loss.item():.5f}")
    return losses


if __name__ == "__main__":
    main()
