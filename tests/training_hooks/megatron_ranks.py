"""What the processes of `test_megatron_ranks` run: every scenario of one world size, one after another."""

from __future__ import annotations

import time

from tests.training_hooks import matrix

# Functions of `traps`, named here because that module imports Megatron-Core.
TRAPS = {
    1: (
        "labels_are_needed_for_logits",
        "stock_mtp_trains_the_backbone",
        "an_empty_mask_makes_stock_nan",
        "cutting_every_depth_keeps_depth_two_from_training_depth_one",
        "passes_without_gradients_skip_mtp",
        "full_recomputation_of_packed_sequences_fails_in_stock",
        "packed_batches_without_position_ids_fail_in_stock",
        "the_loss_scale_reaches_both_losses_or_the_step_is_refused",
        "a_schedule_scales_the_loss_by_step",
        "removing_restores_the_model_exactly",
        "a_hook_used_out_of_order_is_refused",
        "settings_that_cannot_hold_together_are_refused",
        "a_wrapper_may_hand_in_embedded_inputs",
        "moe_auxiliary_losses_keep_their_scale",
        "guards_tell_what_moved_and_what_was_reached",
        "mtp_has_a_clip_group_of_its_own",
    ),
    2: ("stock_packed_roll_reads_the_unpadded_lengths", "stock_means_are_means_of_means"),
}

# Names of `capture_ranks.LAYOUTS`, for the same reason.
CAPTURES = {
    1: ("single_permuted",),
    2: ("pp2_uneven", "pp2_vpp2_permuted", "tp2_sp", "tp2", "cp2_thd", "cp2_bshd", "dp2"),
    4: ("tp2_pp2_sp", "tp2_cp2_sp"),
}
BITWISE = ("single_permuted", "pp2_uneven", "pp2_vpp2_permuted", "dp2")
"""Nothing in these layouts changes the order of a sum."""


def main(rank, world_size, names=None):
    """{scenario: result} of this rank; with `names`, of those scenarios only."""
    from tests.training_hooks import capture_ranks, kernel_ranks, mcore, traps

    scenarios: dict = {c.name: (matrix.run_case, c) for c in matrix.CASES if matrix.ranks_of(c) == world_size}
    scenarios |= {f"capture-{name}": (capture_ranks.check, name) for name in CAPTURES[world_size]}
    if world_size == 2:
        from tests.training_hooks import (
            fsdp_ranks,
        )  # here, because Transformers is slow to import, and not in `runtime`

        scenarios["capture-fsdp2"] = (fsdp_ranks.check, rank)
    scenarios |= {f"kernel-{world_size}": (kernel_ranks.check, rank)}
    scenarios |= {name: (getattr(traps, name), rank) for name in TRAPS.get(world_size, ())}
    seen = {}
    with mcore.runtime():
        for name, (fn, argument) in scenarios.items():
            if names is not None and name not in names:
                continue
            start = time.perf_counter()
            mcore.init(mcore.Parallel())  # no scenario leans on what another one left
            try:
                seen[name] = fn(argument)
            except Exception as error:
                # The others may wait for this rank in a collective: end them all.
                raise RuntimeError(f"scenario {name} failed on rank {rank} of {world_size}") from error
            if rank == 0:
                print(f"{name}: {time.perf_counter() - start:.2f} s", flush=True)
    return seen
