"""Compare one state with vLLM's K + 1 states under prefix caching, on random batches. Run by test_recurrent_engine.py:

    TRITON_INTERPRET=1 python recurrent_aligned.py aligned
    TRITON_INTERPRET=1 python recurrent_aligned.py checkpoints

As in recurrent_layers.py, the layers and builders are real. States move from block to block as requests grow. Requests
begin with states that other requests left, and new requests get blocks with old data. On the side of vLLM its kernels
and its context copy the states. On our side they copy the rows of the convolution.

The last token of a prompt may run in a window, padded with placeholder drafts. KV connectors may read its state after
the forward, and the state of each full block from the end of the step on. So nothing may be pending there, and the
states must be near vLLM's.

In case ``checkpoints`` the last chunk of a prompt is not split, as with FlashInfer's prefill. The state at its last
full block is exported to a separate block, and later requests begin with it. The layer of vLLM 0.33 does this itself.
Here a plain recurrence replaces FlashInfer's kernel. The builder and the exporter are in vLLM 0.32 too, but its layer
does not call them, so this script does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import recurrent_layers
import torch
from recurrent_layers import CLOSE, GROUPS, Batch, K, Side, check_chunks, configuration, prepare_vllm
from torch import Tensor

ROWS, COLUMNS = 4, 9


class AlignedSide(Side):
    """An engine with the values that vLLM's runner and its model state keep for each request."""

    def __init__(self, config: Any, *args: Any) -> None:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
        from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

        from nwor_ops.vllm.hooks import Patches
        from nwor_ops.vllm.recurrent.prefix_caching import AlignedStates

        super().__init__(config, *args)
        self.block = config.cache_config.mamba_block_size
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
        if self.recurrent:
            groups = [(builder.group, table) for builder, table in zip(self.builders, self.tables, strict=True)]
            self.aligned = AlignedStates(self.context, groups, config.num_speculative_tokens, Patches("test"))

    def admit(self, row: int, shared: int) -> None:
        """Admit a request that begins with the first ``shared`` blocks of the request that was in its row.

        The other blocks, full of old data, come in another order.
        """
        for table in self.tables:
            table[row, shared:] = table[row, shared:].flip(0)
        self.accepted[row], self.computed[row] = 1, shared * self.block
        self.column[row] = shared - 1

    def block_table(self, group: int, batch: Batch, blocks: Any) -> Tensor:
        """Return the whole rows, as vLLM's runner hands them to its builders."""
        return self.tables[group][self._batch_rows.long()]

    def step(self, batch: Batch, rows: Tensor, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        from vllm.v1.worker.mamba_utils import preprocess_mamba_align_fused_kernel

        count = len(rows)
        self._batch_rows = rows
        if self.recurrent:
            self.aligned.preprocess_state(
                lambda _: None,
                SimpleNamespace(
                    num_reqs=count,
                    seq_lens_cpu_upper_bound=batch.seq_lens,
                    num_scheduled_tokens=batch.starts.diff()[:count].numpy(),
                ),
            )
        preprocess_mamba_align_fused_kernel[(1,)](
            rows, self.column, self.computed, batch.starts, self.accepted, self.source, self.bias, count,
            BLOCK_SIZE=8, MAMBA_BLOCK_SIZE=self.block,
        )  # fmt: skip
        self.context.run_fused_precopy(count, self.column, self.source, self.bias, rows)
        batch.accepted[:count] = self.accepted[rows.long()]
        first = ((batch.seq_lens - 1) // self.block).clamp(min=0)
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

    def fold_tails(self, places: list[int]) -> None:
        """Fold the first row of each prompt that ended in a window. Runs after the forward."""
        for builder in self.builders if self.recurrent and places else ():
            builder.fold_first_rows(torch.tensor(places))

    def exported(self, row: int, column: int) -> list[Tensor]:
        """Return copies of what a KV connector reads in a block: the convolution and the state of each group."""
        found = []
        for builder, layer, table in zip(self.builders, self.layers, self.tables, strict=True):
            block, (conv, state) = int(table[row, column]), layer.kv_cache
            if self.recurrent:
                pending, first, *earlier = builder.group.cursors.table[block].tolist()
                updates = layer.recurrent_cache.record_updates[block]
                neutral = updates[[(first + row) % len(updates) for row in range(sum(earlier))]]  # a chunk may begin so
                assert pending == neutral.count_nonzero() == 0, f"rows are pending in block {block}"
            found += [conv[block][: recurrent_layers.CONVOLUTION - 1].clone(), state[block].clone()]
        return found


class CheckpointSide(AlignedSide):
    """An engine with checkpoints from inside prompts. The scheduler reports each block that a request gets.

    Attributes:
        owners: our object that clears new blocks.
        stale: new blocks for checkpoints in which rows of a previous owner were pending.
    """

    def __init__(self, *args: Any) -> None:
        from nwor_ops.vllm.recurrent.block_reuse import BlockOwners

        super().__init__(*args)
        self.stale = 0
        for builder in self.builders:  # of 0.33
            builder.gdn_prefill_backend, builder.plan_flashinfer_checkpoints = "flashinfer", HAS_PLAN
        if self.recurrent:
            runner = SimpleNamespace(
                vllm_config=SimpleNamespace(kv_transfer_config=None), req_states=SimpleNamespace(req_id_to_index={}),
                block_tables=SimpleNamespace(num_blocks=SimpleNamespace(np=None)),
            )  # fmt: skip
            self.cursors = self.builders[0].group.cursors
            self.owners = BlockOwners(runner, range(GROUPS), self.cursors)
            # The scheduler assigns blocks as a request grows. The other columns hold the null block.
            self.given = [torch.zeros_like(table) for table in self.tables]

    def _layer(self, config: Any, name: str, recurrent: bool, weights: dict[str, Tensor]) -> Any:
        from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointExporter

        layer = super()._layer(config, name, recurrent, weights)
        block, get_spec = config.cache_config.mamba_block_size, layer.get_kv_cache_spec
        layer._exports_checkpoints = False  # 0.33 would ask all layers of the model; the spec is extended here
        layer.get_kv_cache_spec = lambda config: dataclasses.replace(
            get_spec(config), num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=block
        )
        layer.chunk_gated_delta_rule = emitting(layer)
        if HAS_PLAN:
            shape = (COLUMNS * ROWS, *layer.get_state_shape()[1])
            layer._checkpoint_buffer_spec = (shape, torch.float32)
            layer._checkpoint_exporter = MambaPrefillCheckpointExporter(state_len=recurrent_layers.CONVOLUTION - 1)
        return layer

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        import vllm.forward_context as forward_context

        metadata = forward_context.get_forward_context().attn_metadata[layer.prefix]
        super()._forward(layer, given, out)
        if metadata.checkpoint is not None and not HAS_PLAN:
            export(layer, metadata, given["mixed_qkv"])

    def admit(self, row: int, shared: int) -> None:
        super().admit(row, shared)
        if self.recurrent:
            for table, given in zip(self.tables, self.given, strict=True):
                given[row] = 0
                given[row, :shared] = table[row, :shared]
            blocks = [given[row, :shared].tolist() for given in self.given]
            self._owned(new=[SimpleNamespace(req_id="new", block_ids=blocks)], cached=[])

    def grow(self, row: int, columns: list[int], is_checkpoint: bool) -> None:
        """Give a request the blocks of these columns of the table, as vLLM's manager does for a step."""
        if not self.recurrent:
            return
        blocks: list[list[int]] = []
        for table, given in zip(self.tables, self.given, strict=True):
            fresh = [column for column in columns if not given[row, column]]
            given[row, fresh] = table[row, fresh]
            blocks.append(given[row, fresh].tolist())
        if is_checkpoint:
            self.stale += sum(
                int(self.cursors.table[of_group[0], ::2].sum()) > 0 for of_group in blocks if len(of_group) > 1
            )
        self._owned(new=[], cached=[None, blocks])

    def _owned(self, new: list[Any], cached: list[Any]) -> None:
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=cached),
            kv_cache_block_copies=None,
        )
        self.owners.add_requests(lambda output: None, output)
        self.owners.update_requests(lambda output: None, output)

    def block_table(self, group: int, batch: Batch, blocks: Any) -> Tensor:
        return (self.given if self.recurrent else self.tables)[group][self._batch_rows.long()]


# ---------------------------------------------------------------- replacement of FlashInfer's prefill

HAS_PLAN = False  # whether vLLM's layer takes a plan of checkpoints, as 0.33's does


def emitting(layer: Any) -> Any:
    """Return the kernel of prompts. It also keeps all states of each sequence, for :func:`export`."""

    def compute(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor, cu_seqlens: Tensor, **rest: Any) -> Any:
        layer.states = all_states(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, **rest)
        return recurrent_layers.chunked(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, **rest)

    return compute


def all_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
               **_: Any) -> list[Tensor]:  # fmt: skip
    """Return the state after each token, of each sequence."""
    found = []
    for sequence, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state, states = initial_state[sequence : sequence + 1], []
        for token in range(start, end):
            one = [part[:, token : token + 1] for part in (q, k, v, g, beta)]
            _, state = recurrent_layers.chunked(*one, initial_state=state, cu_seqlens=torch.tensor([0, 1]))
            states.append(state[0])
        found.append(torch.stack(states) if states else initial_state[:0])
    return found


def export(layer: Any, metadata: Any, mixed_qkv: Tensor) -> None:
    """Export the checkpoints of a batch by vLLM 0.32's kernel."""
    from vllm.model_executor.layers.mamba.kda_checkpoint import FlashKDAPrefillCheckpointExporter
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    checkpoint, (conv, state) = metadata.checkpoint, layer.kv_cache
    emitted = torch.stack(
        [states[max(offset - 1, 0)] for states, offset in zip(layer.states, checkpoint.offsets, strict=True)]
    )
    tokens = metadata.non_spec_token_indx
    FlashKDAPrefillCheckpointExporter(state_len=recurrent_layers.CONVOLUTION - 1).export(
        checkpoint,
        raw_qkv=mixed_qkv if tokens is None else mixed_qkv.index_select(0, tokens),
        conv_state=conv if is_conv_state_dim_first() else conv.transpose(-1, -2),
        recurrent_checkpoint=emitted,
        recurrent_state=state,
        cu_seqlens=metadata.non_spec_query_start_loc,
    )
    if layer.recurrent and layer.listener is not None:  # 0.33's exporter tells it
        layer.listener.exported(layer, checkpoint, emitted, None)


def fi_chunked(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, state_checkpoints: Tensor,
               checkpoint_cu_starts: Tensor, checkpoint_every_n_tokens: int, **rest: Any) -> Any:  # fmt: skip
    """Replace ``fi_chunk_gated_delta_rule`` of vLLM 0.33: emit a state every N tokens."""
    for states, (start, end) in zip(
        all_states(q, k, v, cu_seqlens=cu_seqlens, **rest),
        itertools.pairwise(checkpoint_cu_starts.tolist()),
        strict=True,
    ):
        emitted = states[checkpoint_every_n_tokens - 1 :: checkpoint_every_n_tokens]
        assert len(emitted) == end - start
        state_checkpoints[start:end] = emitted
    return recurrent_layers.chunked(q, k, v, cu_seqlens=cu_seqlens, **rest)


def take_any_mask() -> None:
    """Make Triton's interpreter accept masks that are not bool. It makes an integer of a scalar and a vector."""
    from triton.runtime.interpreter import InterpreterBuilder

    def with_bool(method: Callable[..., Any], place: int) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            args[place].data = args[place].data.astype(bool)
            return method(*args)

        return run

    for name, place in (("create_masked_load", 2), ("create_masked_store", 3)):
        setattr(InterpreterBuilder, name, with_bool(getattr(InterpreterBuilder, name), place))


def prepare_copies() -> None:
    """Let one program copy a state. vLLM launches 16 of them, and each takes milliseconds in the interpreter."""
    from vllm.v1.worker import mamba_utils

    mamba_utils._TEMPORAL_TILES = 1


def prepare_checkpoints() -> None:
    """Make the layers of vLLM 0.33 export checkpoints themselves, without FlashInfer's kernel."""
    global HAS_PLAN
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers
    from vllm.v1.attention.backends import gdn_attn

    from nwor_ops.vllm.recurrent.layer import watch_checkpoints

    take_any_mask()
    HAS_PLAN = hasattr(gdn_attn, "plan_flashinfer_checkpoints")
    if HAS_PLAN:
        layers.fi_chunk_gated_delta_rule = fi_chunked
        workspace = SimpleNamespace(get_simultaneous=lambda spec: (torch.zeros(spec[0], dtype=spec[1]),))
        layers.current_workspace_manager = lambda: workspace
        watch_checkpoints()


# ---------------------------------------------------------------- the requests


class Scheduler:
    """Choose the tokens that a step computes. All lengths are in tokens.

    Args:
        block: tokens in a block of the cache.
        checkpoints: whether the last chunk of a prompt is not split.
        most_drafts: maximum number of drafts per request.

    Attributes:
        position: position of the checkpoint in the chunk of the last call, or 0.
    """

    def __init__(self, block: int, checkpoints: bool, most_drafts: int, chance: random.Random) -> None:
        self.block, self._checkpoints, self._most_drafts, self._chance = block, checkpoints, most_drafts, chance
        self.longest = block * COLUMNS - most_drafts - 1

    def prompt(self, shared: int) -> int:
        """Return the length of the prompt of a request that begins with so many blocks."""
        longest, left = 3 * self.block + 6 if self._checkpoints else 14, (COLUMNS - shared - 1) * self.block
        return shared * self.block + self._chance.randint(1, min(longest, left - self._most_drafts))

    def tokens(self, computed: int, prompt: int) -> tuple[int, int]:
        """Return tokens and drafts; -1 drafts: part of a prompt."""
        left, block, self.position = prompt - computed, self.block, 0
        if left <= 0:
            drafts = self._chance.randint(0, self._most_drafts)
            return 1 + drafts, drafts
        if self._checkpoints and self._has_checkpoint(computed, prompt):
            return left, -1
        choices = [1, left, 5] if self._checkpoints else [1, left, max(left - 1, 1), 5]
        tokens = min(self._chance.choice(choices), left, block - computed % block)
        if tokens > 1 or computed == 0:
            return tokens, -1
        drafts = self._most_drafts if left == 1 and not self._checkpoints else 0
        return 1 + drafts, drafts

    def _has_checkpoint(self, computed: int, prompt: int) -> bool:
        from vllm.v1.kv_cache_interface import (
            get_mamba_prefill_checkpoint_position,
            is_mamba_prefill_checkpoint_valid,
        )

        position = get_mamba_prefill_checkpoint_position(prompt, self.block, drop_eagle_block=False)
        valid = is_mamba_prefill_checkpoint_valid(
            query_start=computed,
            query_end=prompt,
            checkpoint_position=position,
            hash_block_size=self.block,
            mamba_block_size=self.block,
            checkpoint_alignment=self.block,
        )
        self.position = position if valid else 0
        return bool(valid)


def run(checkpoints: bool, most_drafts: int, chunk: bool) -> dict[str, Any]:
    from nwor_ops.vllm.audit.recurrent import StateAudit

    chance, generator = random.Random(11), torch.Generator().manual_seed(11)
    recurrent_layers.ROWS, recurrent_layers.BLOCKS = ROWS, 1 + GROUPS * ROWS * (COLUMNS + most_drafts)
    config = configuration(False, torch.float32, drafts=most_drafts, chunk=chunk)
    block = 64 if checkpoints and HAS_PLAN else 16 if chunk else 8
    for name in ("mamba_block_size", "hash_block_size", "cache_hit_alignment_tokens"):
        setattr(config.cache_config, name, block)
    config.cache_config.mamba_cache_mode = "align"
    weights = Side.weights_of(generator)
    sides = [(CheckpointSide if checkpoints else AlignedSide)(config, ours, False, weights) for ours in (False, True)]
    audit = sides[1].aligned.listener = StateAudit(sides[1].builders)
    for thing in (*sides[1].builders, *sides[1].layers, *([sides[1].owners] if checkpoints else [])):
        thing.listener = audit
    scheduler = Scheduler(block, checkpoints, most_drafts, chance)
    said: dict[str, Any] = {"hits": 0, "prompts": 0, "windows": 0, "tails": 0, "checkpoints": 0, "worst": 0.0}
    prompts = [0] * ROWS
    exported: dict[tuple[int, int], list[Tensor]] = {}  # by row and column, in full blocks of our engine
    ready: list[set[int]] = [set() for _ in range(ROWS)]  # columns that hold the state at their end

    def admit(row: int, shared: int) -> None:
        for side in sides:
            side.admit(row, shared)
        ready[row] = {column for column in ready[row] if column < shared}
        for key in [(of, column) for of, column in exported if of == row and column >= shared]:
            del exported[key]
        prompts[row] = scheduler.prompt(shared)
        said["hits"] += shared > 0

    for row in range(ROWS):
        admit(row, 0)
    for _ in range(28 if checkpoints else 60):  # steps
        scheduled, positions = [], []
        for row in range(ROWS):
            computed = int(sides[0].computed[row])
            if computed >= scheduler.longest - most_drafts or chance.random() < (0.15 if checkpoints else 0.06):
                admit(row, chance.choice([0, *(column + 1 for column in ready[row] if column < COLUMNS - 3)]))
                computed = int(sides[0].computed[row])
            if chance.random() < 0.85:
                scheduled.append((row, *scheduler.tokens(computed, prompts[row])))
                if scheduler.position:
                    positions.append((row, scheduler.position))
        if not scheduled:
            continue
        scheduled.sort(key=lambda entry: entry[2] < 0)
        if checkpoints:
            for row, tokens, _ in scheduled:
                position = dict(positions).get(row, 0)
                last = -(-(int(sides[0].computed[row]) + tokens) // block) - 1
                for side in sides:
                    side.grow(row, [last - 1, last] if position else [last], bool(position))
        rows = torch.tensor([row for row, _, _ in scheduled], dtype=torch.int32)
        states = [SimpleNamespace(computed=int(sides[0].computed[row]), accepted=1) for row, _, _ in scheduled]
        outputs, inputs = [], None
        for side in sides:
            batch = Batch([(state, *what[1:]) for state, what in zip(states, scheduled, strict=True)], padded=False)
            inputs = inputs or Side.inputs_of(generator, batch.tokens)
            outputs.append(side.step(batch, rows, inputs))
        if chunk and any(drafts >= 0 for *_, drafts in scheduled):
            plans = [builder.plan for builder in sides[1].builders]
            check_chunks(plans, [int(sides[1].computed[row]) for row, _, drafts in scheduled if drafts >= 0])
        audit.forwarded("after the forward")
        tails = [
            place for place, (state, (row, _, drafts)) in enumerate(zip(states, scheduled, strict=True))
            if drafts >= 0 and state.computed == prompts[row] - 1
        ]  # fmt: skip
        said["tails"] += len(tails)
        sides[1].fold_tails(tails)
        for place in tails:
            check_near(sides, int(rows[place]), int(sides[1].column[rows[place]]))
        for theirs, mine in zip(*outputs, strict=True):
            difference = (theirs.float() - mine.float()).abs() / (1 + theirs.float().abs())
            assert torch.isfinite(torch.stack((theirs, mine))).all()
            said["worst"] = max(said["worst"], float(difference.max()))
            assert said["worst"] < CLOSE, said
        sampled, advanced = [], []
        for state, (row, tokens, drafts) in zip(states, scheduled, strict=True):
            in_prompt = state.computed < prompts[row]
            sampled.append(int(state.computed + tokens >= prompts[row]) if in_prompt else chance.randint(1, tokens))
            advanced.append((tokens if drafts < 0 else 1) if in_prompt else sampled[-1])
            said["prompts" if drafts < 0 else "windows"] += 1
            end = state.computed + advanced[-1]
            if end // block > state.computed // block and (drafts >= 0 or end % block == 0):
                ready[row].add(end // block - 1)
        for row, position in positions:
            ready[row].add(position // block - 1)
        said["checkpoints"] += len(positions)
        for side in sides:
            side.ended(rows, sampled, advanced)
        assert torch.equal(sides[0].accepted, sides[1].accepted)
        for row in range(ROWS):  # the states that were exported do not change, and new ones are near vLLM's
            for column in ready[row]:
                found = sides[1].exported(row, column)
                if (row, column) not in exported:
                    check_near(sides, row, column)
                    exported[row, column] = found
                assert all(map(torch.equal, found, exported[row, column])), f"block {column} of request {row}"
    return {**said, "stale": getattr(sides[1], "stale", 0), "audit": audit.summary()}


def check_near(sides: list[AlignedSide], row: int, column: int) -> None:
    """Compare convolutions and states of a block with those of vLLM."""
    for theirs, mine in zip(*(side.exported(row, column) for side in sides), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


if __name__ == "__main__":
    if any("-chunk" in case for case in sys.argv):
        recurrent_layers.use_wide_heads()
    prepare_vllm()
    prepare_copies()
    for case in sys.argv[1:] or ("aligned", "aligned-nodrafts", "checkpoints"):
        checkpoints = case.startswith("checkpoints")
        if checkpoints:
            prepare_checkpoints()
        drafts = 0 if case.endswith("nodrafts") else K
        said = run(checkpoints, drafts, "-chunk" in case)
        print(case, json.dumps(said), flush=True)
