"""Family recurrent on a GPU, beyond its cases in ops/. The results have the bits of vLLM's kernel.

Tests have more items than blocks, large caches, and several streams.

A comparison with vLLM needs its tree on the path, and its compiled core (installed, or named by VLLM_CORE).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from recurrent_chunk import error_of, exact_run
from samples_recurrent import Heads, Inputs, make_layer
from vllm_kernels import glm_update, load_core, olmo_update, recurrent_update

from nwor_ops import ops

HEADS = Heads(2, 4, 128, 128)
STATE_DTYPES = (torch.float32, torch.bfloat16)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


@dataclasses.dataclass
class Window:
    """Of some requests: what a model computed of their tokens, in buffers that never move."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    gate: torch.Tensor
    starts: torch.Tensor


class Requests:
    """One layer with a slot for each request, in buffers that never move."""

    def __init__(
        self,
        device,
        requests,
        rows,
        state_dtype,
        heads=HEADS,
        dtype=torch.bfloat16,
        per_channel=False,
        seed=0,
        chunk=0,
    ):
        torch.manual_seed(seed)
        self.device, self.requests, self.rows, self.heads, self.dtype = device, requests, rows, heads, dtype
        self.per_channel, self.chunk, self.random = per_channel, chunk, random.Random(seed)
        self.allow_neg_eigval, self.gate_lower_bound = False, None
        layer = make_layer(heads, requests + 1, rows, state_dtype, dtype, per_channel, gap=64, seed=seed, chunk=chunk)
        state, *records = layer.tensors
        records, self.ran = records[:-1], torch.zeros(1, dtype=torch.int64, device=device)
        self.state, self.records = torch.zeros_like(state, device=device), [r.to(device) for r in records]
        self.state[1:] = torch.randn(self.state[1:].shape, device=device)
        channels = (heads.key_width,) if per_channel else ()
        self.A_log = torch.rand(heads.value_heads, device=device).log()
        self.dt_bias = torch.randn(heads.value_heads, *channels, device=device)
        self.weight = torch.rand(heads.value_width, device=device)
        self.plan = torch.zeros(requests, 4, dtype=torch.int32, device=device)
        self.cursors = torch.zeros(requests + 1, 3 if chunk else 2, dtype=torch.int32, device=device)
        self.window_id = torch.zeros(1, dtype=torch.int64, device=device)
        self.slots = torch.arange(1, requests + 1, dtype=torch.int32, device=device)
        self.kept = torch.ones(requests, dtype=torch.int32, device=device)

    @property
    def scale(self):
        return self.heads.key_width**-0.5

    def draw(self, lengths) -> Window:
        h, tokens = self.heads, sum(lengths)
        sizes = (h.key_heads * h.key_width,) * 2 + (h.value_heads * h.value_width,)
        packed = torch.randn(tokens, sum(sizes), device=self.device).to(self.dtype)
        q, k, v = packed.split(sizes, -1)
        channels = (h.key_width,) if self.per_channel else ()
        a = torch.randn(tokens, h.value_heads, *channels, device=self.device).to(self.dtype)
        b = torch.randn(tokens, h.value_heads, device=self.device).to(self.dtype)
        gate = torch.randn(tokens, h.value_heads, h.value_width, device=self.device).to(self.dtype)
        starts = torch.cat([torch.zeros(1), torch.tensor(lengths).cumsum(0)]).to(self.device, torch.int32)
        return Window(
            *(part.unflatten(-1, (-1, h.key_width)) for part in (q, k)), v.unflatten(-1, (-1, h.value_width)), a, b,
            gate, starts,
        )  # fmt: skip

    def ragged(self):
        return [self.random.randint(1, self.rows) for _ in range(self.requests)]

    def open(self, window: Window) -> None:
        ops.plan_recurrent_window(
            self.plan, self.cursors, self.window_id, self.slots, window.starts, self.kept, self.rows,
            chunk=self.chunk,
        )  # fmt: skip

    def verify(self, window: Window, out, state=None, plan=None, every=None, norm=None, use_qk_l2norm=True) -> None:
        ops.gated_delta_verify(
            out, self.state if state is None else state, *self.records, self.ran, window.q, window.k, window.v,
            window.a, window.b, self.A_log, self.dt_bias, self.plan if plan is None else plan, self.window_id,
            window.starts, self.scale, gate=window.gate if norm else None, norm_weight=self.weight if norm else None,
            gate_activation=norm or "silu", all_states=every, use_qk_l2norm=use_qk_l2norm,
            allow_neg_eigval=self.allow_neg_eigval, gate_lower_bound=self.gate_lower_bound, chunk=self.chunk,
        )  # fmt: skip

    def run(self, window: Window, **options):
        self.open(window)
        out = torch.full_like(window.gate, 7)
        self.verify(window, out, **options)
        return out

    def states_of(self, window: Window):
        return torch.zeros(len(window.v), *self.state.shape[1:], dtype=self.state.dtype, device=self.device)

    def fold(self) -> None:
        plan = torch.zeros_like(self.plan)
        ops.plan_recurrent_fold(plan, self.cursors, self.slots, self.slots, self.kept)
        self.fold_by(plan)

    def fold_by(self, plan) -> None:
        layers = ([tensor] for tensor in (self.state, *self.records, self.ran))
        ops.gated_delta_fold(*layers, plan, chunk=self.chunk)

    def accept(self, lengths) -> None:
        self.kept.copy_(torch.tensor([self.random.randint(1, length) for length in lengths]))


# ---------------------------------------------------------------- vLLM's Triton kernel


def loaded_or_skipped(load, needed):
    """Load vLLM's kernels. Skip a comparison of bits without `needed`, or where Triton is older than the one that torch
    2.14, and so vLLM 0.33, requires."""
    try:
        import triton

        major, minor, *_ = triton.__version__.split(".")
        if (int(major), int(minor)) < (3, 8):
            pytest.skip(f"the kernel has the bits of Triton 3.8, and this is Triton {triton.__version__}")
        return load()
    except ImportError as error:
        pytest.skip(f"{needed}: {error}")


@pytest.fixture(scope="module")
def triton_update():
    return loaded_or_skipped(recurrent_update, "vLLM's kernel needs Triton, and vLLM's tree on the path")


class EveryState:
    """vLLM's scheme: a state for each token of a request's last window; the next one begins with the last accepted."""

    def __init__(self, requests: Requests, update):
        self.of, self.update = requests, update
        count, rows, device = requests.requests, requests.rows, requests.device
        self.indices = torch.arange(1, count * rows + 1, dtype=torch.int32, device=device).view(count, rows)
        shape = (1 + count * rows, *requests.state.shape[1:])
        self.states = torch.zeros(shape, dtype=requests.state.dtype, device=device)
        self.states[self.indices[:, 0].long()] = requests.state[1:]

    def accepted_states(self):
        each = torch.arange(self.of.requests, device=self.of.device)
        return self.states[self.indices[each, self.of.kept.long() - 1].long()]

    def run(self, window: Window, use_qk_l2norm=True):
        of = self.of
        out, _ = self.update(
            of.A_log, window.a, window.b, of.dt_bias, window.q[None], window.k[None], window.v[None], scale=of.scale,
            initial_state=self.states, cu_seqlens=window.starts, ssm_state_indices=self.indices,
            num_accepted_tokens=of.kept, use_qk_l2norm_in_kernel=use_qk_l2norm, is_kda=of.per_channel,
        )  # fmt: skip
        return out.view_as(window.gate)


def check_vllm_has_the_bits(requests: Requests, update, steps, lengths_of=Requests.ragged, use_qk_l2norm=True):
    theirs = EveryState(requests, update)
    for _ in range(steps):
        lengths = lengths_of(requests)
        window = requests.draw(lengths)
        if not use_qk_l2norm:  # keys of any length would blow the state up
            window.k = window.k / requests.heads.key_width**0.5
        begun_with, every = theirs.accepted_states(), requests.states_of(window)
        out = requests.run(window, every=every, use_qk_l2norm=use_qk_l2norm)
        assert same_bits(out, theirs.run(window, use_qk_l2norm))
        assert same_bits(requests.state[1:], begun_with)
        kept = torch.cat([row[:length] for row, length in zip(theirs.indices, lengths, strict=True)])
        assert same_bits(every, theirs.states[kept.long()])
        requests.accept(lengths)
    requests.fold()
    assert same_bits(requests.state[1:], theirs.accepted_states())
    assert requests.state[1:].isfinite().all()
    assert out.float().abs().max() > 0.01


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_bits_of_vllm(device, triton_update, state_dtype, drafts):
    check_vllm_has_the_bits(Requests(device, 5, drafts + 1, state_dtype), triton_update, 40)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(1, 3, 64, 64), Heads(2, 2, 256, 256), Heads(1, 2, 64, 128)], ids=str)
def test_bits_of_vllm_at_other_widths(device, triton_update, state_dtype, heads):
    check_vllm_has_the_bits(Requests(device, 5, 4, state_dtype, heads), triton_update, 40)


def test_bits_of_vllm_with_half_inputs(device, triton_update):
    check_vllm_has_the_bits(Requests(device, 5, 4, torch.float32, dtype=torch.float16), triton_update, 20)


def test_bits_of_vllm_with_bfloat16_bias(device, triton_update):
    requests = Requests(device, 5, 4, torch.float32)
    requests.dt_bias = requests.dt_bias.bfloat16()
    check_vllm_has_the_bits(requests, triton_update, 20)


def test_bits_of_vllm_without_l2norm(device, triton_update):
    check_vllm_has_the_bits(Requests(device, 5, 4, torch.float32), triton_update, 20, use_qk_l2norm=False)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_bits_of_vllm_per_channel(device, triton_update, state_dtype):
    """Windows of one token: after the first one vLLM's kernel reads `a` of another token (it steps by V, not V dk)."""
    requests = Requests(device, 5, 4, state_dtype, per_channel=True)
    check_vllm_has_the_bits(requests, triton_update, 40, lambda r: [1] * r.requests)


def test_bits_of_vllm_in_more_items_than_blocks(device, triton_update):
    requests = Requests(device, 40, 4, torch.float32, Heads(4, 16, 128, 128))
    check_vllm_has_the_bits(requests, triton_update, 4)


@pytest.fixture(scope="module")
def olmo_kernels():
    return loaded_or_skipped(olmo_update, "vLLM's kernels for OLMo hybrid need an installed vLLM")


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "drafts", "count", "steps"),
    [(Heads(3, 3, 96, 192), 3, 5, 40), (Heads(1, 2, 96, 64), 7, 5, 40), (Heads(30, 30, 96, 192), 4, 40, 4)],
    ids=["three-heads", "shared-keys", "many"],
)
def test_bits_of_vllm_for_olmo_hybrid(device, olmo_kernels, heads, drafts, count, steps, state_dtype, allow_neg_eigval):
    """Another kernel than that of other widths: one warp of a program sums, and keys are divided by their norms."""
    requests = Requests(device, count, drafts + 1, state_dtype, heads)
    requests.allow_neg_eigval = allow_neg_eigval
    check_vllm_has_the_bits(requests, functools.partial(olmo_kernels, allow_neg_eigval=allow_neg_eigval), steps)


def test_bits_of_vllm_for_olmo_half_inputs(device, olmo_kernels):
    requests = Requests(device, 5, 4, torch.float32, Heads(2, 2, 96, 192), dtype=torch.float16)
    check_vllm_has_the_bits(requests, functools.partial(olmo_kernels, allow_neg_eigval=False), 20)


# ---------------------------------------------------------------- vLLM's Triton kernel for GLM-5.3-Flash

GLM = Heads(3, 3, 128, 128)


@pytest.fixture(scope="module")
def glm_kernel():
    try:
        return functools.partial(glm_update(), gate_lower_bound=-5.0)
    except ImportError as error:
        pytest.skip(f"vLLM's kernel for GLM-5.3-Flash needs an installed vLLM: {error}")


def glm_requests(device, state_dtype, count=5, heads=GLM) -> Requests:
    requests = Requests(device, count, 4, state_dtype, heads, per_channel=True)
    requests.gate_lower_bound = -5.0
    return requests


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_bits_of_the_decays_of_vllm_for_glm(device, glm_kernel, state_dtype):
    """A state of ones and keys of zeros: after each token the state is the product of its decays."""
    requests = glm_requests(device, state_dtype)
    for _ in range(10):
        requests.state[1:] = 1
        requests.cursors.zero_()
        requests.kept.fill_(1)
        theirs = EveryState(requests, glm_kernel)
        lengths = requests.ragged()
        window = requests.draw(lengths)
        window.k = torch.zeros_like(window.k)
        every = requests.states_of(window)
        requests.run(window, every=every)
        theirs.run(window)
        kept = torch.cat([row[:length] for row, length in zip(theirs.indices, lengths, strict=True)])
        assert same_bits(every, theirs.states[kept.long()])
    assert ((every > 0) & (every < 1)).any()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "count"), [(GLM, 5), (Heads(64, 64, 128, 128), 20)], ids=["small", "glm"])
def test_near_vllm_for_glm(device, glm_kernel, heads, count, state_dtype):
    """vLLM's kernel sums in another order, so numbers are near and not equal."""
    requests = glm_requests(device, state_dtype, count, heads)
    theirs, exact = EveryState(requests, glm_kernel), state_dtype == torch.float32
    tolerance = {"rtol": 1e-4 if exact else 0.02, "atol": 1e-5 if exact else 0.02}
    for _ in range(10):
        lengths = requests.ragged()
        window = requests.draw(lengths)
        begun_with, every = theirs.accepted_states(), requests.states_of(window)
        out = requests.run(window, every=every)
        torch.testing.assert_close(requests.state[1:], begun_with, **tolerance)  # reapplied from the last window
        expected = theirs.run(window)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=1e-3 if exact else 0.02)
        kept = torch.cat([row[:length] for row, length in zip(theirs.indices, lengths, strict=True)])
        torch.testing.assert_close(every, theirs.states[kept.long()], **tolerance)
        assert expected.float().abs().max() > 0.01
        requests.accept(lengths)


# ---------------------------------------------------------------- vLLM's CUDA op, which ends with the norm


@pytest.fixture(scope="module")
def fused_op():
    try:
        load_core()
        return torch.ops._C.fused_gdn_decode_post_conv_mtp
    except (ImportError, AttributeError) as error:
        pytest.skip(f"vLLM's core is neither installed nor named by VLLM_CORE: {error}")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_norm_of_vllm(device, fused_op, state_dtype, activation):
    requests = Requests(device, 6, 4, state_dtype)
    theirs = EveryState(requests, None)
    for _ in range(10):
        lengths = requests.ragged()
        window = requests.draw(lengths)
        begun_with, expected = theirs.accepted_states(), torch.empty_like(window.gate)
        packed = torch.cat([part.flatten(1) for part in (window.q, window.k, window.v)], 1)
        fused_op(
            packed, window.a, window.b, requests.A_log, requests.dt_bias, theirs.indices, window.starts,
            requests.kept, theirs.states, window.gate, requests.weight, expected, requests.scale, 1e-5, activation,
        )  # fmt: skip
        out = requests.run(window, norm=activation)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(requests.state[1:], begun_with, rtol=0.02, atol=0.02)
        requests.accept(lengths)


# ---------------------------------------------------------------- bits of a scheme that stores every state


@pytest.mark.parametrize(
    ("state_dtype", "per_channel", "steps", "heads"),
    [
        (torch.float32, False, 2500, HEADS),
        (torch.bfloat16, False, 2500, HEADS),
        (torch.bfloat16, True, 300, HEADS),
        (torch.float32, False, 300, Heads(2, 2, 96, 192)),
        (torch.bfloat16, False, 300, Heads(2, 2, 96, 192)),
        (torch.bfloat16, True, 300, Heads(2, 2, 96, 192)),
    ],
    ids=["float32", "bfloat16", "kda", "96-float32", "96-bfloat16", "96-kda"],
)
def test_bits_over_many_steps(device, state_dtype, per_channel, steps, heads):
    """At the widths of real models. The other scheme is the kernel without a record: every window begins with the state
    that the last accepted token left."""
    requests = Requests(device, 4, 4, state_dtype, heads, per_channel=per_channel)
    begins = requests.state.clone()
    nothing = int32([[slot, 0, 0, slot] for slot in range(1, 5)], device)
    other = Requests(device, 4, 4, state_dtype, heads, per_channel=per_channel, seed=1)
    other.A_log, other.dt_bias = requests.A_log, requests.dt_bias
    differ = torch.zeros(1, dtype=torch.int64, device=device)
    windows = [(lengths, requests.draw(lengths)) for lengths in (requests.ragged() for _ in range(50))]
    for step in range(steps):
        lengths, window = windows[step % len(windows)]
        out, expected, every = requests.run(window), torch.empty_like(window.gate), requests.states_of(window)
        other.verify(window, expected, state=begins, plan=nothing, every=every)
        differ += (bits(out) != bits(expected)).sum() + (bits(requests.state[1:]) != bits(begins[1:])).sum()
        requests.accept(lengths)
        begins[1:] = every[(window.starts[:-1] + requests.kept - 1).long()]
    assert differ.item() == 0
    assert requests.state[1:].isfinite().all()
    assert requests.state[1:].float().abs().max() > 0.1


# ---------------------------------------------------------------- the chunk form

CHUNK = 16
PARTS = ("q", "k", "v", "a", "b", "gate")


def chunks(device, count, rows, state_dtype, **options) -> Requests:
    """Requests of the chunk form."""
    return Requests(device, count, rows, state_dtype, chunk=CHUNK, **options)


def rows_of(text: Window, tokens, lengths) -> Window:
    """Return a window of these tokens of a text."""
    chosen = torch.tensor(tokens, dtype=torch.int64, device=text.q.device)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(text.q.device, torch.int32)
    return Window(*(getattr(text, part)[chosen] for part in PARTS), starts)


def read_text(requests: Requests, text: Window, end: int, norm=None, seed=0, stores_all=False):
    """Read `end` tokens for each request, in windows of random lengths. Rejected tokens are any of the text. A request
    that has finished is padding.

    Returns:
        The outputs [requests, end, ...] of the tokens that stay, and with `stores_all` their states.
    """
    dice, count = random.Random(seed), requests.requests
    positions, slots, last = [0] * count, requests.slots.clone(), [1] * count
    outputs = torch.zeros(count, end, *text.gate.shape[1:], dtype=text.gate.dtype, device=requests.device)
    states = torch.zeros(count, end, *requests.state.shape[1:], dtype=requests.state.dtype, device=requests.device)
    while min(positions) < end:
        lengths = [dice.randint(1, requests.rows) for _ in range(count)]
        kept = [min(dice.randint(1, n), end - at) for n, at in zip(lengths, positions, strict=True)]
        tokens = []
        for q, (n, stay, at) in enumerate(zip(lengths, kept, positions, strict=True)):
            tokens += [q * end + at + i for i in range(stay)] + dice.choices(range(len(text.v)), k=n - stay)
        requests.kept.copy_(torch.tensor(last))
        requests.slots.copy_(torch.where(torch.tensor(kept, device=slots.device) > 0, slots, 0))
        window = rows_of(text, tokens, lengths)
        every = requests.states_of(window) if stores_all else None
        out = requests.run(window, norm=norm, every=every)
        begin = 0
        for q, (n, stay) in enumerate(zip(lengths, kept, strict=True)):
            if stay == 0:
                assert not out[begin : begin + n].any()
            else:
                outputs[q, positions[q] : positions[q] + stay] = out[begin : begin + stay]
                if every is not None:
                    states[q, positions[q] : positions[q] + stay] = every[begin : begin + stay]
                positions[q], last[q] = positions[q] + stay, stay
            begin += n
    requests.kept.copy_(torch.tensor(last))
    requests.slots.copy_(slots)
    return (outputs, states) if stores_all else outputs


def same_layer(requests: Requests, other: Requests) -> Requests:
    """Give `requests` the states and weights of `other`."""
    requests.state.copy_(other.state)
    requests.A_log, requests.dt_bias, requests.weight = other.A_log, other.dt_bias, other.weight
    return requests


@pytest.mark.parametrize("norm", [None, "silu"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_bits_of_chunks_do_not_depend_on_windows(device, state_dtype, norm):
    """One text cut in many ways, with drafts and without: each token keeps its bits, and so does the folded state. The
    kernel for windows of up to four tokens has the bits of that for eight."""
    count, end = 4, 70
    first = chunks(device, count, 1, state_dtype)
    text = first.draw([count * end])
    # The last key of the first chunk has no weight, but its product with the next key overflows.
    text.k[15::end, :, 0], text.k[16::end, :, 0] = 2.0**120, 2.0**9
    begun = same_layer(chunks(device, count, 1, state_dtype), first)
    expected = read_text(first, text, end, norm)
    first.fold()
    assert first.state[1:].isfinite().all()
    for seed, rows in enumerate((1, 2, 3, 4, 5, 8, 8, 8)):
        other = same_layer(chunks(device, count, rows, state_dtype), begun)
        assert same_bits(read_text(other, text, end, norm, seed), expected), rows
        other.fold()
        assert same_bits(other.state[1:], first.state[1:]), rows


@pytest.mark.parametrize("norm", [None, "silu"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_bits_of_chunks_in_many_blocks(device, state_dtype, norm):
    """With many heads a block has all rows of a head, some at a time."""
    heads, end = Heads(4, 16, 128, 128), 40
    many = chunks(device, 40, 8, state_dtype, heads=heads)
    text = many.draw([40 * end])
    few = same_layer(chunks(device, 40, 8, state_dtype, heads=heads), many)
    outputs = read_text(many, text, end, norm)
    many.fold()
    for request in (0, 17, 39):
        slot = few.slots[request : request + 1].clone()
        alone = copy.copy(few)
        alone.requests, alone.slots = 1, slot.clone()
        alone.kept, alone.plan = few.kept[:1].clone(), few.plan[:1].clone()
        part = rows_of(text, range(request * end, (request + 1) * end), [end])
        assert same_bits(read_text(alone, part, end, norm, seed=5)[0], outputs[request])
        alone.fold()
        assert same_bits(alone.state[slot.long()], many.state[slot.long()])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_error_of_chunks(device, state_dtype):
    """Against float64. Outputs are bfloat16 numbers: few of them are rounded otherwise."""
    count, end = 3, 500
    requests = chunks(device, count, 8, state_dtype)
    text, initial = requests.draw([count * end]), requests.state.clone()
    outputs = read_text(requests, text, end)
    requests.fold()
    for q in range(count):
        part = rows_of(text, range(q * end, (q + 1) * end), [end])
        inputs = Inputs(part.q, part.k, part.v, part.a, part.b, requests.A_log, requests.dt_bias)
        expected, state = exact_run(initial[q + 1], inputs, requests.scale)
        if state_dtype == torch.float32:
            assert (outputs[q] != expected.bfloat16()).float().mean() < 0.005
            assert error_of(requests.state[q + 1], state) < 2e-6
        else:  # below a scheme that rounds the state after each token
            worse, worse_state = exact_run(initial[q + 1], inputs, requests.scale, torch.bfloat16)
            assert error_of(outputs[q], expected) < error_of(worse.bfloat16(), expected)
            assert error_of(requests.state[q + 1], state) < error_of(worse_state, state)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_states_of_chunks(device, state_dtype):
    """The states after each token do not depend on windows, leave the outputs as they are, and are those of a fold. The
    one at the end of a chunk is the one that a window stores."""
    count, end = 3, 40
    requests = chunks(device, count, 8, state_dtype)
    text = requests.draw([count * end])
    plain, single, short = (same_layer(chunks(device, count, rows, state_dtype), requests) for rows in (8, 1, 1))
    outputs, states = read_text(requests, text, end, stores_all=True)
    assert same_bits(read_text(plain, text, end), outputs)
    assert same_bits(read_text(single, text, end, stores_all=True)[1], states)
    for each in (requests, plain):
        each.fold()
        assert same_bits(each.state[1:], states[:, -1])
    for position in range(17):  # the last one stores
        tokens = [q * end + position for q in range(count)]
        short.kept.fill_(1)
        short.run(rows_of(text, tokens, [1] * count))
    assert same_bits(short.state[1:], states[:, 15])


@pytest.mark.parametrize("norm", [None, "silu"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_states_of_chunks_wherever_they_lie(device, state_dtype, norm):
    requests = chunks(device, 3, 8, state_dtype)
    plan = int32([[1, 17, 3, 1], [2, 12, 20, 0], [0, 0, 0, 0]], device)
    state = verify_wherever_states_lie(requests, requests.draw([4, 8, 5]), plan, norm)
    assert not same_bits(state[1], requests.state[1])
    assert same_bits(state[2:], requests.state[2:])


def test_plans_that_split_a_chunk_are_skipped(device):
    """Outside debug mode a request with an invalid plan writes nothing."""
    requests = chunks(device, 2, 8, torch.float32)
    before, window = requests.state.clone(), requests.draw([2, 3])
    for row in ([1, 15, 0, 1], [1, 16, 0, 0], [1, 16, 0, 2]):
        out = torch.full_like(window.gate, 7)
        requests.verify(window, out, plan=int32([row, [0, 0, 0, 0]], device))
        assert (out[:2] == 7).all()
        assert not out[2:].any()
    assert same_bits(requests.state[1:], before[1:])


def test_chunks_of_half_inputs(device):
    requests = chunks(device, 1, 4, torch.float32, dtype=torch.float16)
    sentence = r"record_keys must have dtype torch\.bfloat16 with chunk on CUDA, got torch\.float16"
    with pytest.raises(TypeError, match=f"gated_delta_verify: {sentence}"):
        requests.run(requests.draw([4]))


# ---------------------------------------------------------------- items and blocks


@pytest.mark.parametrize("heads", [Heads(4, 16, 128, 128), Heads(4, 16, 64, 256), Heads(10, 10, 96, 192)], ids=str)
@pytest.mark.parametrize("norm", [None, "silu"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_requests_alone_and_together(device, state_dtype, norm, heads):
    """Blocks have different numbers of threads or rows for one request and for many. Some requests are padded."""
    together = Requests(device, 50, 4, state_dtype, heads)
    together.slots[::7] = 0
    alone = Requests(device, 50, 4, state_dtype, heads)
    for _ in range(3):
        lengths = together.ragged()
        window = together.draw(lengths)
        out = together.run(window, norm=norm)
        pieces = []
        for q in range(50):
            begin, end = window.starts[q].item(), window.starts[q + 1].item()
            one = Window(
                *(t[begin:end] for t in (window.q, window.k, window.v, window.a, window.b, window.gate)),
                int32([0, end - begin], device),
            )
            piece = torch.full_like(one.gate, 7)
            plan = torch.zeros(1, 4, dtype=torch.int32, device=device)
            ops.plan_recurrent_window(
                plan, alone.cursors, alone.window_id, together.slots[q : q + 1], one.starts,
                together.kept[q : q + 1], 4,
            )  # fmt: skip
            alone.verify(one, piece, plan=plan, norm=norm)
            pieces.append(piece)
        assert same_bits(out, torch.cat(pieces))
        assert not out[window.starts[7] : window.starts[8]].any()
        for mine, other in zip((together.state, *together.records), (alone.state, *alone.records), strict=True):
            assert same_bits(mine[1:], other[1:])
        together.accept(lengths)


@pytest.mark.parametrize(
    ("heads", "per_channel", "norm"),
    [
        (HEADS, False, "silu"),
        (Heads(1, 2, 256, 256), False, "silu"),
        (Heads(1, 2, 256, 256), True, None),
        (Heads(1, 96, 256, 256), True, None),
        (Heads(2, 2, 96, 192), False, "silu"),
    ],
    ids=["128", "256", "256-kda", "256-kda-many", "96"],
)
def test_long_records(device, heads, per_channel, norm):
    """The longest records need more shared memory than a launch gets by default.

    At a width of 256 no shared memory remains for states. With many heads a block does not have all rows of a head.
    """
    requests = Requests(device, 3, 32, torch.float32, heads, per_channel=per_channel)
    for _ in range(3):
        lengths = [32, 1, 17]
        window = requests.draw(lengths)
        every = requests.states_of(window)
        requests.run(window, norm=norm, every=every)
        requests.accept(lengths)
        requests.fold()
        assert same_bits(requests.state[1:], every[(window.starts[:-1] + requests.kept - 1).long()])


def laid_out(states, shift, gap):
    """The same states in a buffer of sentinels: `shift` elements in front of the first, `gap` after each."""
    stride = states[0].numel() + gap
    buffer = torch.full((shift + len(states) * stride + 64,), 9.0, dtype=states.dtype, device=states.device)
    view = buffer.as_strided(states.shape, (stride, *states.stride()[1:]), shift)
    view.copy_(states)
    return view, buffer


def verify_wherever_states_lie(requests, window, plan, norm):
    """Verify `window` with the same states in several places. The bits are the same each time, and nothing next to the
    states is touched.

    Returns:
        The states after the window. Those of `requests` stay as they are.
    """
    records, expected = [record.clone() for record in requests.records], None
    # (shift, gap) of the states, and shift of the states stored for each token. The first two are aligned to 16 bytes.
    for shift, gap, every_shift in ((0, 0, 0), (8, 64, 8), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        for record, old in zip(requests.records, records, strict=True):
            record.copy_(old)
        state, buffer = laid_out(requests.state, shift, gap)
        every, every_buffer = laid_out(requests.states_of(window), every_shift, 0)
        out = torch.full_like(window.gate, 7)
        requests.verify(window, out, state=state, plan=plan, every=every, norm=norm)
        found = state.clone(), every.clone(), out, *(record.clone() for record in requests.records)
        expected = expected or found
        assert all(map(same_bits, found, expected))
        assert same_bits(buffer, laid_out(expected[0], shift, gap)[1])
        assert same_bits(every_buffer, laid_out(expected[1], every_shift, 0)[1])
    return expected[0]


@pytest.mark.parametrize("heads", [HEADS, Heads(1, 48, 128, 128), Heads(1, 3, 64, 256), Heads(1, 2, 256, 256)], ids=str)
@pytest.mark.parametrize("norm", [None, "silu"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_states_wherever_they_lie(device, state_dtype, norm, heads):
    """The place of states decides whether they are moved in bulk, in chunks or by the element. Windows reapply rows,
    reapply none, and go on in another slot."""
    requests = Requests(device, 8, 4, state_dtype, heads)
    plan = int32([[1, 0, 0, 1], [2, 3, 1, 2], [3, 0, 0, 6], [4, 4, 0, 7], [5, 1, 1, 8], [0, 0, 0, 0]], device)
    state = verify_wherever_states_lie(requests, requests.draw([4, 1, 3, 2, 4, 2]), plan, norm)
    begun = requests.state
    assert same_bits(state[[0, 1, 3, 4, 5]], begun[[0, 1, 3, 4, 5]])
    assert same_bits(state[6], begun[3])
    assert not same_bits(state[2], begun[2])
    assert not same_bits(state[8], begun[5])


def test_offsets_beyond_32_bits(device):
    """States of more than 2^31 elements: the last slot is reached, and the first one is not."""
    heads, slots = Heads(1, 4, 128, 128), 2**31 // (4 * 128 * 128) + 2
    small = Requests(device, 1, 2, torch.bfloat16, heads)
    state = torch.zeros(slots, 4, 128, 128, dtype=torch.bfloat16, device=device)
    state[-1], state[1] = small.state[1], 3
    large = copy.copy(small)
    large.records = [
        torch.zeros(slots, *record.shape[1:], dtype=record.dtype, device=device) for record in small.records
    ]
    window = small.draw([2])
    expected, out = small.run(window), torch.zeros_like(window.gate)
    large.verify(window, out, state=state, plan=int32([[slots - 1, 0, 0, slots - 1]], device))
    assert same_bits(out, expected)
    fold = int32([[slots - 1, 2, 1, slots - 1]], device)
    ops.gated_delta_fold([state], *([record] for record in large.records), [large.ran], fold)
    small.kept.fill_(2)
    before = small.state.clone()
    small.fold()
    assert not same_bits(small.state[1], before[1])
    assert same_bits(state[-1], small.state[1])
    assert (state[1] == 3).all()


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("heads", [HEADS, Heads(4, 64, 128, 128)], ids=["few blocks", "many"])
@pytest.mark.parametrize("norm", [None, "silu"])
def test_launches_behind_each_other(device, norm, heads):
    """A window reads what the one before it stored, and what another kernel did with it meanwhile, as if each had been
    waited for."""
    runs = []
    for waits in (False, True):
        requests = Requests(device, 5, 4, torch.float32, heads)
        window = requests.draw([4, 1, 3, 2, 4])
        rows = {1: 1, 2: 1, 3: 0, 4: 1, 5: 2}
        plans = [int32([[slot, count, half, slot] for slot, count in rows.items()], device) for half in (0, 1)]
        outs = [torch.empty_like(window.gate) for _ in range(60)]
        torch.cuda.synchronize()
        for step, out in enumerate(outs):
            requests.verify(window, out, plan=plans[step % 2], norm=norm)
            if step % 3 == 0:
                requests.state.neg_()
            if step % 4 == 0:
                tensors = (requests.state, *requests.records, requests.ran)
                ops.gated_delta_fold(*([tensor] for tensor in tensors), plans[step % 2])
            if waits:
                torch.cuda.synchronize()
        runs.append((requests.state.clone(), torch.stack(outs), *requests.records))
    assert all(map(same_bits, *runs))
    assert runs[0][0][1:].isfinite().all()


@pytest.mark.parametrize("heads", [HEADS, Heads(4, 64, 128, 128)], ids=["few blocks", "many"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_chunk_windows_behind_each_other(device, drafts, heads):
    """A plan and a window read what the ones before them wrote, with and without a wait after each."""
    runs = []
    for waits in (False, True):
        requests = Requests(device, 5, drafts + 1, torch.float32, heads, chunk=CHUNK)
        window = requests.draw([drafts + 1] * 5)
        outs = [torch.empty_like(window.gate) for _ in range(60)]
        torch.cuda.synchronize()
        for step, out in enumerate(outs):
            requests.open(window)
            requests.verify(window, out)
            if step % 7 == 6:
                requests.fold()
            if waits:
                torch.cuda.synchronize()
        runs.append((requests.state.clone(), torch.stack(outs), *requests.records))
    assert all(map(same_bits, *runs))
    assert runs[0][0][1:].isfinite().all()


def test_two_streams(device):
    """Launches of two streams run at the same time, each with its own shared memory."""
    pairs = [[Requests(device, 5, 4, torch.float32, seed=seed) for seed in (0, 1)] for _ in range(2)]
    windows = [[requests.draw([4, 1, 3, 2, 4]) for _ in range(30)] for requests in pairs[0]]
    outs = []
    of_their_own, shared = [torch.cuda.Stream(), torch.cuda.Stream()], [torch.cuda.current_stream()] * 2
    for pair, streams in zip(pairs, (of_their_own, shared), strict=True):
        torch.cuda.synchronize()
        outs.append([[], []])
        for step in range(30):
            for i, (requests, stream) in enumerate(zip(pair, streams, strict=True)):
                with torch.cuda.stream(stream):
                    outs[-1][i].append(requests.run(windows[i][step]))
        torch.cuda.synchronize()
    for at_once, alone, mine, other in zip(*outs, *pairs, strict=True):
        assert same_bits(torch.stack(at_once), torch.stack(alone))
        assert same_bits(mine.state[1:], other.state[1:])


def test_threads_that_need_other_amounts_of_shared_memory(device):
    """The limit is an attribute of the kernel. A launch of one thread must not lower it for another thread."""

    def run(rows):
        requests = Requests(device, 1, rows, torch.float32)
        window = requests.draw([rows])
        out = torch.empty_like(window.gate)
        for _ in range(2000):
            requests.verify(window, out)
        torch.cuda.synchronize()

    with ThreadPoolExecutor() as threads:
        list(threads.map(run, (32, 12, 32, 12)))


# ---------------------------------------------------------------- folds of all layers


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_fold_of_few_of_many_entries(device, chunk):
    """A warp reads 32 entries of a plan at a time. Entries that change nothing do not matter."""
    requests = Requests(device, 6, 4, torch.float32, Heads(16, 64, 128, 128), chunk=chunk)
    requests.run(requests.draw([4] * 6))
    plan, before = torch.zeros_like(requests.plan), requests.state.clone()
    ops.plan_recurrent_fold(plan, requests.cursors, requests.slots, requests.slots, requests.kept)
    requests.fold_by(plan)
    expected = requests.state.clone()
    requests.state.copy_(before)
    many = torch.zeros(500, 4, dtype=torch.int32, device=device)
    many[[0, 8, 255, 256, 264, 499]] = plan
    requests.fold_by(many)
    assert same_bits(requests.state, expected)
    assert not any(same_bits(state, old) for state, old in zip(expected[1:], before[1:], strict=True))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_cancel_of_many_layers(device, state_dtype):
    """There are more layers than fit one launch. Layers that ran in the window have folded already."""
    count, layers = 3, 80
    heads = Heads(1, 2, 64, 64)
    every = [Requests(device, count, 4, state_dtype, heads, seed=i) for i in range(layers)]
    first = every[0]
    window = first.draw([4, 2, 3])
    first.open(window)
    for layer in every:
        layer.verify(window, torch.empty_like(window.gate), plan=first.plan, state=layer.state)
    first.kept.copy_(torch.tensor([3, 1, 2]))
    first.open(window)
    expected = []
    for layer in every:
        layer.window_id = first.window_id
        before = [tensor.clone() for tensor in (layer.state, *layer.records)]
        layer.verify(window, torch.empty_like(window.gate), plan=first.plan)
        expected.append(layer.state.clone())
        if every.index(layer) % 3:  # did not run
            for tensor, old in zip((layer.state, *layer.records), before, strict=True):
                tensor.copy_(old)
            layer.ran.zero_()
    lists = zip(*((layer.state, *layer.records, layer.ran) for layer in every), strict=True)
    ops.gated_delta_fold(*map(list, lists), first.plan, first.window_id)
    for layer, state in zip(every, expected, strict=True):
        assert same_bits(layer.state[1:], state[1:])
