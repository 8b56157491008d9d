"""As one_state_layers.py, with prefix caching: states move from block to block as requests grow, and requests begin
with states that others have left. Run by test_one_state.py:

    TRITON_INTERPRET=1 python one_state_aligned.py

What copies the states of vLLM's side, and the rows of the convolution of ours, are vLLM's own kernels and its context.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import one_state_layers
import torch
from one_state_layers import CLOSE, GROUPS, Batch, K, Side, configuration, normal_inputs, prepare_vllm, weights_of
from torch import Tensor

ROWS, BLOCK, COLUMNS, STEPS = 4, 8, 9, 44
LONGEST = BLOCK * COLUMNS - K - 1


class AlignedSide(Side):
    """With what vLLM's runner and its model state keep for each request."""

    def __init__(self, *args: Any) -> None:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
        from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

        from nwor_ops.vllm.recurrent.align import AlignedStates

        super().__init__(*args)
        columns = COLUMNS + self.blocks_per_request - 1
        blocks = torch.arange(1, 1 + GROUPS * ROWS * columns, dtype=torch.int32)
        self.tables = list(blocks.view(GROUPS, ROWS, columns))
        self.accepted, self.computed, self.column, self.source, self.bias = torch.zeros(5, ROWS, dtype=torch.int32)
        copies = {self.specs[0].mamba_type: (get_conv_copy_spec, get_temporal_copy_spec)}
        cache = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=spec, layer_names=[layer.prefix])
                for spec, layer in zip(self.specs, self.layers, strict=True)
            ]
        )
        self.context = MambaSpecDecodeGPUContext.create(
            ROWS, cache, copies, torch.device("cpu"), lambda count, dtype: None
        )
        layers = {layer.prefix: layer for layer in self.layers}
        self.context.initialize_from_forward_context(cache, layers, copies, self.tables)
        if self.one_state:
            groups = [(builder.group, table) for builder, table in zip(self.builders, self.tables, strict=True)]
            self.aligned = AlignedStates(self.context, groups, K)

    def admit(self, row: int, shared: int) -> None:
        """A request that begins with the first `shared` blocks of the one that was in its row; the others, full of what
        was there before, come in another order."""
        for table in self.tables:
            table[row, shared:] = table[row, shared:].flip(0)
        self.accepted[row], self.computed[row] = 1, shared * BLOCK
        self.column[row] = shared - 1

    def step(self, batch: Batch, rows: Tensor, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        from vllm.v1.worker.mamba_utils import preprocess_mamba_align_fused_kernel

        count = len(rows)
        if self.one_state:
            self.aligned.look_at(
                SimpleNamespace(
                    num_reqs=count,
                    seq_lens_cpu_upper_bound=batch.seq_lens,
                    num_scheduled_tokens=batch.starts.diff()[:count].numpy(),
                )
            )
        preprocess_mamba_align_fused_kernel[(1,)](
            rows, self.column, self.computed, batch.starts, self.accepted, self.source, self.bias, count,
            BLOCK_SIZE=8, MAMBA_BLOCK_SIZE=BLOCK,
        )  # fmt: skip
        self.context.run_fused_precopy(count, self.column, self.source, self.bias, rows)
        batch.accepted[:count] = self.accepted[rows.long()]
        first = ((batch.seq_lens - 1) // BLOCK).clamp(min=0)
        for builder, table in zip(self.builders, self.tables, strict=True):
            indices = torch.zeros(batch.rows, self.blocks_per_request, dtype=torch.int32)
            for place, row in enumerate(rows.tolist()):
                start = int(first[place])
                indices[place] = table[row, start : start + self.blocks_per_request]
            builder.mamba_aligned_state_indices = indices
        return self.run(batch, [], inputs)

    def ended(self, rows: Tensor, sampled: list[int], advanced: list[int]) -> None:
        self.accepted[rows.long()] = torch.tensor(sampled, dtype=torch.int32).clamp(min=1)
        self.computed[rows.long()] += torch.tensor(advanced, dtype=torch.int32)
        self.context.run_fused_postprocess_align(len(rows), self.accepted, self.column, self.computed, rows)


def tokens_of(computed: int, prompt: int, chance: random.Random) -> tuple[int, int]:
    """Of a request: tokens and drafts, -1 = part of a prompt, which ends at a block's end at the latest."""
    left = prompt - computed
    if left <= 0:
        drafts = chance.randint(0, K)
        return 1 + drafts, drafts
    tokens = min(chance.choice([1, left, 5]), left, BLOCK - computed % BLOCK)
    return (1, 0) if tokens == 1 and computed > 0 else (tokens, -1)


def run() -> dict[str, Any]:
    from nwor_ops.vllm.recurrent.audit import StateAudit

    chance, generator = random.Random(11), torch.Generator().manual_seed(11)
    one_state_layers.ROWS, one_state_layers.BLOCKS = ROWS, 1 + GROUPS * ROWS * (COLUMNS + K)
    config = configuration(False, torch.float32)
    config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size = "align", BLOCK
    weights = weights_of(generator)
    sides = [AlignedSide(config, one_state, False, weights) for one_state in (False, True)]
    audit = sides[1].aligned.audit = StateAudit(sides[1].builders)
    for builder in sides[1].builders:
        builder.audit = audit
    said: dict[str, Any] = {"hits": 0, "prompts": 0, "windows": 0, "worst": 0.0}
    prompts = [0] * ROWS

    def admit(row: int, shared: int) -> None:
        for side in sides:
            side.admit(row, shared)
        prompts[row] = shared * BLOCK + chance.randint(1, 14)
        said["hits"] += shared > 0

    for row in range(ROWS):
        admit(row, 0)
    for _ in range(STEPS):
        scheduled = []
        for row in range(ROWS):
            computed = int(sides[0].computed[row])
            if computed >= LONGEST - K or chance.random() < 0.03:
                admit(row, chance.randint(0, min(computed // BLOCK, COLUMNS - 3)))
                computed = int(sides[0].computed[row])
            if chance.random() < 0.85:
                scheduled.append((row, *tokens_of(computed, prompts[row], chance)))
        if not scheduled:
            continue
        scheduled.sort(key=lambda entry: entry[2] < 0)
        rows = torch.tensor([row for row, _, _ in scheduled], dtype=torch.int32)
        states = [SimpleNamespace(computed=int(sides[0].computed[row]), accepted=1) for row, _, _ in scheduled]
        outputs, inputs = [], None
        for side in sides:
            batch = Batch([(state, *what[1:]) for state, what in zip(states, scheduled, strict=True)], padded=False)
            inputs = inputs or normal_inputs(generator, batch.tokens)
            outputs.append(side.step(batch, rows, inputs))
        audit.forwarded("after the forward")
        for theirs, mine in zip(*outputs, strict=True):
            difference = (theirs.float() - mine.float()).abs() / (1 + theirs.float().abs())
            assert torch.isfinite(mine).all()
            said["worst"] = max(said["worst"], float(difference.max()))
            assert said["worst"] < CLOSE, said
        sampled, advanced = [], []
        for state, (row, tokens, drafts) in zip(states, scheduled, strict=True):
            in_prompt = state.computed < prompts[row]
            sampled.append(int(state.computed + tokens >= prompts[row]) if in_prompt else chance.randint(1, tokens))
            advanced.append(tokens if in_prompt else sampled[-1])
            said["prompts" if drafts < 0 else "windows"] += 1
        for side in sides:
            side.ended(rows, sampled, advanced)
        assert torch.equal(sides[0].accepted, sides[1].accepted)
    return {**said, "audit": audit.summary()}


if __name__ == "__main__":
    prepare_vllm()
    print("aligned", json.dumps(run()), flush=True)
