"""Compare Gated DeltaNet with K + 1 states per request (vLLM) and with one state, on random batches. Run by
test_recurrent_engine.py:

    TRITON_INTERPRET=1 python recurrent_layers.py plain-graphs

Layers and metadata builders are the classes of the installed vLLM, and our subclasses of them. Triton's interpreter
runs vLLM's kernels on the CPU. Only the convolutions and the kernel for prompts are replaced.

Requests run their prompts in chunks; a chunk of one token may be verified like a draft. They decode with any number of
drafts, of which any number is accepted. They miss batches, are preempted and finish. Their blocks then go to other
requests with the old data. Both sides get the same inputs and must have the same outputs. All our states are audited.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from interpreter import use_interpreter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

K, ROWS, GROUPS, BLOCKS, STEPS = 3, 6, 2, 64, 40
KEY_HEADS, VALUE_HEADS, WIDTH, CONVOLUTION = 1, 2, 64, 4
DIMENSION = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
READ_BY_GRAPHS = ("plan", "window_id", "num_accepted_tokens", "spec_state_indices_tensor")  # and the runner's starts
CLOSE = 0.02  # the interpreter truncates to bfloat16 outputs instead of rounding


def model_named(name: str) -> Any:
    """Return the plugin's description of a model."""
    return importlib.import_module(f"nwor_ops.vllm.recurrent.models.{name}").MODEL


def install(model: str, **replaced: Any) -> Any:
    """Install our layers of a model. Return vLLM's module of the layers, with its convolutions replaced, and these."""
    from nwor_ops.vllm.recurrent import layer

    layer.install(model_named(model))
    module = importlib.import_module(model_named(model).module)
    convolutions = {"causal_conv1d_fn": convolve_prompts, "causal_conv1d_update": convolve_windows}
    for name, function in (convolutions | replaced).items():
        setattr(module, name, function)
    return module


def configuration(
    full_graphs: bool,
    state: torch.dtype,
    ranks: int = 1,
    drafts: int = K,
    chunk: bool = False,
    side: type[Side] | None = None,
) -> Any:
    """Return the parts of a configuration that builders and layers read."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    side = side or Side
    return SimpleNamespace(
        additional_config={"nwor": {"recurrent": "chunk" if chunk else False}},
        num_speculative_tokens=drafts,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=True,
        model_config=SimpleNamespace(
            architecture=model_named(side.model).architectures[0],
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(**side.sizes(ranks)),
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none",
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=names[state],
            mamba_block_size=1024,
            mamba_page_size_padded=None,
            use_replayssm=False,
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts,
            use_eagle_block_drop=lambda: False,
            parallel_drafting=False,
            uses_dynamic_speculative_decoding=lambda: False,
        )
        if drafts
        else None,
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full_graphs),
            max_cudagraph_capture_size=ROWS * (drafts + 1),
        ),
    )


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
            **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a prompt's tokens with normalized q and k. This replaces an autotuned kernel."""
    out, final = torch.empty_like(v), initial_state.float().clone()
    share = v.shape[2] // k.shape[2]
    for sequence, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for token in range(start, end):
            for head in range(v.shape[2]):
                key, query = k[0, token, head // share].float(), q[0, token, head // share].float()
                state = final[sequence, head]
                state *= g[0, token, head].float().exp()
                update = beta[0, token, head].float() * (v[0, token, head].float() - state @ key)
                state += update[:, None] * key
                out[0, token, head] = (state @ query * q.shape[-1] ** -0.5).to(out.dtype)
    return out, final


def convolve(x: Tensor, past: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution. ``x``: [dim, tokens]; ``past``: the inputs before them."""
    windows = torch.cat((past, x), 1).float().unfold(1, CONVOLUTION, 1)
    return torch.nn.functional.silu((windows * weight.float()[:, None]).sum(-1)).to(x.dtype)


def convolve_prompts(x: Tensor, weight: Tensor, bias: None, *, conv_states: Tensor, has_initial_state: Tensor,
                     cache_indices: Tensor, query_start_loc: Tensor, **_: Any) -> Tensor:  # fmt: skip
    """Replace ``causal_conv1d_fn``, which the interpreter does not support."""
    out, starts = torch.empty_like(x), query_start_loc.tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        if start < end:
            rows = conv_states[int(cache_indices[sequence])][:, : CONVOLUTION - 1]
            past = rows.clone() if has_initial_state[sequence] else torch.zeros_like(rows)
            out[:, start:end] = convolve(x[:, start:end], past, weight)
            rows.copy_(torch.cat((past, x[:, start:end]), 1)[:, 1 - CONVOLUTION :])
    return out


def convolve_windows(x: Tensor, conv_state: Tensor, weight: Tensor, bias: None, activation: str, *,
                     conv_state_indices: Tensor, num_accepted_tokens: Tensor | None = None,
                     query_start_loc: Tensor | None = None, max_query_len: int = 1, validate_data: bool = False,
                     out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Replace ``causal_conv1d_update``. The rows hold the inputs before a window and those of the window.

    Without starts, each request has one token.
    """
    x = x if out is None else out.copy_(x)
    starts = list(range(len(x) + 1)) if query_start_loc is None else query_start_loc.tolist()
    accepted = [1] * len(conv_state_indices) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for sequence, (slot, start, end) in enumerate(zip(conv_state_indices.tolist(), starts, starts[1:], strict=False)):
        if slot > 0 and start < end:
            assert end - start <= max_query_len
            rows, offset = conv_state[slot], accepted[sequence] - 1
            past, given = rows[:, offset : offset + CONVOLUTION - 1].clone(), x[start:end].T.clone()
            rows[:, : CONVOLUTION - 2 + end - start] = torch.cat((past[:, 1:], given), 1)
            x[start:end] = convolve(given, past, weight).T
    return x


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def random_inputs(
    generator: torch.Generator, tokens: int, shapes: dict[str, tuple[int, ...]]
) -> list[dict[str, Tensor]]:
    """Return inputs of these shapes of a token, for each group."""
    return [
        {name: normal(generator, tokens, *shape).to(torch.bfloat16) for name, shape in shapes.items()}
        for _ in range(GROUPS)
    ]


class Side:
    """Layers and builders of one engine, with one group per layer.

    Args:
        config: configuration of both sides.
        recurrent: whether to use our layers. False: vLLM's layers.
        fused_norm: whether windows include gate and norm, if the layer supports this.
        weights: weights of each layer.

    A subclass is another model.

    Attributes:
        model: name of the plugin's description.
        output: heads and width of a layer's output.
        key_width: width of a key.
    """

    model = "qwen"
    output = (VALUE_HEADS, WIDTH)
    key_width = WIDTH

    @classmethod
    def sizes(cls, ranks: int) -> dict[str, Any]:
        """Return the sizes in the model's configuration. Each rank has the heads above."""
        return {
            "linear_num_key_heads": KEY_HEADS * ranks, "linear_num_value_heads": VALUE_HEADS * ranks,
            "linear_key_head_dim": cls.key_width, "linear_value_head_dim": cls.output[1],
        }  # fmt: skip

    @staticmethod
    def weights(generator: torch.Generator, group: int) -> dict[str, Any]:
        """Return attributes of a group's layer that are weights."""
        return {
            "A_log": normal(generator, VALUE_HEADS),
            "dt_bias": normal(generator, VALUE_HEADS).to(torch.bfloat16),
            "conv1d": SimpleNamespace(
                weight=(normal(generator, DIMENSION, 1, CONVOLUTION) / 2).to(torch.bfloat16), bias=None
            ),
            "norm": SimpleNamespace(weight=1 + normal(generator, WIDTH) / 10, bias=None, eps=1e-6, group_size=None,
                                    norm_before_gate=True, activation="silu"),
        }  # fmt: skip

    @staticmethod
    def inputs_of(generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
        """Return the inputs of a step, for each group's layer."""
        shapes = {"mixed_qkv": (DIMENSION,), "b": (VALUE_HEADS,), "a": (VALUE_HEADS,), "gate": (VALUE_HEADS, WIDTH)}
        return random_inputs(generator, tokens, shapes)

    @classmethod
    def weights_of(cls, generator: torch.Generator) -> list[dict[str, Any]]:
        return [cls.weights(generator, group) for group in range(GROUPS)]

    def __init__(self, config: Any, recurrent: bool, fused_norm: bool, weights: list[dict[str, Any]]) -> None:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        from nwor_ops.recurrent.cursors import Cursors
        from nwor_ops.vllm.recurrent.metadata import RecurrentMetadataBuilder
        from nwor_ops.vllm.recurrent.page import GroupLayers

        self.recurrent, self.fused_norm = recurrent, fused_norm
        self.layers = [self._layer(config, f"layer.{group}", recurrent, weights[group]) for group in range(GROUPS)]
        self.specs = [layer.get_kv_cache_spec(config) for layer in self.layers]
        # As in vLLM, the layers of different groups share memory, and each block belongs to one group at a time.
        pages = torch.randint(-128, 127, (BLOCKS, 1, 1, self.specs[0].page_size_bytes + 64), dtype=torch.int8)
        for layer in self.layers:
            layer.bind_kv_cache(pages)
        kind = RecurrentMetadataBuilder if recurrent else GDNAttentionMetadataBuilder
        names = [[layer.prefix] for layer in self.layers]
        device = torch.device("cpu")
        self.builders = [kind(spec, name, config, device) for spec, name in zip(self.specs, names, strict=True)]
        for builder in self.builders:  # as on a GPU
            builder.supports_update_block_table = True
        if recurrent:
            geometry = self.layers[0].geometry
            cursors = Cursors(BLOCKS, device, geometry.chunk)
            cursors.copy_skipped()  # no second copy, because there are only a few per second
            cursors.COPY_PERIOD = float("inf")
            for builder, layer in zip(self.builders, self.layers, strict=True):
                builder.bind(GroupLayers(cursors, [layer]))
        self.blocks_per_request = 1 + self.specs[0].num_speculative_blocks
        self.free = list(range(1, BLOCKS))  # shared by all groups, as in vLLM

    def _layer(self, config: Any, name: str, recurrent: bool, weights: dict[str, Any]) -> Any:
        """Return a layer with only the attributes set here. ``recurrent``: whether it is ours."""
        from nwor_ops.vllm.recurrent.page import RecordGeometry

        # Once installed, our class is used in both cases. Without one state it runs vLLM's code.
        model = model_named(self.model)
        kind: Any = getattr(importlib.import_module(model.module), model.layer)
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        ranks, drafts = config.parallel_config.tensor_parallel_size, config.num_speculative_tokens
        attributes = {
            "recurrent": recurrent, "prefix": name, "tp_size": ranks, "num_spec": drafts,
            "num_speculative_tokens": drafts, "model_config": config.model_config, "cache_config": config.cache_config,
        }  # fmt: skip
        if recurrent:
            attributes |= {"geometry": RecordGeometry.of(config), "_most_audited_tokens": 64}
        for attribute, value in (attributes | self.attributes(config) | weights).items():
            setattr(layer, attribute, value)
        return layer

    def attributes(self, config: Any) -> dict[str, Any]:
        """Return the attributes of a layer that depend on the model and are not weights."""
        ranks, key_width, value_width = config.parallel_config.tensor_parallel_size, self.key_width, self.output[1]
        return {
            "activation": "silu", "layer_norm_epsilon": 1e-6,
            "num_k_heads": KEY_HEADS * ranks, "num_v_heads": VALUE_HEADS * ranks, "head_k_dim": key_width,
            "head_v_dim": value_width, "key_dim": KEY_HEADS * key_width * ranks,
            "value_dim": VALUE_HEADS * value_width * ranks,
            "conv_kernel_size": CONVOLUTION, "vllm_config": config,
            "enable_packed_recurrent_decode": True, "_checkpoint_alignment": None,
            "gdn_decode_kernel": "cuda" if self.fused_norm and self.recurrent else "triton",
            "chunk_gated_delta_rule": chunked,
        }  # fmt: skip

    def take(self) -> list[list[int]]:
        """Return the blocks of a request, by group."""
        return [[self.free.pop() for _ in range(self.blocks_per_request)] for _ in range(GROUPS)]

    def give_back(self, blocks: list[list[int]]) -> None:
        for of_group in blocks:
            self.free.extend(of_group)

    def metadata(self, batch: Batch, blocks: list[list[list[int]]]) -> dict[str, Any]:
        """Return metadata as vLLM's V2 runner builds it. ``blocks``: blocks of each request, by group."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        made: dict[str, Any] = {}
        first = None
        for group, (builder, layer) in enumerate(zip(self.builders, self.layers, strict=True)):
            table = self.block_table(group, batch, blocks)
            if first is not None and builder.supports_update_block_table:
                made[layer.prefix] = builder.update_block_table(first, table, None)
                continue
            common = CommonAttentionMetadata(
                query_start_loc=batch.starts,
                query_start_loc_cpu=batch.starts,
                seq_lens=batch.seq_lens,
                num_reqs=batch.rows,
                num_actual_tokens=batch.tokens,
                max_query_len=int(batch.starts.diff().max()),
                max_seq_len=int(batch.seq_lens.max()),
                block_table_tensor=table,
                slot_mapping=None,
                is_prefilling=batch.is_prefilling,
                seq_lens_cpu_upper_bound=batch.seq_lens,
            )
            of_drafts: dict[str, Any] = {}  # without drafts, vLLM's runner does not pass them
            if builder.num_spec:
                of_drafts = {"num_accepted_tokens": batch.accepted, "num_decode_draft_tokens_cpu": batch.drafts}
            built = builder.build(0, common, **of_drafts)
            made[layer.prefix] = first = built
        return made

    def block_table(self, group: int, batch: Batch, blocks: list[list[list[int]]]) -> Tensor:
        """Return the rows of the requests of a batch."""
        table = torch.zeros(batch.rows, self.blocks_per_request, dtype=torch.int32)
        for row, mine in enumerate(blocks):
            table[row] = torch.tensor(mine[group])
        return table

    def run(self, batch: Batch, blocks: list[list[list[int]]], inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        """Return the outputs of each layer."""
        import vllm.forward_context as forward_context

        with Operations() as operations:
            self.made = metadata = self.metadata(batch, blocks)
        self.operations = operations.count
        forward_context._forward_context = SimpleNamespace(attn_metadata=metadata)
        outputs = []
        for layer, given in zip(self.layers, inputs, strict=True):
            out = torch.zeros(batch.tokens, *self.output, dtype=torch.bfloat16)
            self._forward(layer, {name: tensor.clone() for name, tensor in given.items()}, out)
            outputs.append(out)
        return outputs

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        """Run a layer from the output of its projections to its own output, or to the output of its norm."""
        if self.fused_norm:
            layer._forward_core_fused_norm(given["mixed_qkv"], given["b"], given["a"], given["gate"], out)
        else:
            layer._forward_core(given["mixed_qkv"], given["b"], given["a"], out)


class Operations(TorchDispatchMode):
    """Count operations that compute or copy data, of tensors on the device and on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = [leaf for leaf in tree_leaves(args if result is None else result) if isinstance(leaf, Tensor)]
        allocates = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like)
        self.count += not (func.is_view or allocates) and any(tensor.numel() > 0 for tensor in written)
        return result


class Request:
    def __init__(self, prompt: int, sides: list[Side]) -> None:
        self.prompt, self.computed, self.accepted = prompt, 0, 1
        self.blocks = [side.take() for side in sides]


class Batch:
    """The runner's description of a step, padded if its windows run in a graph.

    Args:
        scheduled: request, number of tokens and number of drafts of each row. A prompt has -1 drafts.
        padded: whether to pad rows and tokens to the maximum number of requests.
        most_drafts: maximum number of drafts per request.
    """

    def __init__(self, scheduled: list[tuple[Request, int, int]], padded: bool, most_drafts: int = K) -> None:
        counts = [tokens for _, tokens, _ in scheduled]
        self.rows = ROWS if padded else len(scheduled)
        more = self.rows - len(scheduled)
        starts = torch.tensor([0, *counts, *([0] * more)]).cumsum(0)
        self.starts = starts.to(torch.int32)
        self.tokens = ROWS * (most_drafts + 1) if padded else int(starts[-1])
        self.real_tokens = int(starts[-1])
        self.seq_lens = torch.tensor(
            [request.computed + tokens for request, tokens, _ in scheduled] + [0] * more, dtype=torch.int32
        )
        self.accepted = torch.tensor([request.accepted for request, _, _ in scheduled] + [1] * more, dtype=torch.int32)
        self.drafts = torch.tensor([drafts for _, _, drafts in scheduled] + [-1] * more, dtype=torch.int32)
        self.is_prefilling = torch.tensor([drafts < 0 for _, _, drafts in scheduled] + [False] * more)


def schedule(requests: list[Request], chance: random.Random, most_drafts: int = K) -> list[tuple[Request, int, int]]:
    rows = []
    for request in requests:
        if chance.random() < 0.15:
            continue
        left = request.prompt - request.computed
        if left <= 0:
            drafts = chance.randint(0, most_drafts)
            rows.append((request, 1 + drafts, drafts))
            continue
        tokens = chance.choice([1, left, min(left, 5), min(left, 2)])
        if tokens == 1 and request.computed > 0:  # verified; at the end of a prompt with placeholder drafts
            drafts = chance.choice([0, most_drafts]) if left == 1 else 0
            rows.append((request, 1 + drafts, drafts))
        else:
            rows.append((request, tokens, -1))
    rows.sort(key=lambda row: row[2] < 0)
    return rows


def run(
    side: type[Side],
    fused_norm: bool,
    full_graphs: bool,
    state: torch.dtype,
    ranks: int = 1,
    steps: int = STEPS,
    most_drafts: int = K,
    chunk: bool = False,
) -> dict[str, Any]:
    """Run both engines on the same batches."""
    from nwor_ops.vllm.audit.recurrent import StateAudit

    chance, generator = random.Random(7), torch.Generator().manual_seed(7)
    config = configuration(full_graphs, state, ranks, most_drafts, chunk, side)
    weights = side.weights_of(generator)
    sides = [side(config, recurrent, fused_norm, weights) for recurrent in (False, True)]
    audit = StateAudit(sides[1].builders)
    for builder in sides[1].builders:
        builder.listener = audit
    requests: list[Request] = []
    said: dict[str, Any] = {"windows_only": 0, "mixed": 0, "prompts_only": 0, "preempted": 0, "worst": 0.0,
                            "operations_added": -99}  # fmt: skip
    said |= {"blocks": [side.blocks_per_request for side in sides], "not_stored": 0}
    read_by_graphs: set[tuple[int, ...]] = set()  # addresses
    for _ in range(steps):
        while len(requests) < ROWS and chance.random() < 0.5:
            requests.append(Request(chance.randint(1, 12), sides))
        scheduled = schedule(requests, chance, most_drafts)
        if not scheduled:
            continue
        windows = sum(drafts >= 0 for _, _, drafts in scheduled)
        kind = "windows_only" if windows == len(scheduled) else "mixed" if windows else "prompts_only"
        said[kind] += 1
        batch = Batch(scheduled, full_graphs and kind == "windows_only", most_drafts)
        inputs = side.inputs_of(generator, batch.tokens)
        outputs = [
            side.run(batch, [request.blocks[number] for request, _, _ in scheduled], inputs)
            for number, side in enumerate(sides)
        ]
        if kind == "windows_only":
            theirs, mine = (side.operations for side in sides)
            said["operations_added"] = max(said["operations_added"], mine - theirs)
            read = [getattr(of_group, name) for of_group in sides[1].made.values() for name in READ_BY_GRAPHS]
            read_by_graphs.add(tuple(tensor.data_ptr() for tensor in read))
            said["addresses"] = len(read_by_graphs)
        audit.forwarded("after the forward")
        if windows:
            plans = [row for builder in sides[1].builders for row in builder.plan.tolist()]
            said["not_stored"] += sum(source > 0 and target == 0 for source, _, _, target in plans)
            if chunk:  # chunks end at multiples of 16 tokens
                check_chunks([builder.plan for builder in sides[1].builders],
                             [request.computed for request, _, drafts in scheduled if drafts >= 0])  # fmt: skip
        for theirs, mine in zip(*outputs, strict=True):
            real = slice(0, batch.real_tokens)
            difference = (theirs[real].float() - mine[real].float()).abs() / (1 + theirs[real].float().abs())
            assert torch.isfinite(mine[real]).all()
            said["worst"] = max(said["worst"], float(difference.max()))
            assert said["worst"] < CLOSE, f"{kind}: {said['worst']}"
        for request, tokens, drafts in scheduled:
            in_prompt = request.computed < request.prompt
            sampled = 1 if in_prompt else chance.randint(1, tokens)
            request.computed += (tokens if drafts < 0 else 1) if in_prompt else sampled
            request.accepted = sampled
        for request in list(requests):
            if (fate := chance.random()) < 0.06:
                for side, blocks in zip(sides, request.blocks, strict=True):
                    side.give_back(blocks)
                requests.remove(request)
                if fate < 0.02 and request.computed:  # it returns, and all its tokens are now its prompt
                    requests.append(Request(request.computed, sides))
                    said["preempted"] += 1
    return said | audit.summary()


def check_chunks(plans: list[Tensor], computed: list[int]) -> None:
    """Check that the rows before each window began at a multiple of 16 tokens.

    Args:
        plans: the plan of each group.
        computed: tokens of each request with a window, before the window.
    """
    for plan in plans:
        rows = plan[: len(computed), 1].tolist()
        assert [count % 16 for count in rows] == [tokens % 16 for tokens in computed]


class WholeHeads:
    """Run a kernel of vLLM with one program per head instead of several, each for a few rows of the state.

    Each program takes milliseconds in the interpreter.

    Args:
        kernel: the kernel.
        rows: at least the rows of a state.
        grid: returns the grid, from the given grid and the arguments by name.
    """

    def __init__(self, kernel: Any, rows: int, grid: Callable[[tuple[int, ...], dict[str, Any]], tuple[int, ...]]):
        self._kernel, self._rows, self._grid = kernel, rows, grid

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self._kernel[self._grid(grid, given)](**given | {"BV": self._rows})


def prepare_vllm() -> None:
    """Set this up before anything of vLLM is imported."""
    use_interpreter()
    import triton.language as tl
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent, fused_sigmoid_gating, layernorm_guard

    fused_recurrent.exp = lambda x: tl.exp(x)  # the name that the interpreter knows
    layernorm_guard.num_compute_units = lambda index: 1
    for module, name, grid_of in (
        (fused_sigmoid_gating, "fused_sigmoid_gating_delta_rule_update_kernel", lambda grid, _: (grid[0], 1, grid[2])),
        (fused_recurrent, "fused_recurrent_gated_delta_rule_packed_decode_kernel", lambda grid, _: (1, *grid[1:])),
    ):
        setattr(module, name, WholeHeads(getattr(module, name), WIDTH, grid_of))
    install("qwen", supports_fused_mtp_decode=lambda: True)


def use_wide_heads() -> None:
    """Use the only width of heads that the chunk form has. Call it before :func:`prepare_vllm`."""
    global WIDTH, DIMENSION
    WIDTH = 128
    DIMENSION = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
    Side.output, Side.key_width = (VALUE_HEADS, WIDTH), WIDTH


def main() -> None:
    if any("-chunk" in name for name in sys.argv):
        use_wide_heads()
    prepare_vllm()
    cases: dict[str, tuple[Any, ...]] = {
        "plain": (False, False, torch.float32),
        "plain-graphs": (False, True, torch.bfloat16),
        "fused-norm-of-two-ranks": (True, False, torch.float32, 2),
        "fused-norm-graphs": (True, True, torch.float32),
        "plain-nodrafts": (False, False, torch.float32, 2),
        "plain-graphs-nodrafts": (False, True, torch.float32),
        "plain-chunk": (False, False, torch.float32, 2),
        "fused-norm-graphs-chunk": (True, True, torch.float32),
        "plain-graphs-chunk-nodrafts": (False, True, torch.float32),
    }
    for name in sys.argv[1:] or cases:
        drafts = 0 if name.endswith("nodrafts") else K
        said = run(Side, *cases[name], most_drafts=drafts, chunk="-chunk" in name)
        print(name, json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
