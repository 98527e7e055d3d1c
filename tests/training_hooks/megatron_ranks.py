"""What the processes of `test_megatron_ranks` run: every scenario of one world size, one after another."""

from __future__ import annotations

import time

from tests.training_hooks import matrix


def main(rank, world_size, names=None):
    """{scenario: result} of this rank; with `names`, of those scenarios only."""
    from tests.training_hooks import kernel_ranks, mcore, traps

    scenarios = {c.name: (matrix.run_case, c) for c in matrix.CASES if matrix.ranks_of(c) == world_size}
    scenarios |= {f"kernel-{world_size}": (kernel_ranks.check, rank)}
    scenarios |= {name: (fn, rank) for name, fn in traps.SCENARIOS.get(world_size, {}).items()}
    seen = {}
    with mcore.runtime():
        for name, (fn, argument) in scenarios.items():
            if names is not None and name not in names:
                continue
            start = time.perf_counter()
            try:
                seen[name] = fn(argument)
            except Exception as error:
                # The others may wait for this rank in a collective: end them all.
                raise RuntimeError(f"scenario {name} failed on rank {rank} of {world_size}") from error
            if rank == 0:
                print(f"{name}: {time.perf_counter() - start:.2f} s", flush=True)
    return seen
