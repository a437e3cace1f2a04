"""Two processes share the tokens of a model: torchrun --nproc-per-node 2 examples/context_parallel_model.py."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import sparge


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ring",))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes)).eval()  # from_pretrained(...)
    tokens, positions = torch.randint(256, (1, 600)), torch.arange(600)[None]

    with torch.no_grad(), sparge.patch(model, sparge.SparseConfig(quantization="none")):
        alone = model(tokens, use_cache=False).logits
        mine, where = (sparge.shard_sequence(x, mesh, dim=1, sharding="zigzag") for x in (tokens, positions))
        with sparge.context_parallel(mesh, sharding="zigzag"):
            whole = torch.ones_like(mine)  # says that a jump of the positions begins no other sequence
            shard = model(mine, attention_mask=whole, position_ids=where, use_cache=False).logits
    logits = sparge.gather_sequence(shard, mesh, dim=1, sharding="zigzag")

    if dist.get_rank() == 0:
        print(f"logits of {logits.shape[1]} tokens, error {(logits - alone).abs().max():.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
