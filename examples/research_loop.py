"""Research loops on any mesh: torchrun --nproc-per-node 2 examples/research_loop.py dp_shard=2

Two models in one loop (a GAN), a teacher that is the average of its student's weights, and an evaluation of both.
Another mesh is another argument: tp=2, dp_replicate=2, dp_shard=2,tp=2, or none for one process. The numbers stay the
same.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshpar

LAYOUT = meshpar.ModelLayout(tensor={"0": "colwise", "2": "rowwise"})  # of net, for tp
BATCH, NOISE, STEPS = 64, 8, 20


def net(inputs: int, outputs: int) -> nn.Module:
    """A small network of two layers."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.SiLU(), nn.Linear(32, outputs))


def placed(mesh: str, module: nn.Module, seed: int) -> meshpar.Parallelized:
    """Place a module that was made on the meta device on the mesh."""
    passes: list[meshpar.Pass] = [meshpar.TensorParallel()] if "tp" in mesh else []
    if "dp_shard" in mesh:
        passes += [meshpar.HybridShard() if "dp_replicate" in mesh else meshpar.FullyShard()]
    elif "dp_replicate" in mesh:
        passes += [meshpar.Replicate()]
    return meshpar.Plan(mesh, passes).apply(module, LAYOUT).materialize(seed=seed)


def rows(values: torch.Tensor, par: meshpar.Parallelized) -> torch.Tensor:
    """This data rank's rows of a batch that is the same on every mesh."""
    return values[par.data_rank :: par.data_size]


def mean(value: torch.Tensor, par: meshpar.Parallelized) -> float:
    """The mean over all data ranks."""
    return float(par.data_sum(value.detach()) / par.data_size)


def gan(mesh: str) -> dict[str, float]:
    """Train two models in turn: points on a circle against a generator of points."""
    with torch.device("meta"):
        models = net(NOISE, 2), net(2, 1)
    makes, judges = (placed(mesh, model, seed) for seed, model in enumerate(models))
    optimizers = [torch.optim.Adam(par.module.parameters(), lr=1e-2) for par in (makes, judges)]
    losses = [torch.zeros(()), torch.zeros(())]
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        angles = 6.2832 * torch.rand(BATCH, generator=draw)
        real = rows(torch.stack([angles.cos(), angles.sin()], 1), judges)
        noise = rows(torch.randn(BATCH, NOISE, generator=draw), makes)
        with torch.no_grad():
            fake = makes.module(noise)
        scores = judges.module(torch.cat([real, fake]))[:, 0]
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
        losses[0] = F.binary_cross_entropy_with_logits(scores, truth)
        losses[0].backward()
        optimizers[1].step()
        scores = judges.module(makes.module(noise))[:, 0]
        losses[1] = F.binary_cross_entropy_with_logits(scores, torch.ones(len(scores)))
        losses[1].backward()
        optimizers[0].step()
        for optimizer in optimizers:  # the generator's loss left gradients in the other model
            optimizer.zero_grad()
    return {"judge": mean(losses[0], judges), "generator": mean(losses[1], makes)}


def teacher(mesh: str) -> dict[str, float]:
    """Train a student on noisy labels and on the average of its own weights (mean teacher), and evaluate both."""
    with torch.device("meta"):
        model = net(NOISE, 4)
    par = placed(mesh, model, 2)
    average = par.averaged(0.9)
    optimizer = torch.optim.Adam(par.module.parameters(), lr=1e-2)

    def drawn(seed: int, wrong: float) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        inputs = torch.randn(BATCH, NOISE, generator=draw)
        labels = inputs[:, :4].argmax(1)
        noisy = torch.rand(BATCH, generator=draw) < wrong
        return rows(inputs, par), rows(torch.where(noisy, torch.randint(4, (BATCH,), generator=draw), labels), par)

    for step in range(STEPS):
        inputs, labels = drawn(step, wrong=0.3)
        with average.swapped(), torch.no_grad():
            taught = par.module(inputs).softmax(-1)
        scores = par.module(inputs)
        loss = F.cross_entropy(scores, labels) + F.mse_loss(scores.softmax(-1), taught)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()

    def evaluate() -> float:
        inputs, labels = drawn(STEPS, wrong=0.0)
        with torch.no_grad():
            return mean(F.cross_entropy(par.module(inputs), labels), par)

    found = {"student": evaluate()}
    with average.swapped():
        found["teacher"] = evaluate()
    return found


def main(mesh: str) -> None:
    """Print the numbers of both loops."""
    with meshpar.distributed("cpu"):
        for name, value in (gan(mesh) | teacher(mesh)).items():
            if torch.distributed.get_rank() == 0:
                print(f"{name}: {value:.5f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
