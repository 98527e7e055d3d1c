"""Builds real Megatron-Core `GPTModel` chunks from a Hugging Face config, and computes their logits.

Order of calls, the same on every rank: `torch.distributed.init_process_group`, `build_model` (which sets up Megatron's
parallel state), then load weights (`converters.live`) and `forward_logits`, or train. The layers, the sharding and the
pipeline schedule are Megatron-Core's own. On CUDA the Transformer Engine spec is used where Transformer Engine is
installed and Megatron's local spec otherwise; without CUDA see `cpu`, `spec` and `layers`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from converters.errors import UnsupportedFamilyError
from converters.families import rules_for
from converters.families.moe import expert_size, num_experts
from converters.live.topology import Topology
from converters.rules import RuleSet
from converters.rules.config import ModelConfig
from converters.semantic.cpu import cpu_runtime

__all__ = ["build_model", "forward_logits", "init_parallel", "run_schedule", "transformer_config", "unwrapped"]

Experts = Literal["te_grouped", "grouped", "sequential"]


def init_parallel(topology: Topology, *, seed: int = 0) -> None:
    """(Re)build Megatron's parallel state over the default process group, which must exist."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with cpu_runtime():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        _destroy_groups()
        others = _groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=topology.tp,
            pipeline_model_parallel_size=topology.pp,
            virtual_pipeline_model_parallel_size=topology.vpp,
            context_parallel_size=topology.cp,
            expert_model_parallel_size=topology.ep,
            expert_tensor_parallel_size=topology.expert_tp,
        )
        _made.extend(group for group in _groups() if group not in others)
        destroy_num_microbatches_calculator()
        MTPLossLoggingHelper.tracker = {}  # process-global, and shaped by the previous model
        # The tracker without states suffices (no dropout), and the other one wants a CUDA generator.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True)


_made: list[Any] = []
"""Process groups of the parallel state that is set up."""


def _groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


def _destroy_groups() -> None:
    """Megatron forgets its groups without destroying them: each keeps gloo threads, thousands after many models."""
    if _made and dist.is_initialized():
        # A slower rank may still be in the last exchange of the model before.
        dist.barrier()
        alive = _groups()
        for group in _made:
            if group in alive:
                dist.destroy_process_group(group)
    _made.clear()


def transformer_config(
    hf_config: Mapping[str, Any],
    topology: Topology,
    *,
    dtype: torch.dtype = torch.float32,
    experts: Experts = "te_grouped",
) -> Any:
    """Megatron's config of the model: sizes from `hf_config`, kinds of layers from the names that its rules have.

    Raises:
        UnsupportedFamilyError: rules exist, but no recipe for such a model (see docs/reference/families.md).
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    rules = rules_for(hf_config)
    config = rules.config
    has = _Has(rules)
    if any(
        has.anywhere(part) for part in ("softmax_offset", "eagle_module", "linear_proj.bias", "mlp.linear_fc1.bias")
    ):
        raise UnsupportedFamilyError(f"no recipe to build such a {rules.family} model with Megatron-Core")
    low_precision = {} if dtype == torch.float32 else {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    fields: dict[str, Any] = dict(
        num_layers=has.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        ffn_hidden_size=config.integer("intermediate_size"),
        layernorm_epsilon=config.get("rms_norm_eps") or 1e-6,
        mtp_num_layers=has.mtp_layers or None,
        mtp_loss_scaling_factor=0.1,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.expert_tp,
        sequence_parallel=topology.sequence_parallel and topology.tp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Interleaved stages with batched p2p mix up their messages on gloo, without an error.
        batch_p2p_comm=topology.vpp is None,
        overlap_p2p_comm=topology.vpp is not None,
        **low_precision,
    )
    if has.anywhere("mlp.router.weight"):
        fields |= _expert_fields(config, has, experts)
    if has.anywhere("self_attention.in_proj.weight"):
        fields |= _delta_net_fields(config, has)
    if has.anywhere("linear_kv_down_proj"):
        return MLATransformerConfig(**fields, **_latent_fields(config))
    return TransformerConfig(
        **fields,
        num_query_groups=config.groups,
        kv_channels=config.head_dim,
        add_qkv_bias=has.anywhere("self_attention.linear_qkv.bias"),
        qk_layernorm=has.anywhere("self_attention.q_layernorm.weight"),
    )


class _Has:
    """What the rules name, and in which layers."""

    def __init__(self, rules: RuleSet) -> None:
        self._names = frozenset(name for m in rules.mappings() for name in m.mcore)
        self.layers = rules.config.integer("num_hidden_layers")
        self.mtp_layers = len({name.split(".")[2] for name in self._names if name.startswith("mtp.layers.")})

    def anywhere(self, part: str) -> bool:
        return any(part in name for name in self._names)

    def per_layer(self, name: str) -> list[int]:
        return [int(f"decoder.layers.{i}.{name}" in self._names) for i in range(self.layers)]


def _expert_fields(config: ModelConfig, has: _Has, experts: Experts) -> dict[str, Any]:
    sigmoid, sparse = has.anywhere("router.expert_bias"), has.per_layer("mlp.router.weight")
    topk, groups = config.integer("num_experts_per_tok"), config.get("n_group") or 1
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts(config),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": expert_size(config),
        # A list, even of ones, makes Megatron store layer by layer.
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_grouped_gemm": experts != "sequential",
        "moe_use_legacy_grouped_gemm": experts == "grouped",
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
    }
    if sigmoid:
        fields["moe_router_topk_scaling_factor"] = config.get("routed_scaling_factor") or 1.0
        if groups > 1:
            fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": config.integer("topk_group")}
    elif config.get("norm_topk_prob") is False:
        # Probabilities over all experts, not over the chosen ones.
        fields["moe_router_pre_softmax"] = True
    if has.anywhere("mlp.shared_experts.linear_fc1.weight"):
        size = config.get("shared_expert_intermediate_size")
        shared = expert_size(config) * config.integer("n_shared_experts") if size is None else size
        gate = has.anywhere("mlp.shared_experts.gate_weight")
        fields |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": gate}
    return fields


def _latent_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "qk_head_dim": config.integer("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.integer("qk_rope_head_dim"),
        "v_head_dim": config.integer("v_head_dim"),
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": _rope(config)[0],
        "rotary_scaling_factor": 1.0,
    }


def _delta_net_fields(config: ModelConfig, has: _Has) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": has.per_layer("self_attention.in_proj.weight"),
        "linear_conv_kernel_dim": config.get("linear_conv_kernel_dim") or 4,
        "linear_key_head_dim": config.integer("linear_key_head_dim"),
        "linear_value_head_dim": config.integer("linear_value_head_dim"),
        "linear_num_key_heads": config.integer("linear_num_key_heads"),
        "linear_num_value_heads": config.integer("linear_num_value_heads"),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "deterministic_mode": not torch.cuda.is_available(),
    }


def _rope(config: ModelConfig) -> tuple[int, float]:
    """Base, and the part of a head that is rotated."""
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return int(theta), float(part)


@cpu_runtime()
def build_model(
    hf_config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int | None = None,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    vocab_multiple: int = 1,
    sequence_parallel: bool = False,
    layer_names: Literal["te", "local"] = "te",
    experts: Experts = "te_grouped",
    ddp: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Any]:
    """This rank's model chunks (`vpp` of them, else one), with random weights; of dense models equal for every `tp`.

    `tied` overrides `tie_word_embeddings`. The vocabulary is padded to a multiple of `vocab_multiple * tp`, as trainers
    do. `layer_names="local"` takes Megatron's local spec, with its own parameter names. `experts` chooses the module
    that holds them. With `ddp` (fields of `DistributedDataParallelConfig`; `{}` for the defaults) the chunks come
    wrapped and can be trained. The rest of the world is data parallel. With `cp` the groups are there, but without
    Transformer Engine no attention that could use them: such a model can be loaded and exported only.

    Raises:
        TopologyError: the sizes do not fit the world or the model.
        UnsupportedFamilyError: no recipe for such a model.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    topology = Topology(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp, sequence_parallel=sequence_parallel)
    topology.check(dist.get_world_size(), hf_config)
    init_parallel(topology, seed=seed)
    config = transformer_config(hf_config, topology, dtype=dtype, experts=experts)
    values = rules_for(hf_config).config
    theta, rotated = _rope(values)
    if tied is None:
        tied = values.flag("tie_word_embeddings")
    multiple = vocab_multiple * tp
    chunks: list[Any] = []
    for vp_stage in range(vpp) if vpp else [None]:
        block, mtp = _layer_specs(config, layer_names, vp_stage)
        # Every tensor-parallel rank draws the whole matrix and keeps its part: one seed for all of them.
        torch.manual_seed(seed + 1000 * parallel_state.get_pipeline_model_parallel_rank() + (vp_stage or 0))
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = GPTModel(
            config,
            block,
            vocab_size=-(-values.integer("vocab_size") // multiple) * multiple,
            max_sequence_length=values.get("max_position_embeddings") or 4096,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=theta,
            rotary_percent=rotated,
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
    from megatron.core.models.gpt import gpt_layer_specs as stock

    backend: Any
    if layer_names == "te" and not torch.cuda.is_available():
        from converters.semantic.spec import CpuSpecProvider, block_spec, layer_spec

        block, backend = block_spec(config, vp_stage), CpuSpecProvider()
        layer = layer_spec(config, experts=config.num_moe_experts is not None)
    else:
        te = layer_names == "te" and importlib.util.find_spec("transformer_engine") is not None
        if config.experimental_attention_variant:
            from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

            block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        else:
            block = stock.get_gpt_decoder_block_spec(config, te, normalization="RMSNorm", vp_stage=vp_stage)
        # A chunk without decoder layers may still hold MTP layers, which take their layer from a spec with one.
        layer = stock.get_gpt_decoder_layer_specs(config, te, normalization="RMSNorm")[-1]
        if te:
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            backend = TESpecProvider()
        else:
            backend = LocalSpecProvider()
    mtp = None
    if config.mtp_num_layers:
        mtp = stock.get_gpt_mtp_block_spec_for_backend(config, layer, backend, vp_stage=vp_stage)
    return block, mtp


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
        if (head := getattr(unwrapped(chunk), "output_layer", None)) is not None
    ]
    try:
        with cpu_runtime(), torch.no_grad():
            # Interleaved stages want at least as many micro-batches as stages: repeat the batch, read the first.
            num_micro_batches = parallel_state.get_pipeline_model_parallel_world_size()
            run_schedule(chunks, [torch.nn.functional.pad(tokens, (0, 1))] * num_micro_batches, forward_only=True)
            heads = heads[: len(heads) // num_micro_batches]
            logits = [gather_from_tensor_model_parallel_region(x).transpose(0, 1) for x in heads]
    finally:
        for hook in hooks:
            hook.remove()
    if not parallel_state.is_pipeline_last_stage():
        return None
    return logits[-1:] + logits[:-1]  # Megatron computes the MTP heads first


def run_schedule(chunks: Sequence[Any], micro_batches: Sequence[torch.Tensor], *, forward_only: bool) -> list[float]:
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


def unwrapped(chunk: Any) -> Any:
    """The `GPTModel` inside data-parallel and half-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
