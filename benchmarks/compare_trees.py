"""Compare the cost of transactions in this tree and in another checkout. Each turn runs in a new process.

    python benchmarks/compare_trees.py OTHER [--folder FOLDER]      # OTHER: a checkout with its libraries built

Use it before you merge a change that should cost nothing. It needs a GPU, and uses only the manager, which both trees
have. It measures three times for each shape (requests x drafts per request) and both modes. `device` is a graph of
begin, 32 writes and commit_rejected, replayed with cold caches. `host` is the host's time for the same calls. `ends` is
the host's time for begin and commit only. A result is this tree's time divided by the other's, from one turn each. The
median and the quartiles of all turns are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
SHAPES = ((1, 4), (16, 4), (64, 4), (256, 8))
TURNS, REPLAYS, CALLS = 5, 60, 200
READ_BYTES = 2**28


def transactions(mode: str, requests: int, drafts: int) -> dict[str, float]:
    """Return medians in microseconds for the tree that `nwor_ops` is imported from."""
    import torch

    from nwor_ops import DraftCommitManager, LayerCache, Window, num_shadow_blocks

    tokens, pages = requests * (drafts + 1), 4
    shadow = num_shadow_blocks(requests, drafts, BLOCK_SIZE) if mode == "stage" else 0
    shape = (requests * pages + shadow, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE)
    manager = DraftCommitManager(
        max_num_tokens=tokens, max_num_requests=requests, max_draft_tokens=requests * drafts, device="cuda", mode=mode,
        max_drafts_per_request=drafts,
    )  # fmt: skip
    for layer in range(LAYERS):
        manager.register_layer(f"{layer}", LayerCache.packed(torch.zeros(shape, dtype=torch.bfloat16, device="cuda")))
    manager.allocate()
    generator = torch.Generator().manual_seed(0)
    seq_lens = torch.randint(drafts + 2, pages * BLOCK_SIZE + 1, (requests,), generator=generator, dtype=torch.int32)
    tables = torch.randperm(requests * pages, generator=generator).view(requests, pages).to(torch.int32)
    positions = seq_lens[:, None] - drafts - 1 + torch.arange(drafts + 1)
    slots = tables.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    slot_mapping = slots.flatten().long().cuda()
    window = Window(
        torch.arange(0, tokens + 1, drafts + 1, dtype=torch.int32, device="cuda"),
        torch.arange(drafts, requests * drafts + 1, drafts, dtype=torch.int32, device="cuda"),
        {"default": slot_mapping},
        requests * drafts,
        seq_lens=seq_lens.cuda(),
        block_tables={"default": tables.cuda()},
    )
    rejected = torch.randint(0, drafts + 1, (requests,), generator=generator, dtype=torch.int32).cuda()
    keys = torch.randn(LAYERS, 2, tokens, HEADS, HEAD_SIZE, device="cuda").to(torch.bfloat16)

    def ends() -> None:
        manager.begin(window)
        manager.commit_rejected(rejected)

    def whole() -> None:
        manager.begin(window)
        for layer in range(LAYERS):
            manager.write(f"{layer}", keys[layer, 0], keys[layer, 1], slot_mapping)
        manager.commit_rejected(rejected)

    def on_host(run, calls: int) -> float:
        samples = []
        for _ in range(calls):
            begin = time.perf_counter()
            run()
            samples.append(1e6 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
        return statistics.median(samples)

    with torch.inference_mode():
        whole()
        torch.cuda.synchronize()
        times = {"host": on_host(whole, CALLS // 4), "ends": on_host(ends, CALLS)}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole()
        read, marks = torch.zeros(READ_BYTES, dtype=torch.uint8, device="cuda"), []
        for _ in range(REPLAYS + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            read.sum()
            begin.record()
            graph.replay()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        times["device"] = statistics.median(1000 * begin.elapsed_time(end) for begin, end in marks[3:])
    return times


def turn(tree: pathlib.Path) -> dict[str, float]:
    """Return all times of a tree by name, measured in a new process."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, __file__, "--one-turn", str(tree)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare_trees.py: {tree} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one_turn(tree: pathlib.Path) -> None:
    import nwor_ops

    if pathlib.Path(nwor_ops.__file__).resolve().parents[1] != tree.resolve():
        sys.exit(f"nwor_ops is that of {nwor_ops.__file__}")
    times = {
        f"{mode}/{requests}x{drafts}/{what}": value
        for mode in ("cow", "stage")
        for requests, drafts in SHAPES
        for what, value in transactions(mode, requests, drafts).items()
    }
    print(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--one-turn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_turn:
        one_turn(options.other)
        return
    from results import row, save, this_machine

    pairs = [(turn(ROOT), turn(options.other)) for _ in range(TURNS)]
    rows = []
    for name in pairs[0][0]:
        rows.append(
            row(f"compare_trees/{name}", [ours[name] / theirs[name] for ours, theirs in pairs], "ratio", "lower")
        )
        rows.append(row(f"compare_trees/{name}/this", [ours[name] for ours, _ in pairs], "us", "lower", digits=1))
    save(this_machine(), "compare_trees", rows, options.folder)


if __name__ == "__main__":
    main()
