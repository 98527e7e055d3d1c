"""Capture on real Megatron-Core models: rows of every layout against one process that runs the same micro-batches."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.training_hooks import mcore, runs
from training_hooks.alignment import CpSplit
from training_hooks.capture import HiddenCapture, LayerRef, row_keys
from training_hooks.exchange import Exchange
from training_hooks.megatron.capture import capture_from_megatron, replica_place, target_tables

LAYERS = (LayerRef("input_to", 0), LayerRef("output_of", 0), LayerRef("input_to", 3), LayerRef("final_norm"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to run the global batch."""

    ranks: int
    fields: dict
    kind: str
    align: int
    changes: dict = dataclasses.field(default_factory=dict)
    permuted: bool = False


LAYOUTS = {
    "single_permuted": Layout(1, {}, "thd", 1, permuted=True),
    "pp2_uneven": Layout(2, {"pp": 2}, "bshd", 1, {"num_layers_in_first_pipeline_stage": 1}),
    "pp2_vpp2_permuted": Layout(2, {"pp": 2, "vpp": 2}, "bshd", 1, permuted=True),
    "tp2_sp": Layout(2, {"tp": 2, "sp": True}, "thd", 4),
    "tp2": Layout(2, {"tp": 2}, "thd", 4),
    "cp2_thd": Layout(2, {"cp": 2}, "thd", 4),
    "cp2_bshd": Layout(2, {"cp": 2}, "bshd", 1),
    "dp2": Layout(2, {}, "thd", 1),
    "tp2_pp2_sp": Layout(4, {"tp": 2, "pp": 2, "sp": True}, "bshd", 1, {"num_layers_in_first_pipeline_stage": 3}),
    "tp2_cp2_sp": Layout(4, {"tp": 2, "cp": 2, "sp": True}, "thd", 8),
}


@functools.cache
def _expected(kind, align):
    """{(layer, sample): [length, h]} from one process, whole batch, the order of the plan."""
    parallel = mcore.Parallel()
    mcore.init(parallel)
    chunks = mcore.build(parallel, depths=0, ddp=False)
    out = {}
    capture = capture_from_megatron(chunks, LAYERS)
    for batch in runs.plan(kind, 0, 1, align):
        with capture.active(), torch.no_grad(), capture.micro_batch(row_keys(batch.layout, batch.numbers)):
            chunks[0](batch.place(runs.sequences()[0]), None, None, packed_seq_params=batch.packed_params())
        for layer, rows in capture.take().items():
            for sample in batch.numbers:
                own = rows.keys[:, 0] == sample
                order = rows.keys[own, 1].argsort()
                out[layer, sample] = rows.values[own][order]
    return out


def check(name):
    """Largest difference of merged rows from the single process (0.0 if equal bit for bit), on the collecting rank."""
    layout = LAYOUTS[name]
    expected = _expected(layout.kind, layout.align)
    parallel = mcore.Parallel(**layout.fields)
    mcore.init(parallel)
    chunks = mcore.build(parallel, depths=0, ddp=False, **layout.changes)
    batches = runs.plan(layout.kind, ps.get_data_parallel_rank(), ps.get_data_parallel_world_size(), layout.align)
    if layout.permuted:
        batches = [batches[i] for i in (2, 0, 3, 1)]
    capture: HiddenCapture = capture_from_megatron(chunks, LAYERS)
    cp = CpSplit(size=ps.get_context_parallel_world_size(), rank=ps.get_context_parallel_rank())

    def forward_step(iterator, chunk):
        batch = next(iterator)
        ids = batch.place(runs.sequences()[0])[:, cp.local_columns(batch.layout)]
        with capture.micro_batch(row_keys(batch.layout, batch.numbers, cp=cp)):
            output = chunk(ids, None, None, packed_seq_params=batch.packed_params())
        return output, lambda logits: (logits.sum() * 0, {})

    virtual = len(chunks) > 1
    with capture.active(), torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if virtual else iter(batches),
            model=chunks if virtual else chunks[0],
            num_microbatches=len(batches),
            seq_length=runs.COLUMNS,
            micro_batch_size=batches[0].layout.rows,
            forward_only=True,
        )
    assert not any(m._forward_hooks for chunk in chunks for m in chunk.modules())
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    for table, of in zip(target_tables(chunks), names, strict=True):
        assert torch.equal(table, mcore.full_weight(of, (mcore.VOCAB, mcore.HIDDEN), table.dtype))
    replica, rank, size = replica_place()
    store = dist.distributed_c10d._get_default_store()
    exchange = Exchange(store, rank, size, run=name, replica=replica, deadline_s=20)
    samples = {k: runs.LENGTHS[k] for b in batches for k in b.numbers}
    merged = exchange.merge(capture.take(), step=1, expected=samples, layers=LAYERS)
    exchange.close()
    if rank != 0:
        assert merged is None
        return None
    worst = 0.0
    assert sorted(merged) == sorted(ref.canonical for ref in LAYERS)
    for layer, rows in merged.items():
        assert rows.keys.tolist() == [[k, i] for k in sorted(samples) for i in range(samples[k])]
        wanted = torch.cat([expected[layer, k] for k in sorted(samples)])
        if not torch.equal(rows.values, wanted):
            worst = max(worst, (rows.values - wanted).abs().max().item() / wanted.abs().max().item())
    return worst
