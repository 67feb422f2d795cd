"""Imported into the server that ranks are forked from: what torch and meshpar do once in a process is done there, by two simulated steps."""

import torch
from models_for_parity import VOCAB, transformer

from meshpar import FullyShard, Plan, TensorParallel
from meshpar.runtime import simulated
from meshpar.testing import token_steps, train_steps

if not torch.accelerator.is_available():  # whose threads of autograd would not survive a fork
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = transformer()
    with simulated(4):
        par = Plan("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]).apply(model).materialize(seed=0)
        train_steps(par, token_steps(VOCAB, steps=2, parts=2))
