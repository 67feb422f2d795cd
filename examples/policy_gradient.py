"""Reinforcement learning with an engine beside the trained model.

    torchrun --nproc-per-node 2 examples/policy_gradient.py [steps]

Two ranks train a model under FSDP. Rank 0 also runs an engine: transformers' own model of the same weights. In a step
the engine samples answers to a + b modulo 5, the ranks compute the log-probabilities of these, one policy-gradient step
(REINFORCE with a mean baseline) follows, and the new weights are streamed into the engine. The share of right answers
is the reward.
"""

import sys

import torch
import torch.distributed as dist
import transformers

import meshpar
from meshpar.models import Transformer, TransformerConfig

NUMBERS, PLUS, EQUALS = 5, 5, 6
PROMPTS, STEPS = 200, 300


class Engine:
    """What serves the policy, here transformers' model on the CPU; any engine that takes published names does."""

    def __init__(self, config: dict) -> None:
        self.model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
        self.weights = self.model.state_dict()

    def update(self, name: str, tensor: torch.Tensor) -> None:
        self.weights[name].copy_(tensor)

    @torch.no_grad()
    def answer(self, prompts: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        """One token for each prompt, sampled at temperature 1."""
        probabilities = self.model(prompts).logits[:, -1].softmax(-1)
        return torch.multinomial(probabilities, 1, generator=draws)[:, 0]


def main(steps: int) -> None:
    with meshpar.distributed("cpu"):
        config = TransformerConfig(vocab_size=8, dim=32, layers=2, heads=4, hidden=64, max_positions=8)
        with torch.device("meta"):
            model = Transformer(config)
        plan = meshpar.Plan("dp_shard=-1", [meshpar.FullyShard()])
        par = plan.apply(model).materialize(seed=0)
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=5e-3, weight_decay=0.0)
        weights, draws = par.published(), torch.Generator().manual_seed(0)
        engine = Engine(dict(par.layout.config)) if dist.get_rank() == 0 else None
        for step in range(steps + 1):
            for name, tensor in weights:  # every rank iterates; rank 0 gets the values
                if engine is not None:
                    engine.update(name, tensor)
            pairs = torch.randint(NUMBERS, (PROMPTS, 2), generator=draws)
            prompts = torch.stack(
                [pairs[:, 0], torch.full((PROMPTS,), PLUS), pairs[:, 1], torch.full((PROMPTS,), EQUALS)], 1
            )
            answers = torch.zeros(PROMPTS, dtype=torch.long) if engine is None else engine.answer(prompts, draws)
            dist.broadcast(answers, src=0)
            draws.manual_seed(step + 1)  # rank 0 alone drew answers
            rewards = (answers == pairs.sum(1) % NUMBERS).float()
            if step % 50 == 0 and engine is not None:
                print(f"step {step}: reward {rewards.mean():.2f}, weights of version {weights.version}", flush=True)
            labels = torch.full_like(prompts, -100)
            labels[:, -1] = answers
            mine = slice(par.data_rank, None, par.data_size)
            found = par.token_log_probs({"input_ids": prompts[mine], "labels": labels[mine]})
            advantages = (rewards - rewards.mean())[mine, None]
            loss = -(advantages * found.log_probs).sum() - 0.01 * found.entropy.sum()
            (loss * par.data_size / PROMPTS).backward()
            par.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
