"""One rank of `test_ranks`: a drafter with its embedding split over the ranks, so that each step ends in a collective.

python draft_loop_ranks.py RANK RANKS PORT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from draft_loops import Follower

from nwor_ops.drafter import GraphKey


class SpreadFollower(Follower):
    """Each rank holds the embeddings of its part of the vocabulary. The sum over all ranks is exact."""

    def model(self, key, metadata):
        rows, buffers = key.num_reqs, self.buffers
        ids = buffers.input_ids[:rows]
        share = self.embedding[ids] * (ids % dist.get_world_size() == dist.get_rank())[:, None]
        dist.all_reduce(share)
        slots, positions = metadata["slots"].clamp(min=0), metadata["positions"][:, None] / 64
        hidden = torch.tanh(buffers.hidden_states[:rows] + (share + self.of_slots[slots] + positions))
        return hidden, hidden


def main(rank: int, ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    follower = SpreadFollower(5, 8, 30, f"cuda:{rank}", debug=True)
    follower.loop.capture([GraphKey(8), GraphKey(2)])
    for batch in range(6):
        num_reqs = (8, 1, 5, 2, 7, 3)[batch]
        follower.temperature.fill_(batch % 2)
        for mode in ("loop", "eager"):
            follower.load(num_reqs, seed=batch)
            expected = follower.plain(num_reqs)["drafts"]
            drafts = follower.loop.run(num_reqs, mode).tolist()
            assert drafts == expected, (rank, batch, mode, drafts, expected)
    print(f"rank {rank} of {ranks}: 6 batches, 2 modes, the same drafts")
    follower.loop.invalidate("the process group is about to end")
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
