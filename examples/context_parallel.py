"""Two processes share one sequence: torchrun --nproc-per-node 2 examples/context_parallel.py [ring | ulysses]."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sparge

TOKENS = 1024


def main(method: str) -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(method,))
    torch.manual_seed(0)  # here every rank makes the whole sequence; in a model each has its own tokens only
    q, k, v = torch.randn(3, 1, 4, TOKENS, 64).cumsum(-2) / 8
    config = sparge.SparseConfig(quantization="none")

    shards = [sparge.shard_sequence(x, mesh, sharding="zigzag") for x in (q, k, v)]
    with sparge.context_parallel(mesh, sharding="zigzag") as traffic:
        shard, stats = sparge.attention(*shards, is_causal=True, config=config, return_stats=True)
    output = sparge.gather_sequence(shard, mesh, sharding="zigzag")

    alone = sparge.attention(q, k, v, is_causal=True, config=config)
    if dist.get_rank() == 0:
        print(f"{method}: {stats.sparsity:.0%} of the blocks skipped, error {(output - alone).abs().max():.0e}")
        print(f"sent by rank 0:\n{traffic}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ring")
