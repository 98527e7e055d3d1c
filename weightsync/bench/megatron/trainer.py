"""Builds a small Megatron-Core GPT from a Hugging Face config and trains it: the trainer of bench, demo and tests.

Order of calls, the same on every rank: `torch.distributed.init_process_group`, `build_model` (which sets up
Megatron's parallel state), `make_optimizer`, then `train_step` once per step. The layers, the sharding, the pipeline
schedule, the data-parallel wrapper and the optimizer are Megatron-Core's own. On CUDA the Transformer Engine spec is
used where Transformer Engine is installed and Megatron's local spec otherwise; without CUDA see `cpu` and `spec`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from weightsync.bench.megatron.cpu import cpu_runtime
from weightsync.errors import ConfigError

__all__ = ["build_model", "forward_logits", "init_parallel", "make_optimizer", "train_step", "transformer_config"]

QKV_BIAS_TYPES = ("qwen2", "mimo")
"""Model types whose attention has q, k and v biases without saying so in the config."""


def init_parallel(*, tp: int = 1, pp: int = 1, vpp: int | None = None, seed: int = 0) -> None:
    """(Re)build Megatron's parallel state over the default process group, which must exist."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with cpu_runtime():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
        )
        destroy_num_microbatches_calculator()
        MTPLossLoggingHelper.tracker = {}  # process-global, and shaped by the previous model
        # The tracker without states suffices (no dropout), and the other one wants a CUDA generator.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True)


def transformer_config(
    hf_config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
) -> Any:
    """The `TransformerConfig` of a dense Hugging Face config (Llama, Qwen2, Qwen3, MiMo).

    Raises:
        ConfigError: the layers do not divide into `pp * vpp` chunks.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    heads, layers = hf_config["num_attention_heads"], hf_config["num_hidden_layers"]
    if layers % (pp * (vpp or 1)):
        raise ConfigError(f"{layers} layers do not divide into pp={pp} x vpp={vpp or 1} chunks: choose other sizes")
    model_type = hf_config["model_type"]
    low_precision = {} if dtype == torch.float32 else {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hf_config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=hf_config.get("num_key_value_heads") or heads,
        kv_channels=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        ffn_hidden_size=hf_config["intermediate_size"],
        layernorm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        add_qkv_bias=model_type in QKV_BIAS_TYPES,
        qk_layernorm=model_type == "qwen3",
        mtp_num_layers=hf_config.get("num_nextn_predict_layers") or None,
        mtp_loss_scaling_factor=0.1,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        sequence_parallel=sequence_parallel and tp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Interleaved stages with batched p2p mix up their messages on gloo, without an error.
        batch_p2p_comm=vpp is None,
        overlap_p2p_comm=vpp is not None,
        **low_precision,
    )


@cpu_runtime()
def build_model(
    hf_config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    vocab_multiple: int = 1,
    sequence_parallel: bool = False,
    layer_names: Literal["te", "local"] = "te",
    ddp: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Any]:
    """This rank's model chunks (`vpp` of them, else one), with random weights that do not depend on `tp`.

    `tied` overrides `tie_word_embeddings`. The vocabulary is padded to a multiple of `vocab_multiple * tp`, as trainers
    do. `layer_names="local"` takes Megatron's local spec, with its own parameter names. With `ddp` (fields of
    `DistributedDataParallelConfig`; `{}` for the defaults) the chunks come wrapped and can be trained. The rest of the
    world is data parallel.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    init_parallel(tp=tp, pp=pp, vpp=vpp, seed=seed)
    config = transformer_config(hf_config, tp=tp, pp=pp, vpp=vpp, dtype=dtype, sequence_parallel=sequence_parallel)
    if tied is None:
        tied = bool(hf_config.get("tie_word_embeddings", False))
    multiple = vocab_multiple * tp
    rope = hf_config.get("rope_parameters") or hf_config
    chunks: list[Any] = []
    for vp_stage in range(vpp) if vpp else [None]:
        block, mtp = _layer_specs(config, layer_names, vp_stage)
        # Every tensor-parallel rank draws the whole matrix and keeps its part: one seed for all of them.
        torch.manual_seed(seed + 1000 * parallel_state.get_pipeline_model_parallel_rank() + (vp_stage or 0))
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = GPTModel(
            config,
            block,
            vocab_size=-(-hf_config["vocab_size"] // multiple) * multiple,
            max_sequence_length=hf_config.get("max_position_embeddings", 4096),
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=int(rope.get("rope_theta", 10000)),
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
        )
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(chunk if dtype == torch.float32 else Float16Module(config, chunk))
    if ddp is not None:
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
        chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(chunks)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        if ddp_config.overlap_grad_reduce:
            config.no_sync_func = [c.no_sync for c in chunks] if vpp else chunks[0].no_sync
    return chunks


def _layer_specs(config: Any, layer_names: str, vp_stage: int | None) -> tuple[Any, Any]:
    """(decoder block, MTP block or None) of one chunk."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec_for_backend,
    )

    backend: Any
    if layer_names == "te" and not torch.cuda.is_available():
        from weightsync.bench.megatron.spec import CpuSpecProvider, cpu_block_spec

        block, backend = cpu_block_spec(config, vp_stage), CpuSpecProvider()
        # A chunk without decoder layers may still hold MTP layers, which take their layer from a spec with one.
        layer = block.layer_specs[0] if block.layer_specs else cpu_block_spec(config, 0).layer_specs[0]
    elif layer_names == "te" and importlib.util.find_spec("transformer_engine"):
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
        block = layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        backend = LocalSpecProvider()
        block = layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec_for_backend(config, layer, backend, vp_stage=vp_stage)
    return block, mtp


def make_optimizer(chunks: Sequence[Any], *, lr: float = 1e-2) -> Any:
    """Megatron's Adam over chunks built with `ddp` (distributed, if that config says so)."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config, ddp = chunks[0].config, chunks[0].ddp_config
    with cpu_runtime():
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=0.0,
                clip_grad=0.0,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=ddp.use_distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            list(chunks),
        )


def train_step(
    chunks: Sequence[Any],
    optimizer: Any,
    *,
    step: int = 0,
    num_micro_batches: int = 2,
    micro_batch_size: int = 2,
    seq_len: int = 16,
    vocab_size: int | None = None,
    micro_batches: Sequence[torch.Tensor] | None = None,
) -> float | None:
    """One step of next-token (and MTP) loss on random tokens that depend on `step` and the data-parallel rank.

    Tokens are below `vocab_size`, which defaults to the (padded) vocabulary of the model. `micro_batches`, token ids
    [batch, seq_len + 1] each and equal on every rank of a model replica, take the place of random ones.

    Returns the mean next-token loss on the last pipeline stage, None on the others.
    """
    from megatron.core import parallel_state

    tokens = micro_batches
    if tokens is None:
        vocab = _inner(chunks[0]).vocab_size if vocab_size is None else vocab_size
        generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
        shape = (micro_batch_size, seq_len + 1)
        tokens = [torch.randint(0, vocab, shape, generator=generator) for _ in range(num_micro_batches)]
    with cpu_runtime():
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = _run_schedule(chunks, tokens, forward_only=False)
        optimizer.step()
    return sum(losses) / len(losses) if losses else None


def forward_logits(chunks: Sequence[Any], tokens: torch.Tensor) -> list[torch.Tensor] | None:
    """Logits of the main head, then of each MTP depth, for `tokens` [batch, seq]; None but on the last stage.

    Each is [batch, seq, padded vocabulary], gathered over the tensor-parallel group.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    heads: list[torch.Tensor] = []
    hooks = [
        # A copy: the cross entropy overwrites the logits with their softmax.
        head.register_forward_hook(lambda module, args, output: heads.append(output[0].detach().clone()))
        for chunk in chunks
        if (head := getattr(_inner(chunk), "output_layer", None)) is not None
    ]
    try:
        with cpu_runtime(), torch.no_grad():
            # Interleaved stages want at least as many micro-batches as stages: repeat the batch, read the first.
            num_micro_batches = parallel_state.get_pipeline_model_parallel_world_size()
            _run_schedule(chunks, [torch.nn.functional.pad(tokens, (0, 1))] * num_micro_batches, forward_only=True)
            heads = heads[: len(heads) // num_micro_batches]
            logits = [gather_from_tensor_model_parallel_region(x).transpose(0, 1) for x in heads]
    finally:
        for hook in hooks:
            hook.remove()
    if not parallel_state.is_pipeline_last_stage():
        return None
    return logits[-1:] + logits[:-1]  # Megatron computes the MTP heads first


def _run_schedule(chunks: Sequence[Any], micro_batches: Sequence[torch.Tensor], *, forward_only: bool) -> list[float]:
    """Megatron's pipeline schedule over token batches [batch, seq + 1]; the losses by micro-batch (last stage)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device = next(chunks[0].parameters()).device
    batch, seq_len = micro_batches[0].shape[0], micro_batches[0].shape[1] - 1
    mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool, device=device).triu(1)

    def forward_step(data: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(data).to(device)
        positions = torch.arange(seq_len, device=device).expand(batch, -1)
        labels = tokens[:, 1:].contiguous()
        loss_mask = torch.ones(labels.shape, device=device)
        output = chunk(tokens[:, :-1].contiguous(), positions, mask, labels=labels, loss_mask=loss_mask)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.item()}

        return output, loss_of

    virtual = len(chunks) > 1
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks] if virtual else iter(micro_batches),
        model=list(chunks) if virtual else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=seq_len,
        micro_batch_size=batch,
        forward_only=forward_only,
    )
    return [r["loss"] for r in results]


def _inner(chunk: Any) -> Any:
    """The `GPTModel` inside data-parallel and half-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
