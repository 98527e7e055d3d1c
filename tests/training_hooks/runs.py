"""One global batch, laid out and run in many ways, and the single-process float64 reference of its MTP loss."""

from __future__ import annotations

import dataclasses
import functools

import torch
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.training_hooks import mcore
from training_hooks.alignment import Alignment, CpSplit, Layout, mtp_targets

F = torch.nn.functional

LENGTHS = (7, 12, 9, 5, 11, 3, 13, 10)
COLUMNS = 16
SCALE = 0.1
TOKENS_PER_MICRO_BATCH = 16


@functools.cache
def sequences():
    """Tokens of every sequence, and which of them are supervised: two sequences not at all."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, mcore.VOCAB, (n,), generator=generator) for n in LENGTHS]
    supervised = [torch.rand(n, generator=generator) > 0.4 for n in LENGTHS]
    for quiet in (4, 5):
        supervised[quiet] = torch.zeros(LENGTHS[quiet], dtype=torch.bool)
    return tokens, supervised


@functools.cache
def main_coefficients():
    """[sequence][n, vocabulary]: the stand-in of a policy loss is sum(coefficients * logits)."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(n, mcore.VOCAB, generator=generator, dtype=torch.float64) for n in LENGTHS]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Sequences `numbers`, padded or packed, whole (before slicing)."""

    numbers: tuple[int, ...]
    packed: bool
    align: int = 1

    @property
    def rooms(self):
        return [-(-LENGTHS[k] // self.align) * self.align for k in self.numbers]

    @property
    def layout(self):
        lengths = [LENGTHS[k] for k in self.numbers]
        if not self.packed:
            return Layout.padded(lengths, COLUMNS)
        return Layout.packed([0, *_cumulative(lengths)], [0, *_cumulative(self.rooms)])

    def place(self, values, fill=0):
        """[rows, columns, ...] of per-sequence tensors."""
        layout = self.layout
        shape = (layout.rows, layout.columns, *values[0].shape[1:])
        out = torch.full(shape, fill, dtype=values[0].dtype)
        for k, (row, start, length, _) in zip(self.numbers, layout.spans, strict=True):
            out[row, start : start + length] = values[k]
        return out

    def packed_params(self):
        if not self.packed:
            return None
        real, room = (
            torch.tensor([0, *_cumulative(n)], dtype=torch.int32)
            for n in ([LENGTHS[k] for k in self.numbers], self.rooms)
        )
        longest = max(self.rooms)
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=room,
            cu_seqlens_kv_padded=room, max_seqlen_q=longest, max_seqlen_kv=longest,
        )  # fmt: skip

    def targets(self, depths, cp=None):
        tokens, supervised = sequences()
        return mtp_targets(
            self.place(tokens),
            self.place(supervised),
            layout=self.layout,
            depths=depths,
            mask_alignment=Alignment.TOKEN,
            cp=cp or CpSplit(size=ps.get_context_parallel_world_size(), rank=ps.get_context_parallel_rank()),
        )


def _cumulative(lengths):
    return torch.tensor(lengths).cumsum(0).tolist()


def plan(kind, dp_rank, dp_size, align=1):
    """This data parallel rank's micro-batches of the global batch. `uneven`: rank 1 of 2 has nothing to supervise."""
    packed = kind.startswith("thd")
    if "uneven" in kind:
        assert dp_size == 2
        groups = [(0, 1, 2), (3, 6, 7)] if dp_rank == 0 else [(4,), (5,)]
    else:
        pairs = [(0, 5), (1, 4), (2, 7), (3, 6)]
        groups = pairs[dp_rank::dp_size]
    return [MicroBatch(numbers=g, packed=packed, align=align) for g in groups]


@functools.cache
def reference(depths, tied, moe=False):
    """(losses per depth, tokens per depth, {name: gradient}) of the whole batch, one sequence at a time.

    Only the modules are Megatron's; shifting, masking, normalising and cutting off the backbone are done here.
    """
    parallel = mcore.Parallel()
    mcore.init(parallel)
    changes = {"moe_aux_loss_coeff": 0.0} if moe else {}
    module = mcore.inner(mcore.build(parallel, depths=depths, tied=tied, ddp=False, moe=moe, **changes)[0])
    table = module.embedding.word_embeddings.weight.detach()
    head = table if tied else module.output_layer.weight.detach()
    tokens, supervised = sequences()
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(depths)]
    counts = [0] * depths
    for ids, wanted in zip(tokens, supervised, strict=True):
        n = len(ids)
        rotary = module.rotary_pos_emb(n)
        with torch.no_grad():
            hidden = module.decoder(hidden_states=table[ids][:, None], attention_mask=None, rotary_pos_emb=rotary)
        for depth, layer in enumerate(module.mtp.layers, 1):
            later = torch.cat([ids[depth:], torch.zeros(min(depth, n), dtype=ids.dtype)])[:n]
            hidden = layer._proj_and_transformer_layer(
                hidden_states=hidden, decoder_input=table[later][:, None], rotary_pos_emb=rotary
            )
            rows = [i for i in range(n - depth - 1) if wanted[i + depth + 1]]
            if rows:
                logits = hidden[rows, 0] @ head.T
                labels = ids[[i + depth + 1 for i in rows]]
                sums[depth - 1] = sums[depth - 1] + F.cross_entropy(logits, labels, reduction="sum")
                counts[depth - 1] += len(rows)
    losses = [s / n for s, n in zip(sums, counts, strict=True)]
    (SCALE / depths * sum(losses)).backward()
    grads = {name: p.grad for name, p in mcore.named([module]) if p.grad is not None}
    assert all(name.startswith("mtp.") for name in grads)
    return [x.item() for x in losses], counts, grads


def run(chunks, batches, hook=None, *, depths=0, main_scale=1.0, per_token=False, index=0, forward_only=False):
    """One step of Megatron's schedule over `batches`; the gradients stay in the DDP buffers."""
    cp = CpSplit(size=ps.get_context_parallel_world_size(), rank=ps.get_context_parallel_rank())
    rank = ps.get_tensor_model_parallel_rank()
    tokens, _ = sequences()

    def forward_step(iterator, chunk):
        batch, targets = next(iterator)
        columns = cp.local_columns(batch.layout)
        ids = batch.place(tokens)[:, columns]
        coefficients = batch.place(main_coefficients())[:, columns].chunk(ps.get_tensor_model_parallel_world_size(), -1)

        def call():
            return chunk(ids, None, None, packed_seq_params=batch.packed_params())

        if hook is None:
            output = call()
        else:
            with hook.micro_batch(targets):
                output = call()

        def loss_func(logits):
            loss = (logits * coefficients[rank].to(logits.dtype)).sum() * main_scale
            # Megatron multiplies by 1 / tokens in float32: a power of two keeps float64 gradients exact.
            return (loss, torch.tensor(TOKENS_PER_MICRO_BATCH), {}) if per_token else (loss, {})

        return output, loss_func

    every = [(b, b.targets(depths, cp) if hook is not None else None) for b in batches]
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
    virtual = len(chunks) > 1
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": [iter(every) for _ in chunks] if virtual else iter(every),
        "model": chunks if virtual else chunks[0],
        "num_microbatches": len(batches),
        "seq_length": COLUMNS,
        "micro_batch_size": batches[0].layout.rows,
        "forward_only": forward_only,
    }
    if hook is None:
        get_forward_backward_func()(**arguments)
        return
    own = TOKENS_PER_MICRO_BATCH * len(batches) if per_token else None
    with hook.step([t for _, t in every] if hook.is_active else [], index=index, main_tokens=own):
        get_forward_backward_func()(**arguments)


def gradients(chunks):
    """{name: clone of the reduced gradient}; copies of the embedding must agree."""
    out = {}
    for name, parameter in mcore.named(chunks):
        grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        grad = torch.zeros_like(parameter) if grad is None else grad.clone()
        if name in out:
            assert torch.equal(out[name], grad), f"copies of {name} differ"
        out[name] = grad
    return out
