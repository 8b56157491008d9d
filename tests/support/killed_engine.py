"""A tiny engine whose caches are a file in shared memory, so that another process can look at them when it is killed.

Every row holds one number, which tells the token that wrote it. The steps follow from a seed, so the process that looks
computes what each slot must hold.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import nwor_ops

LAYERS, HEADS, WIDTH, BLOCK, PAGES = 6, 4, 256, 4, 6  # per request PAGES pages; a row is 4 KiB
REQUESTS, DRAFTS = 3, 4
SHADOWS = nwor_ops.num_shadow_blocks(REQUESTS, DRAFTS, BLOCK)
SLOTS = REQUESTS * PAGES * BLOCK  # of requests; shadow pages follow
BEGUN, ENDING, ENDED = range(3)  # of `progress`: the number of the last step that began, began to end, and ended


@dataclass
class Step:
    number: int
    lengths: list[int]  # before the step
    parts: list[tuple[int, int, int]]  # per request: given tokens, drafts, accepted drafts
    ends: str
    tables: list[list[int]]
    slots: list[int] = field(default_factory=list)
    drafts: set[int] = field(default_factory=set)  # tokens
    kept: set[int] = field(default_factory=set)  # tokens

    def value(self, token: int, layer: int) -> int:
        return ((self.number * 32) + token) * LAYERS + layer + 1


def steps(seed: int) -> Iterator[Step]:
    """Steps of requests that grow, and start again in their pages when these are full."""
    draw = random.Random(seed)
    tables = list(range(REQUESTS * PAGES))
    draw.shuffle(tables)
    lengths = [0] * REQUESTS
    for number in range(1, 10**5):
        lengths = [0 if length + 3 + DRAFTS > PAGES * BLOCK else length for length in lengths]
        parts = []
        for length in lengths:
            drafts = draw.randint(0, DRAFTS) if length else 0
            parts.append((1 if length else draw.randint(1, 3), drafts, draw.randint(0, drafts)))
        of_requests = [tables[PAGES * request : PAGES * (request + 1)] for request in range(REQUESTS)]
        step = Step(number, lengths, parts, draw.choice(["commit", "commit_rejected", "cancel"]), of_requests)
        for request, (given, drafts, accepted) in enumerate(parts):
            for index in range(given + drafts):
                page, offset = divmod(lengths[request] + index, BLOCK)
                if index >= given:
                    step.drafts.add(len(step.slots))
                if index < given + (0 if step.ends == "cancel" else accepted):
                    step.kept.add(len(step.slots))
                step.slots.append(step.tables[request][page] * BLOCK + offset)
        yield step
        if step.ends != "cancel":
            lengths = [n + given + accepted for n, (given, _, accepted) in zip(lengths, parts, strict=True)]


def open_memory(path: str) -> tuple[Tensor, Tensor]:
    """Map the file: the caches ``[layers, pages, block, heads, width]``, and the progress of the engine."""
    shape = (LAYERS, REQUESTS * PAGES + SHADOWS, BLOCK, HEADS, WIDTH)
    count = int(torch.tensor(shape).prod())
    caches = torch.from_file(path, shared=True, size=count + 8, dtype=torch.float32)
    return caches[:count].view(shape), caches[count:].view(torch.int64)


def run(path: str, mode: str, seed: int) -> None:
    """Run steps until the process is killed."""
    caches, progress = open_memory(path)
    manager = nwor_ops.DraftCommitManager(
        max_num_tokens=32, max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * DRAFTS, device="cpu", mode=mode,
        max_drafts_per_request=DRAFTS if mode == "stage" else None,
    )  # fmt: skip
    for layer in range(LAYERS):
        manager.register_layer(str(layer), nwor_ops.LayerCache.packed(caches[layer]))
    manager.allocate()
    for step in steps(seed):
        one_step(manager, step, progress)


def one_step(manager: nwor_ops.DraftCommitManager, step: Step, progress: Tensor) -> None:
    lengths = [n + given + drafts for n, (given, drafts, _) in zip(step.lengths, step.parts, strict=True)]
    ends = torch.tensor([given + drafts for given, drafts, _ in step.parts]).cumsum(0)
    slots = torch.tensor(step.slots)
    window = nwor_ops.Window(
        query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        cu_num_draft_tokens=torch.tensor([drafts for _, drafts, _ in step.parts]).cumsum(0).int(),
        slot_mappings={"default": slots},
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables={"default": torch.tensor(step.tables, dtype=torch.int32)},
    )
    progress[BEGUN] = step.number
    manager.begin(window)
    for layer in range(LAYERS):
        values = torch.tensor([step.value(token, layer) for token in range(len(step.slots))], dtype=torch.float32)
        key = values.view(-1, 1, 1).expand(-1, HEADS, WIDTH // 2).contiguous()
        manager.write(str(layer), key, key, slots)
    progress[ENDING] = step.number
    if step.ends == "cancel":
        manager.cancel()
    elif step.ends == "commit_rejected":
        manager.commit_rejected(torch.tensor([drafts - accepted for _, drafts, accepted in step.parts]).int())
    else:
        ids = [100 * request + n for request, (_, drafts, _) in enumerate(step.parts) for n in range(drafts)]
        sampled = torch.full((REQUESTS, DRAFTS + 1), -1)
        for request, (_, _, accepted) in enumerate(step.parts):
            sampled[request, :accepted] = 100 * request + torch.arange(accepted)
            sampled[request, accepted] = 99999
        manager.commit(torch.tensor(ids, dtype=torch.int64), sampled)
    progress[ENDED] = step.number


def start(path: str, mode: str, seed: int) -> int:
    """Fork a process that runs the engine. Return its id, after it has made its first step."""
    _, progress = open_memory(path)
    if (child := os.fork()) == 0:
        try:
            run(path, mode, seed)
        finally:
            os._exit(1)
    while int(progress[ENDED]) == 0:
        time.sleep(0.001)
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            raise RuntimeError("the engine ended before its first step")
    return child


def kill(child: int, seconds: float) -> None:
    """Kill the process after some seconds."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"the engine ended by itself with status {status}")
