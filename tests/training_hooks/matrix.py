"""The parity matrix: which cases run on how many ranks, and what one rank does for one of them."""

from __future__ import annotations

import dataclasses
import itertools

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str
    depths: int
    tied: bool
    recompute: bool
    per_token: bool = False
    dtype: str = "float64"
    loss_scale: float | None = None
    selective: bool = False

    @property
    def name(self):
        parts = [self.layout, f"depth{self.depths}", "tied" if self.tied else "untied"]
        parts += ["recompute"] * self.recompute + ["selective"] * self.selective + ["per_token"] * self.per_token
        parts += [self.dtype] * (self.dtype != "float64") + ["scaled"] * (self.loss_scale is not None)
        return "-".join(parts)


# Name -> (ranks, fields of `mcore.Parallel`, plan, alignment of packed sequences, fields of the DDP config).
OVERLAP = {"overlap_grad_reduce": True}
LAYOUTS = {
    "single": (1, {}, "thd", 1, {}),
    "single_bshd": (1, {}, "bshd", 1, OVERLAP),
    "tp2": (2, {"tp": 2}, "thd", 1, {}),
    "tp2_sp": (2, {"tp": 2, "sp": True}, "thd", 4, {}),
    "pp2": (2, {"pp": 2}, "bshd", 1, OVERLAP),
    "vpp2": (2, {"pp": 2, "vpp": 2}, "bshd", 1, {}),
    "cp2_bshd": (2, {"cp": 2}, "bshd", 1, OVERLAP),
    "cp2_thd": (2, {"cp": 2}, "thd", 4, {}),
    "dp2_uneven": (2, {}, "thd_uneven", 1, {}),
    "ep2": (2, {"ep": 2}, "thd", 1, {}),
    "tp2_cp2_bshd": (4, {"tp": 2, "cp": 2}, "bshd", 1, {}),
    "tp2_cp2_sp_thd": (4, {"tp": 2, "cp": 2, "sp": True}, "thd", 8, {}),
    "tp2_pp2_sp": (4, {"tp": 2, "pp": 2, "sp": True}, "bshd", 1, OVERLAP),
    "pp2_dp2": (4, {"pp": 2}, "bshd", 1, {}),
    # Four summands come in an order that depends on the place in the buffer: one buffer per parameter fixes it.
    "cp2_dp2_uneven": (4, {"cp": 2}, "thd_uneven", 4, {"overlap_grad_reduce": True, "bucket_size": 1}),
}

# The product is depths x tied x recompute for every layout: 12 each. Each layout walks through it with another offset,
# so that all of its values and most of its pairs occur for every kind of parallelism.
_PRODUCT = list(itertools.product((1, 2, 3), (False, True), (False, True)))
_STRIDES = {1: (0, 5, 7, 10), 2: (2, 5, 11), 4: (3, 8)}


def _sample():
    for offset, (layout, (ranks, *_)) in enumerate(LAYOUTS.items()):
        for stride in _STRIDES[ranks]:
            depths, tied, recompute = _PRODUCT[(stride + offset) % len(_PRODUCT)]
            yield Case(layout, depths, tied, recompute, per_token=(stride + offset) // 2 % 2 == 1)


CASES = [
    *_sample(),
    Case("single", 2, False, False, dtype="float32"),
    Case("single", 2, False, False, loss_scale=65536.0),
    Case("tp2_sp", 2, True, True, dtype="float32"),
    Case("cp2_thd", 2, False, False, dtype="float32"),
    Case("dp2_uneven", 2, False, False, loss_scale=65536.0),
    Case("single", 2, True, False, selective=True),
    Case("tp2_sp", 3, False, False, selective=True),
    Case("cp2_thd", 1, True, False, selective=True),
    Case("tp2_pp2_sp", 2, False, False, selective=True),
    Case("single", 1, False, False, dtype="float16", loss_scale=64.0),
    Case("tp2_sp", 2, True, False, dtype="float16", loss_scale=64.0, selective=True),
    Case("tp2_pp2_sp", 2, False, True, dtype="float16", loss_scale=64.0),
]


def ranks_of(case):
    return LAYOUTS[case.layout][0]


def run_case(case):
    """What one rank sees: {"loss": relative error, "grad": ..., "smallest": ..., "backbone": bitwise equal, ...}."""
    import torch
    from megatron.core import parallel_state as ps

    from tests.training_hooks import mcore, runs
    from training_hooks.megatron import MTPConfig, install_mtp

    _, fields, kind, align, ddp_config = LAYOUTS[case.layout]
    parallel = mcore.Parallel(**fields)
    moe = parallel.ep > 1
    losses, counts, wanted = runs.reference(case.depths, case.tied, moe)
    mcore.init(parallel)
    changes: dict = dict(RECOMPUTE) if case.recompute else dict(SELECTIVE) if case.selective else {}
    if case.dtype == "float16":
        changes["fp16"] = True
    changes |= {"moe_aux_loss_coeff": 0.0} if moe else {}
    options = {
        "tied": case.tied, "dtype": getattr(torch, case.dtype), "moe": moe, "ddp_config": ddp_config,
        "calculate_per_token_loss": case.per_token, **changes,
    }  # fmt: skip
    batches = runs.plan(kind, ps.get_data_parallel_rank(), ps.get_data_parallel_world_size(), align)

    def scaled(chunks):
        if case.loss_scale is not None:
            for chunk in chunks:
                mcore.inner(chunk).config.grad_scale_func = lambda loss: loss * case.loss_scale
        return chunks

    plain = scaled(mcore.build(parallel, depths=0, **options))
    runs.run(plain, batches, per_token=case.per_token)
    without = runs.gradients(plain)
    chunks = scaled(mcore.build(parallel, depths=case.depths, **options))
    with install_mtp(chunks, MTPConfig(scale=runs.SCALE, chunk_bytes=2000)) as hook:
        # Overlapped reduction learns in its first step what it waits for from the second on.
        for _ in range(2 if ddp_config else 1):
            runs.run(chunks, batches, hook, depths=case.depths, per_token=case.per_token)
        metrics = hook.metrics()
    got = runs.gradients(chunks)

    top = max(g.abs().max().item() for g in wanted.values())
    out = {"backbone": True, "grad": 0.0, "smallest": float("inf"), "mtp": 0, "loss": 0.0, "tokens": True}
    for name, parameter in mcore.named(chunks):
        if name in wanted:
            part = mcore.shard(name, parameter, wanted[name])
            grad = got[name].double() / (case.loss_scale or 1.0)
            out["grad"] = max(out["grad"], (grad - part).abs().max().item() / top)
            out["smallest"] = min(out["smallest"], grad.abs().max().item())
            out["mtp"] += 1
        elif name in without:
            out["backbone"] &= torch.equal(got[name], without[name])
        else:  # the embedding copy of the last stage, which the model without MTP layers lacks
            assert name == "embedding.word_embeddings.weight"
            out["copy_sum"] = got[name].sum().item()
    if not parallel.vpp and parallel.pp > 1 and ps.is_pipeline_first_stage():
        out["first_sum"] = got["embedding.word_embeddings.weight"].sum().item()
    if hook.is_active:
        for depth, (loss, count) in enumerate(zip(losses, counts, strict=True), 1):
            out["loss"] = max(out["loss"], abs(metrics[f"mtp_loss/depth_{depth}"] / loss - 1))
            out["tokens"] &= metrics[f"mtp_tokens/depth_{depth}"] == count
    out["tp_rank"] = ps.get_tensor_model_parallel_rank()
    return out
