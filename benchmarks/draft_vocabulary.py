"""Measure the draft vocabulary's device time: an update, and a draft from some rows of a head. It needs a GPU.

    python benchmarks/draft_vocabulary.py [--folder FOLDER]

The head has the shape of Qwen3.5-9B: 248,320 x 4,096 in bfloat16. Tokens follow Zipf's law. With its exponent an update
copies 59 rows per 1,000 tokens. Real texts copy 15 to 51 (`draft_vocabulary_coverage.py`). In `update/R` each of R
requests sampled 1 to 4 tokens. In `update/16+P` a prompt of P tokens came in too. A graph holds 20 updates with other
tokens each. Before each replay the set is restored, so that the same tokens are missing again. `entered/...` is the
mean number of rows that an update copies.

`draft/ROWS/R` is the matrix product and the argmax of R requests. `head/R` is the same over the whole head by torch.
Times are medians in microseconds of one call. `host/16` is the host's time of the two calls that the plugin adds to a
step: gathering its tokens, and the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from results import Row, new_parser, row, save, this_machine
from torch import Tensor
from transaction_kernels import alternating_on_gpu, captured

from nwor_ops import DraftVocabulary, ops

DEVICE = "cuda"
VOCABULARY, HIDDEN, ROWS, WINDOW, ROUNDS, CALLS = 248_320, 4096, 32_768, 4, 30, 20
EXPONENT = 1.2
REQUESTS, PROMPTS, SIZES = (1, 16, 64, 128), (512, 8192), (8192, 16_384, 32_768, 65_536)
TARGETS = {"update/16": 12.0, "update/16+8192": 25.0}


def main() -> None:
    folder = new_parser(__doc__).parse_args().folder
    torch.manual_seed(0)
    with torch.inference_mode():
        head = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        rows = [*update_rows(head), host_row(head), *draft_rows(head)]
    save(this_machine(), "draft_vocabulary", rows, folder)


class Text:
    """Tokens whose frequencies follow Zipf's law; ids and ranks have no order in common."""

    def __init__(self) -> None:
        frequencies = torch.arange(1, VOCABULARY + 1, dtype=torch.float64, device=DEVICE) ** -EXPONENT
        self.shares, self.ids = frequencies.cumsum(0) / frequencies.sum(), torch.randperm(VOCABULARY, device=DEVICE)

    def tokens(self, *shape: int) -> Tensor:
        drawn = torch.rand(shape, dtype=torch.float64, device=DEVICE)
        return self.ids[torch.searchsorted(self.shares, drawn).clamp(max=VOCABULARY - 1)]

    def sampled(self, requests: int) -> Tensor:
        """Return one step's tokens, with -1 in place of rejected ones."""
        kept = torch.randint(1, WINDOW + 1, (requests, 1), device=DEVICE)
        return self.tokens(requests, WINDOW).where(torch.arange(WINDOW, device=DEVICE) < kept, -1).flatten()


def in_graph(call: Callable[[int], object]) -> Callable[[], None]:
    """Return the replay of a graph with `call(0)`, `call(1)`, ..."""

    def run() -> None:
        for number in range(CALLS):
            call(number)

    return captured(run)


def timed(name: str, call: Callable[[int], object], prepare: Callable[[], None] = lambda: None) -> Row:
    samples = alternating_on_gpu({name: in_graph(call)}, ROUNDS, prepare)[name]
    return row(name, [sample / CALLS for sample in samples], "us", "lower", TARGETS.get(name), digits=2)


def update_rows(head: Tensor) -> list[Row]:
    text, vocabulary, rows = Text(), DraftVocabulary(head, ROWS), []
    for _ in range(300):  # a set as it is after some traffic
        vocabulary.update(text.tokens(1024))
    state = [tensor for name, tensor in vocabulary.tensors().items() if name != "weight"]
    saved = [tensor.clone() for tensor in state]

    def restore() -> None:
        for tensor, old in zip(state, saved, strict=True):
            tensor.copy_(old)

    for requests, prompt in [(requests, 0) for requests in REQUESTS] + [(16, prompt) for prompt in PROMPTS]:
        name = f"{requests}+{prompt}" if prompt else str(requests)
        steps = [(text.sampled(requests), text.tokens(prompt)) for _ in range(CALLS)]
        restore()
        entered = []
        for sampled, listed in steps:
            before = vocabulary.token_ids.clone()
            vocabulary.update(sampled, listed)
            entered.append(float((before != vocabulary.token_ids).sum()))
        rows += [
            timed(f"update/{name}", lambda number, steps=steps: vocabulary.update(*steps[number]), restore),
            row(f"entered/{name}", entered, "rows", "lower"),
        ]
    return rows


def host_row(head: Tensor) -> Row:
    """Time the two calls without waiting for the device, which takes less time for them than the host."""
    requests, tokens = 16, 16 * WINDOW
    vocabulary, text = DraftVocabulary(head, ROWS), Text()
    starts = torch.arange(0, tokens + 1, WINDOW, dtype=torch.int32, device=DEVICE)
    inputs, last = text.tokens(tokens).to(torch.int32), text.tokens(requests)
    indices = torch.arange(requests, dtype=torch.int32, device=DEVICE)
    sampled = torch.empty(requests, WINDOW, dtype=torch.int64, device=DEVICE)
    counts, nothing = indices % WINDOW + 1, torch.empty(0, dtype=torch.int64, device=DEVICE)
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            ops.gather_step_tokens(inputs, starts, starts, indices, counts, last, sampled, nothing)
            vocabulary.update(sampled.view(-1), nothing)
        samples.append((time.perf_counter() - began) / CALLS * 1e6)
    return row("host/16", samples, "us", "lower", digits=1)


def draft_rows(head: Tensor) -> list[Row]:
    hidden = {requests: torch.randn(requests, HIDDEN, dtype=torch.bfloat16, device=DEVICE) for requests in REQUESTS}
    rows = [
        timed(f"head/{requests}", lambda _, h=states: torch.nn.functional.linear(h, head).argmax(-1))
        for requests, states in hidden.items()
    ]
    for size in SIZES:
        vocabulary = DraftVocabulary(head, size)
        rows += [
            timed(f"draft/{size}/{requests}", lambda _, v=vocabulary, h=states: v.draft(h))
            for requests, states in hidden.items()
        ]
    return rows


if __name__ == "__main__":
    main()
