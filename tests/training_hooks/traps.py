"""What stock Megatron-Core 0.16.1, or a common way of patching it, gets wrong, pinned beside what the hook does.

Each scenario asserts both sides on real models; where stock is repaired one day, its side fails here and says so.
"""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp

from tests.training_hooks import mcore, runs
from tests.training_hooks.matrix import RECOMPUTE
from training_hooks.alignment import Alignment, CpSplit, Layout, mtp_targets
from training_hooks.errors import AlignmentError, GuardError, HookError, SettingsError
from training_hooks.megatron import (
    MTPClip,
    MTPConfig,
    check_isolation,
    check_mtp_settings,
    fingerprint,
    install_mtp,
    require_moved,
)
from training_hooks.megatron.clip import _model_and_main

SINGLE = mcore.Parallel()


def _batch():
    """(ids, next-token labels, positions) of two full rows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, mcore.VOCAB, (2, 9), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(8).expand(2, -1)


def _model(depths=2, **changes):
    mcore.init(SINGLE)
    return mcore.inner(mcore.build(SINGLE, depths=depths, ddp=False, **changes)[0])


def _stock(model, main_scale=0.0, mask=None):
    """Gradient norms by part after stock's labelled forward and a main loss times `main_scale`."""
    ids, labels, positions = _batch()
    model.zero_grad()
    loss = model(ids, positions, None, labels=labels, loss_mask=mask)
    (loss.sum() * main_scale).backward()
    return _norms(model)


def _hooked(model, main_scale=0.0, depths=2, **config):
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    model.zero_grad()
    with install_mtp([model], MTPConfig(**config)) as hook:
        runs.run([model], [batch], hook, depths=depths, main_scale=main_scale)
    return _norms(model)


def _norms(model):
    out = {}
    for name, parameter in model.named_parameters():
        part = ".".join(name.split(".")[:3]) if name.startswith("mtp") else name.split(".")[0]
        out[part] = out.get(part, 0.0) + (0.0 if parameter.grad is None else parameter.grad.norm().item())
    return out


def labels_are_needed_for_logits(_):
    ids, _labels, positions = _batch()
    model = _model()
    with pytest.raises(AttributeError, match="clone"):
        model(ids, positions, None)
    labelled = model(ids, positions, None, labels=_labels)
    assert labelled.shape == ids.shape  # losses, no logits
    plain = _model(depths=0)(ids, positions, None)
    with install_mtp([model]):
        assert torch.equal(model(ids, positions, None), plain)
        assert torch.equal(
            model(ids, positions, None, labels=_labels), _model(depths=0)(ids, positions, None, labels=_labels)
        )


def stock_mtp_trains_the_backbone(_):
    for tied in (False, True):
        stock = _stock(_model(tied=tied))
        assert min(stock.values()) > 0
        ours = _hooked(_model(tied=tied))
        assert {part: norm for part, norm in ours.items() if not part.startswith("mtp")} == dict.fromkeys(
            [part for part in ours if not part.startswith("mtp")], 0.0
        )
        assert min(norm for part, norm in ours.items() if part.startswith("mtp")) > 0


def an_empty_mask_makes_stock_nan(_):
    model = _model()
    norms = _stock(model, mask=torch.zeros(2, 8))
    assert any(value != value for value in norms.values())
    assert mtp.MTPLossLoggingHelper.tracker["values"].isnan().all()
    batch = runs.MicroBatch(numbers=(4, 5), packed=True)  # nothing supervised
    chunks = mcore.build(SINGLE, depths=2)
    with install_mtp(chunks) as hook:
        runs.run(chunks, [batch], hook, depths=2)
        assert hook.metrics()["mtp_loss/depth_1"] == 0.0
    grads = runs.gradients(chunks)
    assert all(g.isfinite().all() for g in grads.values())
    assert not any(g.any() for name, g in grads.items() if name.startswith("mtp."))


def _cut_every_depth(model):
    """The per-layer way: what a layer reads is detached in each `_get_embeddings`."""

    def cut(self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None):
        ids, positions, decoder_input, hidden = mtp.MultiTokenPredictionLayer._get_embeddings(
            self, input_ids, position_ids, embedding, hidden_states, packed_seq_params
        )
        return ids, positions, decoder_input.detach(), hidden.detach()

    for layer in model.mtp.layers:
        layer._get_embeddings = types.MethodType(cut, layer)
    return model


def cutting_every_depth_keeps_depth_two_from_training_depth_one(_):
    """And it leaves the output head attached, and under full recomputation trains nothing at all."""
    per_layer = _stock(_cut_every_depth(_model()))
    assert per_layer["output_layer"] > 0
    assert _stock(_cut_every_depth(_model(**RECOMPUTE)))["mtp.layers.0"] == 0.0

    def first_layer(model):
        return model.mtp.layers[0].eh_proj.weight

    def only_depth_two(model):
        """Gradient of the first layer from the loss of depth 2 alone."""
        batch = runs.MicroBatch(numbers=(0, 2), packed=False)
        targets = batch.targets(2, CpSplit())
        mask = targets.mask.clone()
        mask[0] = False
        targets = dataclasses.replace(targets, mask=mask, counts=(0, targets.counts[1]))
        with install_mtp([model]) as hook, hook.step([targets]), hook.micro_batch(targets):
            logits = model(batch.place(runs.sequences()[0]), None, None)
            (logits.sum() * 0).backward()
        return first_layer(model).grad.norm().item()

    assert only_depth_two(_model()) > 0
    assert only_depth_two(_model(**RECOMPUTE)) > 0
    # The per-layer cut, for the same question: silence the loss of depth 1 in stock.
    model, apply, calls = _cut_every_depth(_model()), mtp.MTPLossAutoScaler.apply, []

    def second_only(hidden, loss):
        calls.append(None)
        return apply(hidden, loss) if len(calls) == 2 else hidden

    mtp.MTPLossAutoScaler.apply = second_only
    try:
        _stock(model)
    finally:
        del mtp.MTPLossAutoScaler.apply
    assert not first_layer(model).grad.any()


def passes_without_gradients_skip_mtp(_):
    ids, labels, positions = _batch()
    model, calls = _model(), []
    model.mtp.layers[0].register_forward_hook(lambda *args: calls.append(None))
    with torch.no_grad():
        model(ids, positions, None, labels=labels)
        assert len(calls) == 1
        with install_mtp([model]) as hook:
            batch = runs.MicroBatch(numbers=(0, 2), packed=False)
            targets = batch.targets(2)
            model(ids, positions, None)
            with hook.micro_batch(targets):
                model(batch.place(runs.sequences()[0]), None, None)
    assert len(calls) == 1


def full_recomputation_of_packed_sequences_fails_in_stock(_):
    batch = runs.MicroBatch(numbers=(0, 2), packed=True)
    ids = batch.place(runs.sequences()[0])
    positions = torch.arange(ids.shape[1])[None]
    model = _model(**RECOMPUTE)
    with pytest.raises(TypeError, match="save_for_backward"):
        model(ids, positions, None, labels=ids, packed_seq_params=batch.packed_params())
    chunks = mcore.build(SINGLE, depths=2, **RECOMPUTE)
    with install_mtp(chunks) as hook:
        runs.run(chunks, [batch], hook, depths=2)
    assert all(g.any() for name, g in runs.gradients(chunks).items() if name.startswith("mtp."))


def packed_batches_without_position_ids_fail_in_stock(_):
    ids, labels, _positions = _batch()
    with pytest.raises(TypeError, match="not NoneType"):
        _model()(ids, None, None, labels=labels)
    # Every run of the parity matrix passes position_ids=None.


def the_loss_scale_reaches_both_losses_or_the_step_is_refused(_):
    model = _model(dtype=torch.float32)
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    plain = _hooked(model)
    scaled = _hooked(model, loss_scale=lambda: 65536.0)
    for part, norm in plain.items():
        assert scaled[part] == 65536.0 * norm
    model.config.fp16 = True
    with install_mtp([model]) as hook, pytest.raises(SettingsError, match=r"grad_scale_func = optimizer\.scale_loss"):
        runs.run([model], [batch], hook, depths=2)


def a_schedule_scales_the_loss_by_step(_):
    chunks = mcore.build(SINGLE, depths=1)
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    seen = []
    with install_mtp(chunks, MTPConfig(scale=lambda step: 0.1 * 2.0**-step)) as hook:
        for index in (0, 1, 2):
            runs.run(chunks, [batch], hook, depths=1, index=index)
            seen.append(runs.gradients(chunks)["mtp.layers.0.eh_proj.weight"])
    torch.testing.assert_close(seen[0], 2 * seen[1], rtol=1e-14, atol=0)
    torch.testing.assert_close(seen[0], 4 * seen[2], rtol=1e-14, atol=0)


def removing_restores_the_model_exactly(_):
    model = _model()

    def attributes():
        return {id(m): {k: id(v) for k, v in vars(m).items() if not k.startswith("current_")} for m in model.modules()}

    before, config = attributes(), model.config
    hook = install_mtp([model])
    assert attributes() != before
    with pytest.raises(HookError, match="installed in this model already"):
        install_mtp([model])
    hook.remove()
    hook.remove()
    assert attributes() == before
    assert model.config is config
    assert config.mtp_num_layers == 2
    stock = _stock(model)
    assert stock == _stock(_model())
    with install_mtp([model]) as hook:
        original = model._postprocess
        model._postprocess = lambda *args, **kwargs: original(*args, **kwargs)
        with pytest.raises(HookError, match="patched again"):
            hook.remove()
        model._postprocess = original
    assert attributes() == before
    with pytest.raises(ZeroDivisionError), install_mtp([model]) as hook:  # noqa: PT012
        batch = runs.MicroBatch(numbers=(0, 2), packed=False)
        targets = batch.targets(2)
        with hook.step([targets]), hook.micro_batch(targets):
            model(batch.place(runs.sequences()[0]), None, None)
            raise ZeroDivisionError
    assert attributes() == before


def a_hook_used_out_of_order_is_refused(_):
    model = _model()
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    ids, targets = batch.place(runs.sequences()[0]), batch.targets(2)
    with install_mtp([model]) as hook:
        with pytest.raises(HookError, match="no step has finished"):
            hook.metrics()
        with pytest.raises(HookError, match="outside of step"), hook.micro_batch(targets):
            pass
        with pytest.raises(HookError, match="outside of micro_batch"), hook.step([targets]):
            model(ids, None, None)
        with pytest.raises(HookError, match="declared 2 micro-batches, 1 ran"), hook.step([targets] * 2):  # noqa: SIM117
            with hook.micro_batch(targets):
                model(ids, None, None)
        with pytest.raises(HookError, match="more micro-batches than the 1"), hook.step([targets]):  # noqa: PT012
            for _ in range(2):
                with hook.micro_batch(targets):
                    model(ids, None, None)
        with pytest.raises(HookError, match="do not nest"), hook.step([targets]), hook.step([targets]):
            pass
        with pytest.raises(AlignmentError, match="another layout"), hook.step([targets]):  # noqa: SIM117
            with hook.micro_batch(targets):
                model(ids[:, :8], None, None)
        with pytest.raises(AlignmentError, match="1 depths, the model has 2"), hook.step([batch.targets(1)]):
            pass
        with pytest.raises(SettingsError, match="which is off"), hook.step([targets], main_tokens=3):
            pass


def settings_that_cannot_hold_together_are_refused(_):
    config = mcore.config(SINGLE, depths=2)
    check_mtp_settings(config, depths=2)
    with pytest.raises(SettingsError, match="strips MTP layers"):
        check_mtp_settings(mcore.config(SINGLE, depths=0), depths=2)
    with pytest.raises(SettingsError, match="chunked head loss"):
        check_mtp_settings(config, depths=2, lm_head_chunk_size=1024)
    config.defer_embedding_wgrad_compute = True
    with pytest.raises(SettingsError, match="defer_embedding_wgrad_compute"):
        check_mtp_settings(config, depths=2)
    with pytest.raises(HookError, match="no language model"):
        install_mtp([torch.nn.Linear(2, 2)])
    with pytest.raises(SettingsError, match="would train nothing"):
        install_mtp([_model(depths=0)])
    with pytest.raises(SettingsError, match="not negative"):
        MTPConfig(scale=-1.0)
    model = _model(calculate_per_token_loss=True)
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    with install_mtp([model]) as hook, pytest.raises(SettingsError, match="pass main_tokens"):
        hook.step([batch.targets(2)]).__enter__()


def a_wrapper_may_hand_in_embedded_inputs(_):
    """As multimodal models do: the language model gets `decoder_input` beside the token ids."""

    class Wrapper(torch.nn.Module):
        def __init__(self, language_model):
            super().__init__()
            self.language_model = language_model

        def forward(self, ids):
            embedded = self.language_model.embedding(input_ids=ids, position_ids=None)
            return self.language_model(ids, None, None, decoder_input=embedded)

    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    ids, targets = batch.place(runs.sequences()[0]), batch.targets(2)
    grads = []
    for wrapped in (False, True):
        model = _model()
        outer = Wrapper(model) if wrapped else model
        with install_mtp([outer]) as hook, hook.step([targets]), hook.micro_batch(targets):
            logits = outer(ids) if wrapped else outer(ids, None, None)
            (logits.sum() * 0).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if name.startswith("mtp.")})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def moe_auxiliary_losses_keep_their_scale(_):
    """With the MTP loss itself at zero, the router of an MTP layer gets the gradient that it gets in stock."""
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    ids = batch.place(runs.sequences()[0])
    chunks = mcore.build(SINGLE, depths=1, moe=True)
    with install_mtp(chunks, MTPConfig(scale=0.0)) as hook:
        runs.run(chunks, [batch], hook, depths=1, main_scale=0.0)
    ours = runs.gradients(chunks)
    model = mcore.inner(mcore.build(SINGLE, depths=1, moe=True, ddp=False, mtp_loss_scaling_factor=0.0)[0])
    positions = torch.arange(ids.shape[1]).expand(2, -1)
    model(ids, positions, None, labels=ids).sum().mul(0.0).backward()
    name = "mtp.layers.0.transformer_layer.mlp.router.weight"
    stock = dict(model.named_parameters())[name].grad
    assert stock.any()
    torch.testing.assert_close(ours[name], stock, rtol=1e-12, atol=0)


def guards_tell_what_moved_and_what_was_reached(_):
    chunks = mcore.build(SINGLE, depths=1, dtype=torch.float32)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, weight_decay=0.0), chunks
    )
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)
    with install_mtp(chunks) as hook:
        own = hook.named_parameters()
        before, backbone = fingerprint(own), fingerprint(chunks[0].module.decoder.named_parameters())
        with pytest.raises(GuardError, match="did not change"):
            require_moved(before, fingerprint(own))
        optimizer.zero_grad()
        runs.run(chunks, [batch], hook, depths=1, main_scale=0.0)
        check_isolation(chunks[0].named_parameters())
        optimizer.step()
        require_moved(before, fingerprint(own))
        assert fingerprint(chunks[0].module.decoder.named_parameters()) == backbone
        runs.run(chunks, [batch], hook, depths=1)
        with pytest.raises(GuardError, match=r"reaches .* parameters of the backbone"):
            check_isolation(chunks[0].named_parameters())
    model = _model()
    _stock(model)
    with pytest.raises(GuardError, match=r"embedding\.word_embeddings\.weight"):
        check_isolation(model.named_parameters())


def mtp_has_a_clip_group_of_its_own(_):
    """The policy's update is that of a run whose MTP gradients do not exist, however large they are."""
    batch = runs.MicroBatch(numbers=(0, 2), packed=False)

    def update(*, sharded, clip, scale):
        """Clipped gradients by name, as Adam's first moment shows them, the stock norm and the group's own."""
        ddp = {"use_distributed_optimizer": sharded}
        chunks = mcore.build(SINGLE, depths=1, dtype=torch.float32, ddp_config=ddp)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.5, use_distributed_optimizer=sharded), chunks
        )
        with install_mtp(chunks, MTPConfig(scale=scale)) as hook:
            group = MTPClip(optimizer, hook.named_parameters(), max_norm=0.25) if clip else None
            optimizer.zero_grad()
            runs.run(chunks, [batch], hook, depths=1)
            _, norm, _ = optimizer.step()
            own = group.norm if group else None
            if group:
                group.remove()
        names = {id(p): name for name, p in mcore.named(chunks)}
        clipped = {
            names[id(model)]: leaf.optimizer.state[main]["exp_avg"] * 10
            for leaf in optimizer.chained_optimizers
            for model, main in _model_and_main(leaf)
        }
        assert clipped.keys() == set(names.values())
        size = sum(m.square().sum() for name, m in clipped.items() if name.startswith("mtp.")).sqrt().item()
        return {n: m for n, m in clipped.items() if not n.startswith("mtp.")}, norm, own, size

    for sharded in (False, True):
        alone, norm_alone, *_ = update(sharded=sharded, clip=False, scale=0.0)
        mixed, norm_mixed, *_ = update(sharded=sharded, clip=False, scale=1e5)
        assert norm_mixed > 2 * norm_alone
        assert not torch.equal(mixed["decoder.final_layernorm.weight"], alone["decoder.final_layernorm.weight"])
        split, norm_split, own, size = update(sharded=sharded, clip=True, scale=1e5)
        assert abs(norm_split / norm_alone - 1) < 1e-6
        for name, gradient in alone.items():
            torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-7)
        assert own > 1.0
        assert abs(size - 0.25) < 1e-4


def stock_packed_roll_reads_the_unpadded_lengths(rank):
    """Under context parallelism, real and padded lengths that differ: wrong on every rank. The hook rolls nothing."""
    group = dist.group.WORLD
    real, room = torch.tensor([0, 5, 11]), torch.tensor([0, 8, 16])
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    tokens[0, :5], tokens[0, 8:14] = torch.arange(1, 6), torch.arange(11, 17)
    wanted = torch.zeros_like(tokens)
    for start, end in ((0, 8), (8, 16)):
        wanted[0, start : end - 1] = tokens[0, start + 1 : end]
    batch = runs.MicroBatch(numbers=(3, 0), packed=True, align=8)
    columns = CpSplit(size=2, rank=rank).local_columns(batch.layout)
    own = tokens[:, columns]
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=room, cu_seqlens_q_padded=room)
    assert torch.equal(mtp.roll_tensor(own, -1, -1, cp_group=group, packed_seq_params=params)[0], wanted[:, columns])
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=real, cu_seqlens_q_padded=room)
    rolled, _ = mtp.roll_tensor(own, -1, -1, cp_group=group, packed_seq_params=params)
    assert not torch.equal(rolled, wanted[:, columns])


def stock_means_are_means_of_means(rank):
    """Two data parallel ranks with 3 and 1 supervised tokens: stock's figure weighs the ranks alike."""
    mcore.init(SINGLE)
    ids, labels, positions = _batch()
    model = mcore.inner(mcore.build(SINGLE, depths=1, ddp=False)[0])
    mask = torch.zeros(2, 8)
    mask[0, 1 : 4 if rank == 0 else 2] = 1
    labels = labels + rank & 31
    mtp.MTPLossLoggingHelper.tracker = {}
    model(ids, positions, None, labels=labels, loss_mask=mask)
    mtp.MTPLossLoggingHelper.reduce_loss_in_tracker()
    stock = mtp.MTPLossLoggingHelper.tracker["values"][0].item()
    # The same positions through the hook: next-token labels and mask.
    targets = mtp_targets(
        ids, mask, layout=Layout.padded([8, 8], 8), depths=1, mask_alignment=Alignment.NEXT_TOKEN, labels=labels,
        labels_alignment=Alignment.NEXT_TOKEN,
    )  # fmt: skip
    with install_mtp([model]) as hook:
        with hook.step([targets]), hook.micro_batch(targets):
            model(ids, None, None)
        metrics = hook.metrics()
        own = hook._finished.sums.clone()
    mine = own[0, 0] / own[2, 0]
    dist.all_reduce(mine)
    assert metrics["mtp_tokens/depth_1"] == 4
    dist.all_reduce(own)
    assert abs(metrics["mtp_loss/depth_1"] - (own[0, 0] / own[2, 0]).item()) < 1e-12
    assert abs(stock - mine.item() / 2) < 1e-6 * abs(stock)
    assert abs(stock - metrics["mtp_loss/depth_1"]) > 1e-3
