"""What a loop over stages does, each habit a few lines at named points of a model and a loop; the same lines run in one
process. In them ``@k`` is a step, ``@p`` a parameter's name and ``@m`` that of a linear layer.
"""

from __future__ import annotations

from after_apply_habits import ALWAYS, FROM, ONCE, Habit

EACH = "for p in module.parameters():"
SUM = "sum(full(p).pow(2).sum() for p in module.parameters())"
GRADS = "[p.grad for p in module.parameters() if p.grad is not None]"
AGAIN = ("except (ValueError, MeshparError):", "    optimizer.zero_grad()", "    FAILED.append(0)")
TRY = ("try:", "    total = par.backward(micro, loss)", *AGAIN, "    total = par.backward(micro, loss)")


def _habit(group: str, when: tuple[str, ...] = (ONCE, FROM, ALWAYS), **at: str | tuple[str, ...]) -> Habit:
    return Habit(group, {point: (lines,) if isinstance(lines, str) else lines for point, lines in at.items()}, when)


def _norm(*lines: str) -> Habit:
    return _habit("norms", between=lines)


def _loss(group: str, **at: str | tuple[str, ...]) -> Habit:
    return _habit(group, (ALWAYS, ONCE), **at)


def _hook(start: str | tuple[str, ...], **at: str | tuple[str, ...]) -> Habit:
    return _habit("hooks", (ALWAYS,), start=start, **at)


def _written(*lines: str, at: str = "stepped") -> Habit:
    return _habit("writes", **{at: ("with torch.no_grad():", *(f"    {line}" for line in lines))})


HABITS: dict[str, Habit] = {
    "clip": _norm('record[f"norm {step}"] = full(par.clip_grad_norm_(0.05))'),
    "clip_of_torch": _norm("nn.utils.clip_grad_norm_(module.parameters(), 0.05)"),
    "clip_twice": _norm("par.clip_grad_norm_(0.05)", "par.clip_grad_norm_(0.01)"),
    "total_norm": _norm(f'record[f"norm {{step}}"] = full(nn.utils.get_total_norm({GRADS}))'),
    "norm_by_hand": _norm(f"norm = sum(g.pow(2).sum() for g in {GRADS}).sqrt()", EACH, "    p.grad.div_(norm)"),
    "norm_by_items": _norm(f"norm = sum(full(g).norm().item() ** 2 for g in {GRADS})", EACH, "    p.grad.div_(norm)"),
    "norm_by_numpy": _norm(f"norm = sum((full(g).numpy() ** 2).sum() for g in {GRADS})", EACH, "    p.grad.div_(norm)"),
    "norm_by_lists": _norm(f"norm = max(max(full(g).flatten().tolist()) for g in {GRADS})", EACH, "    p.grad.div_(norm)"),
    "norm_by_whole": _norm(f"norm = sum(float(par.whole(g).pow(2).sum()) for g in {GRADS})", "assert norm > 0"),
    "norm_stacked": _norm(f"norm = torch.stack([full(g).norm() for g in {GRADS}]).norm()", EACH, "    p.grad.div_(norm)"),
    "norm_by_foreach": _norm(f"norms = torch._foreach_norm({GRADS})", f"torch._foreach_div_({GRADS}, norms)"),
    "norm_of_a_vector": _norm(f"norm = torch.cat([full(g).flatten() for g in {GRADS}]).norm()", EACH, "    p.grad.div_(norm)"),
    "clip_values": _norm("nn.utils.clip_grad_value_(module.parameters(), 1e-3)"),
    "clip_each": _norm(EACH, "    p.grad.mul_((0.01 / p.grad.norm()).clamp(max=1.0))"),
    "adaptive_clip": _norm(EACH, "    p.grad.mul_((0.1 * p.detach().norm() / p.grad.norm()).clamp(max=1.0))"),
    "finite": _norm(f"assert all(bool(g.isfinite().all()) for g in {GRADS})"),
    "noise_in_gradients": _norm(EACH, "    p.grad.add_(0.01 * torch.randn_like(p.grad))"),
    "largest_weight": _norm('record[f"top {step}"] = max(full(p.detach()).abs().max() for p in module.parameters())'),
    # Penalties in the loss
    "penalty": _loss("penalties", value=f"value = value + 0.01 * {SUM}"),
    "penalty_before": _loss("penalties", before=f"term = 0.01 * {SUM}", value="value = value + term"),
    "penalty_of_head": _loss("penalties", value="value = value + 0.01 * full(module.head.weight).pow(2).sum()"),
    "penalty_of_head_in_shards": _loss("penalties", value="value = value + 0.01 * full(module.head.weight.pow(2).sum())"),
    "penalty_of_embed": _loss("penalties", value="value = value + 0.01 * full(module.embed.weight).pow(2).sum()"),
    "penalty_of_one": _loss("penalties", value='value = value + 0.01 * full(module.get_parameter("@p")).pow(2).sum()'),
    "penalty_of_one_before": _loss("penalties", before='term = full(module.get_parameter("@p")).abs().sum()', value="value = value + term"),
    "penalty_by_items": _loss("penalties", value="value = value * (1 + sum(p.detach().norm().item() for p in module.parameters()))"),
    "penalty_of_output": _loss("penalties", value="value = value + 0.01 * out.pow(2).mean()"),
    "penalty_in_its_own_backward": _habit("penalties", between=f"(0.01 * {SUM}).backward()"),
    "penalty_of_one_in_its_own_backward": _habit("penalties", between='(0.01 * full(module.get_parameter("@p")).pow(2).sum()).backward()'),
    "decay_by_hand": _norm(EACH, "    p.grad.add_(p.detach(), alpha=0.01)"),
    # Drawn in the loss
    "mask": _loss("drawn", before="x = x * (torch.rand(x.shape) < 0.7).to(x.dtype)"),
    "mask_behind": _loss("drawn", value="value = value * torch.rand(())"),
    "mask_by_numpy": _loss("drawn", before="x = x * torch.from_numpy(numpy.random.rand(*x.shape) < 0.7).to(x.dtype)"),
    "mask_by_python": _loss("drawn", before="x = x * (random.random() < 0.7)"),
    "mask_by_python_behind": _loss("drawn", value="value = value * random.random()"),
    "mask_by_a_generator": _loss("drawn", before="x = x * (torch.rand(x.shape, generator=DRAW) < 0.7).to(x.dtype)"),
    "weights_behind_by_a_generator": _loss("drawn", value="value = value * torch.rand((), generator=DRAW)"),
    "mixed_rows": _loss("drawn", before=("rows = torch.randperm(len(x))", "x, y = x[rows], y[rows]")),
    "smoothed": _loss("drawn", before="smooth = torch.rand(())", value="value = value * smooth"),
    "drawn_outside": _habit("drawn", step="keep = torch.rand(())", value="value = value * keep"),
    "seeded_by_rank": _habit("drawn", start="torch.manual_seed(par.data_rank)"),
    # Hooks
    "hook_scales": _hook("module.get_parameter('@p').register_hook(lambda grad: 0.5 * grad)"),
    "hook_scales_all": _hook((EACH, "    p.register_hook(lambda grad: 0.5 * grad)")),
    "hook_sums": _hook((EACH, "    p.register_hook(lambda grad: SEEN.append(full(grad).pow(2).sum()))"),
                       between=('record[f"norm {step}"] = sum(SEEN[-len(list(module.parameters())):])', "SEEN.clear()")),
    "hook_items": _hook((EACH, "    p.register_hook(lambda grad: SEEN.append(float(full(grad).pow(2).sum())))"),
                        between=('record[f"norm {step}"] = torch.tensor(sum(SEEN))', "SEEN.clear()")),
    "hook_normed": _hook((EACH, "    p.register_hook(lambda grad: grad / (1e-3 + grad.norm()))")),
    "hook_after_sums": _hook((EACH, "    p.register_post_accumulate_grad_hook(lambda p: SEEN.append(full(p.grad).pow(2).sum()))"),
                             between=('record[f"norm {step}"] = sum(SEEN)', "SEEN.clear()")),
    "hook_after_steps": _hook(("each = {p: torch.optim.SGD([p], lr=0.01) for p in module.parameters()}",
                               EACH, "    p.register_post_accumulate_grad_hook(lambda p: each[p].step())")),
    "hook_after_clips": _hook((EACH, "    p.register_post_accumulate_grad_hook(lambda p: [nn.utils.clip_grad_norm_([p], 0.01)].clear())")),
    "hook_changes_block": _hook("module.blocks[1].register_forward_hook(lambda block, args, out: out * 0.5 if torch.is_tensor(out) else (out[0] * 0.5, *out[1:]))"),
    "hook_before_block": _hook("module.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 0.5, *args[1:]))"),
    "hook_keeps_block": _hook("module.blocks[1].register_forward_hook(lambda block, args, out: SEEN.append(first_of(out)))",
                              value="value = value + 0.1 * SEEN[-1].pow(2).mean()"),
    "hook_keeps_last_block": _hook("module.blocks[-1].register_forward_hook(lambda block, args, out: SEEN.append(first_of(out)))",
                                   value="value = value + 0.1 * SEEN[-1].pow(2).mean()"),
    "hook_before_apply": _habit("hooks", (ALWAYS,), built="model.blocks[1].register_forward_hook(lambda block, args, out: SEEN.append(1))",
                                end='record["calls"] = torch.tensor(len(SEEN) > 0)'),
    "hook_on_head": _hook("module.head.register_forward_hook(lambda head, args, out: 0.5 * out)"),
    "hook_on_embed": _hook("module.embed.register_forward_hook(lambda embed, args, out: 0.5 * out)"),
    "hook_on_the_module": _hook("module.register_forward_hook(lambda module, args, out: 0.5 * out)"),
    "hook_of_backwards": _hook("module.blocks[1].register_full_backward_hook(lambda block, given, grads: tuple(0.5 * g if g is not None else g for g in given))"),
    "hook_on_output": _loss("hooks", behind="out.register_hook(lambda grad: 0.5 * grad)"),
    "hook_measures_block": _hook("module.blocks[1].register_forward_hook(lambda block, args, out: SEEN.append(first_of(out).norm().item()))"),
    # Drops, and other ways through the blocks
    "drops": _habit("drops", around=("if NOW[0] == @k and number == 1:", "    continue")),
    "drops_at_random": _habit("drops", around=("if self.training and random.random() < 0.3:", "    continue")),
    "exits_early": _habit("drops", around=("if NOW[0] >= @k and number == 2:", "    break")),
    "repeats": _habit("drops", around=("if NOW[0] == @k and number == 1:", "    h = first_of(block(h))")),
    "forgets_an_output": _habit("drops", around=("if NOW[0] == @k and number == 1:", "    block(h)", "    continue")),
    "detaches": _habit("drops", around=("if NOW[0] == @k and number == 1:", "    h = h.detach()")),
    "detaches_the_first": _habit("drops", around=("if number == 0:", "    h = h.detach()")),
    "reverses": _habit("drops", (ONCE, FROM), step="module.blocks = nn.ModuleList(reversed(module.blocks))"),
    "scales_between": _habit("drops", around=("h = h * (1 + 0.1 * number)",)),
    "writes_between": _habit("drops", around=("h += 0.1",)),
    "reads_between": _habit("drops", around=("if NOW[0] == @k and h.mean() > 100:", "    break")),
    "counts": _habit("drops", enter=("self.calls = getattr(self, 'calls', 0) + 1", "scale = 1 / self.calls"), around="h = h * scale"),
    # Gradients are cleared
    "zero_before": _habit("zeros", backward=("optimizer.zero_grad()", "total = par.backward(micro, loss)")),
    "zero_in_loss": _loss("zeros", before="optimizer.zero_grad()"),
    "zero_in_loss_behind": _loss("zeros", value="optimizer.zero_grad()"),
    "zero_in_loss_to_zeros": _loss("zeros", before="module.zero_grad(set_to_none=False)"),
    "none_in_loss": _loss("zeros", before=(EACH, "    p.grad = None")),
    "one_none_in_loss": _loss("zeros", value='module.get_parameter("@p").grad = None'),
    "halved_in_loss": _loss("zeros", before=(EACH, "    p.grad = None if p.grad is None else 0.5 * p.grad")),
    "zero_to_zeros": _habit("zeros", update=("optimizer.step()", "optimizer.zero_grad(set_to_none=False)")),
    "zero_of_the_module": _habit("zeros", update=("optimizer.step()", "module.zero_grad()")),
    "not_cleared": _habit("zeros", update="optimizer.step()"),
    "two_backwards": _habit("zeros", backward=("par.backward(micro, loss)", "total = par.backward(micro, loss)")),
    "none_for_one": _habit("zeros", between='module.get_parameter("@p").grad = None'),
    # Optimizers
    "loaded": _habit("optimizers", stepped=("state = optimizer.state_dict()", "optimizer = make(module)", "optimizer.load_state_dict(state)")),
    "loaded_deep": _habit("optimizers", stepped=("state = copy.deepcopy(optimizer.state_dict())", "optimizer = make(module)", "optimizer.load_state_dict(state)")),
    "built_before": _habit("optimizers", (ALWAYS,), built="early = make(model)", start="optimizer = early"),
    "groups": _habit("optimizers", (ALWAYS,), start="optimizer = torch.optim.AdamW([{'params': [p for p in module.parameters() if p.ndim > 1]}, {'params': [p for p in module.parameters() if p.ndim < 2], 'weight_decay': 0.0}], lr=0.01, eps=1e-3)"),
    "group_of_each": _habit("optimizers", (ALWAYS,), start="optimizer = torch.optim.SGD([{'params': [p], 'lr': 0.01 * (1 + len(n) % 3)} for n, p in module.named_parameters()])"),
    "group_of_each_block": _habit("optimizers", (ALWAYS,), start="optimizer = torch.optim.SGD([{'params': list(b.parameters()), 'lr': 0.1 / (1 + n)} for n, b in enumerate(module.blocks)])"),
    "of_the_head": _habit("optimizers", (ALWAYS,), start="optimizer = torch.optim.SGD(module.head.parameters(), lr=0.1)"),
    "lbfgs": _habit("optimizers", (ALWAYS,), start="optimizer = torch.optim.LBFGS(module.parameters(), max_iter=2)", update=("optimizer.step(lambda: total)", "optimizer.zero_grad()")),
    "adafactor": _habit("optimizers", (ALWAYS,), start="optimizer = torch.optim.Adafactor(module.parameters())"),
    "closure": _habit("optimizers", update=("optimizer.step(lambda: total)", "optimizer.zero_grad()")),
    "schedule": _habit("optimizers", (ALWAYS,), start="rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", stepped="rates.step()"),
    "sam": _habit("optimizers", update=("kept = [p.detach().clone() for p in module.parameters()]", "with torch.no_grad():", f"    {EACH}", "        p.add_(0.01 * p.grad)", "optimizer.zero_grad()", "par.backward(micro, loss)", "with torch.no_grad():", "    for p, one in zip(module.parameters(), kept):", "        p.copy_(one)", "optimizer.step()", "optimizer.zero_grad()")),
    "scaler": _habit("optimizers", (ALWAYS,), start="scaler = torch.amp.GradScaler('cpu', init_scale=8.0)", value="value = scaler.scale(value)", update=("scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()")),
    "frozen": _habit("optimizers", step='module.get_parameter("@p").requires_grad_(step % 2 == 0)'),
    "frozen_embed": _habit("optimizers", (ALWAYS,), built="model.embed.requires_grad_(False)"),
    "frozen_block": _habit("optimizers", step="[p.requires_grad_(step % 2 == 0) for n, p in module.named_parameters() if n.startswith('blocks.1.')]"),
    # Micro-batches
    "longer": _habit("batches", step="micro = [(x[:, : 2 + n % 3], y[:, : 2 + n % 3]) for n, (x, y) in enumerate(micro)]"),
    "fewer": _habit("batches", step="micro = micro[: 1 + step % 2]"),
    "one": _habit("batches", step="micro = micro[:1]"),
    "none": _habit("batches", (ONCE,), step="micro = []"),
    "generated": _habit("batches", backward="total = par.backward((one for one in micro), loss)"),
    "reports": _habit("batches", (ALWAYS,), value="value = value, {'rows': torch.tensor(float(len(x))), 'size': out.detach().abs().sum()}", backward=("total, sums = par.backward(micro, loss)", 'record |= {f"{name} {step}": par.data_sum(one.clone()) for name, one in sums.items()}')),
    "rows_apart": _habit("batches", step="micro = [(x[: len(x) // 2], y[: len(y) // 2]) if n else (x, y) for n, (x, y) in enumerate(micro)]"),
    "not_called": _habit("batches", (ONCE,), backward="total = par.backward(micro, lambda module, batch: torch.zeros((), requires_grad=True))"),
    "called_twice": _loss("batches", value="value = value + 0.1 * module(x).pow(2).mean()"),
    # Reads of values
    "item": _loss("items", value="SEEN.append(value.item())"),
    "item_decides": _loss("items", value=("if value.item() > 0.1:", "    value = 0.5 * value")),
    "bool_decides": _loss("items", value=("if torch.isnan(value):", "    raise ValueError", "if value > 0.1:", "    value = 0.5 * value")),
    "item_of_inputs": _loss("items", before=("if x.double().sum().item() > 0:", "    x = x * 1")),
    "item_of_a_weight": _loss("items", value="value = value * (1 + abs(full(module.head.weight.detach())[0, 0].item()))"),
    "total_decides": _habit("items", between=("if total.item() > 0.1:", "    optimizer.zero_grad()")),
    "loss_of_a_micro_batch": _loss("items", value="SEEN.append(value.detach())", between='mine |= {f"seen {step} of {n}": mean(one) for n, one in enumerate(SEEN)}'),
    "scaled_by_the_last": _habit("items", start="last = 1.0", value="value = value * last", between="last = min(total.item(), 1.0)"),
    # Errors
    "fails": _habit("errors", (ONCE,), value=("if not FAILED:", "    raise ValueError"), backward=TRY),
    "fails_before": _habit("errors", (ONCE,), before=("if not FAILED:", "    raise ValueError"), backward=TRY),
    "fails_in_a_block": _habit("errors", (ONCE,), block=("if NOW[0] == @k and not FAILED:", "    raise ValueError"), backward=TRY),
    "fails_in_data": _habit("errors", (ONCE,), backward=("try:", "    par.backward((one for one in (*micro, 1 / 0 if FAILED else None)), loss)", "except (TypeError, ZeroDivisionError, MeshparError):", "    optimizer.zero_grad()", "total = par.backward(micro, loss)")),
    "fails_on_one_rank": _habit("errors", (ONCE,), before=("if not FAILED and par.rank() // par.data_size in (0, @k):", "    raise ValueError"), backward=TRY),
    "fails_uncleared": _habit("errors", (ONCE,), value=("if not FAILED:", "    raise ValueError"), backward=tuple(line for line in TRY if "zero_grad" not in line)),
    "fails_in_a_hook": _habit("errors", (ONCE,), start="hooked = module.head.register_forward_hook(lambda *_: 1 / 0 if NOW[0] == @k and not FAILED else None)", backward=(*TRY[:2], "except (ZeroDivisionError, MeshparError):", *AGAIN[1:], TRY[-1])),
    # Writes, after apply
    "scaled": _written('module.get_parameter("@p").mul_(0.9)'),
    "scaled_data": _written(EACH, "    p.data.mul_(0.9)"),
    "scaled_before": _written(EACH, "    p.mul_(0.9)", at="start"),
    "average": _habit("writes", (ALWAYS,), start="average = {n: p.detach().clone() for n, p in module.named_parameters()}", stepped=("with torch.no_grad():", "    for n, p in module.named_parameters():", "        average[n].lerp_(p, 0.3)"), end='mine |= {f"average {n}": whole(value) for n, value in average.items()}'),
    "zeros": _written('nn.init.zeros_(module.get_parameter("@p"))'),
    "normal": _written("torch.manual_seed(3)", EACH, "    nn.init.normal_(p, std=0.1)"),
    "normal_of_layers": _written("torch.manual_seed(3)", "module.apply(lambda m: nn.init.normal_(m.weight, std=0.1) and None if isinstance(m, nn.Linear) else None)"),
    "normal_before": _written("torch.manual_seed(3)", EACH, "    nn.init.normal_(p, std=0.1)", at="start"),
    "xavier": _written("torch.manual_seed(3)", EACH, "    nn.init.xavier_uniform_(p) if p.ndim > 1 else None"),
    "reset": _written("torch.manual_seed(3)", "module.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)"),
    "noise": _written(EACH, "    p.add_(0.01 * torch.randn_like(p))"),
    "noise_of_a_shape": _written(EACH, "    p.add_(0.01 * torch.randn(p.shape))"),
    "noise_seeded": _written("for n, p in module.named_parameters():", "    torch.manual_seed(len(n))", "    p.add_(0.01 * torch.randn(p.shape))"),
    "in_loss": _loss("writes", before=("with torch.no_grad():", '    module.get_parameter("@p").mul_(0.9)')),
    "in_loss_behind": _loss("writes", value=("with torch.no_grad():", "    module.head.weight.mul_(0.9)")),
    "data_in_loss": _loss("writes", before=(EACH, "    p.data.mul_(0.99)")),
    "part_of_a_block": _written("module.blocks[1].up.weight.mul_(0.9)"),
    "bias_of_a_block": _written("module.blocks[-1].norm.bias.zero_()"),
    "loaded_state": _habit("writes", stepped="module.load_state_dict(module.state_dict())"),
    # Evaluations
    "evaluates": _habit("evaluates", stepped='record[f"eval {step}"] = mean(torch.stack(par.forward(micro, lambda module, batch: criterion(module(batch[0]), batch[1]))).sum())'),
    "evaluates_in_eval": _habit("evaluates", stepped=("module.eval()", 'record[f"eval {step}"] = mean(torch.stack([one.mean() for one in par.forward(micro, lambda module, batch: module(batch[0]))]).sum())', "module.train()")),
    "evaluates_first": _habit("evaluates", (ALWAYS,), start="par.forward([batches(0, par)[0]], lambda module, batch: module(batch[0]).sum())"),
    "evaluates_between": _habit("evaluates", between="par.forward(micro, lambda module, batch: module(batch[0]).sum())"),
    "evaluates_penalty": _habit("evaluates", stepped=f"par.forward(micro, lambda module, batch: module(batch[0]).sum() + {SUM})"),
    "no_grad": _habit("evaluates", stepped=("with torch.no_grad():", "    module(micro[0][0])")),
    "block_alone": _habit("evaluates", stepped="module.blocks[1](torch.ones(2, 3, 8))"),
}  # fmt: skip
