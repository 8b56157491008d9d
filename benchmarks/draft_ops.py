"""Measure the ops of a draft loop on a GPU: `gumbel_sample` against one read of its logits, and launches of the other
ops.

    python benchmarks/draft_ops.py [FOLDER]

It does not need vLLM, and takes half a minute.

Sampling: each side is one CUDA graph, and the two are replayed in turn. Before every replay, outside the measured time,
512 MB are read. No logit is then left in L2, and the GPU is busy while the host launches the graph. In `hot` the logits
are written again after that, so that they are in L2, as they are after a model's last layer. The time of one read of
the logits is that of the fastest of three torch reductions over the same bytes. These are the sum of all, the sum of
each row, and the maximum of each row. Each side is a graph of one kernel, so both times include its launch (some
microseconds).

Other ops: 32 launches in one graph, with 64 rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from cow_transaction import alternating_on_gpu, captured
from results import Row, asked_folder, ratios, row, save, this_machine
from torch import Tensor

from nwor_ops import ops

VOCAB = 128_256
SHAPES = (1, 16, 64, 256)  # rows
TARGETS = {64: 1.2}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
READ_BYTES = 2**29
ROUNDS, LAUNCHES, ROWS, STEPS, HIDDEN = 200, 32, 64, 5, 4096


def sampler(logits: Tensor, temperature: float) -> Callable[[], None]:
    rows = len(logits)
    idx = torch.arange(rows, device="cuda")
    temperatures = torch.full((rows,), temperature, device="cuda")
    seeds, positions = torch.randint(0, 2**62, (2, rows), device="cuda")
    step, sampled = torch.tensor(1, device="cuda"), torch.empty(rows, dtype=torch.int64, device="cuda")
    workspace = torch.zeros(2 * rows, dtype=torch.int64, device="cuda")
    return lambda: ops.gumbel_sample(
        logits, idx, temperatures, seeds, positions, step, sampled, None, workspace
    )  # fmt: skip


def readers(logits: Tensor) -> dict[str, Callable[[], object]]:
    words = logits.view(torch.float32)
    return {
        "sum": lambda: words.sum(),
        "row_sums": lambda: words.sum(-1),
        "row_maxima": lambda: logits.amax(-1),
    }


def sampling_rows(read: Tensor) -> list[Row]:
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for count in SHAPES:
            source = torch.randn(count, VOCAB, device="cuda").to(dtype)
            logits = source.clone()
            for hot in (False, True):

                def prepare(hot: bool = hot, logits: Tensor = logits, source: Tensor = source) -> None:
                    read.sum()
                    if hot:
                        logits.copy_(source)

                runs = readers(logits)
                runs |= {
                    "gumbel": sampler(logits, 1.0),
                    "argmax": sampler(logits, 0.0),
                    "torch_argmax": lambda logits=logits: logits.argmax(-1),
                }
                variants = {name: captured(run) for name, run in runs.items()}
                samples = alternating_on_gpu(variants, ROUNDS, prepare)
                fastest = min(readers(logits), key=lambda name: statistics.median(samples[name]))
                name = f"gumbel_sample/{count}x{VOCAB}/{dtype_name}{'/hot' if hot else ''}"
                target = None if hot else TARGETS.get(count)
                rows += [
                    row(name, ratios(samples, "gumbel", fastest), "ratio", "lower", target),
                    row(f"{name}/argmax", ratios(samples, "argmax", fastest), "ratio", "lower", target),
                    row(f"{name}/us", samples["gumbel"], "us", "lower", digits=2),
                    row(f"{name}/argmax_us", samples["argmax"], "us", "lower", digits=2),
                    row(f"{name}/read_us", samples[fastest], "us", "lower", digits=2),
                    row(f"{name}/torch_argmax_us", samples["torch_argmax"], "us", "lower", digits=2),
                ]
    return rows


def other_ops() -> dict[str, Callable[[], None]]:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    def int32(*shape: int) -> Tensor:
        return zeros(*shape, dtype=torch.int32)

    n, tokens, longest, block = ROWS, ROWS * STEPS, 4096, 16
    idx = torch.arange(n, device="cuda")
    drafts, sampled, step = zeros(n, STEPS), zeros(n), zeros(1)
    starts = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    long_starts = starts * STEPS
    lengths, rejected = torch.full_like(starts[:n], 99), torch.full_like(starts[:n], 1)
    ids, positions, sample_positions = int32(2 * tokens), zeros(2 * tokens), zeros(n)
    target_ids, target_positions = int32(tokens), zeros(tokens)
    out_starts, out_lengths, slots, last = int32(n + 1), int32(n), zeros(1, 2 * tokens), zeros(n)
    table = int32(n, longest // block)
    hidden, next_hidden = torch.zeros(2, n, HIDDEN, dtype=torch.bfloat16, device="cuda")
    flags = [zeros(2 * tokens, dtype=torch.bool) for _ in range(3)]
    ids_of_rows = torch.ones(n, STEPS, dtype=torch.int32, device="cuda")
    return {
        "prepare_prefill_inputs": lambda: ops.prepare_prefill_inputs(
            target_ids, target_positions, long_starts, lengths, idx, rejected, rejected, idx, idx, ids, positions,
            out_starts, out_lengths, last, step,
        ),
        "copy_expand_inputs": lambda: ops.copy_expand_inputs(
            target_ids, target_positions, long_starts, rejected, idx, ids, positions, flags[0], flags[1], last,
            max_model_len=longest, idx_mapping=idx,
        ),
        "extend_queries": lambda: ops.extend_queries(
            long_starts, lengths, positions, flags[2], table, out_starts, out_lengths, slots[0], block, longest
        ),
        "prepare_inputs_padded": lambda: ops.prepare_inputs_padded(
            starts[1:], rejected, long_starts, last, out_lengths
        ),
        "prepare_next_token_padded": lambda: ops.prepare_next_token_padded(
            ids_of_rows, flags[2], rejected, last, out_lengths, VOCAB
        ),
        "prepare_decode_inputs": lambda: ops.prepare_decode_inputs(
            drafts, lengths, rejected, ids, positions, out_starts, out_lengths, longest, idx, sample_positions
        ),
        "compute_slot_mappings": lambda: ops.compute_slot_mappings(idx, starts, positions, [table], [block], slots),
        "update_draft_inputs": lambda: ops.update_draft_inputs(
            sampled, step, drafts, ids, positions, out_lengths, STEPS, longest, idx, hidden, next_hidden,
            sample_positions,
        ),
        "eagle_step": lambda: ops.eagle_step(positions[:n], table, out_lengths, last, slots[0], block, longest),
        "dcp_local_seq_lens": lambda: ops.dcp_local_seq_lens(lengths, out_lengths, 4, 1),
    }  # fmt: skip


def launch_rows(read: Tensor) -> list[Row]:
    rows = []
    for name, run in other_ops().items():

        def many(run: Callable[[], None] = run) -> None:
            for _ in range(LAUNCHES):
                run()

        samples = alternating_on_gpu({"op": captured(many)}, ROUNDS, lambda: read.sum())["op"]
        rows.append(row(f"{name}/{ROWS}/us", [us / LAUNCHES for us in samples], "us", "lower", digits=2))
    return rows


def main() -> None:
    folder = asked_folder(__doc__)
    torch.manual_seed(0)
    read = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device="cuda")
    rows = sampling_rows(read) + launch_rows(read)
    save(this_machine(), "draft_ops", rows, folder)


if __name__ == "__main__":
    main()
