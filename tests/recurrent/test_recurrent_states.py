"""RecurrentStates: its protocol, and states and outputs bit-identical to a scheme that keeps every state."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
from recurrent_states import CHUNK, CHUNK_KINDS, KINDS, Decoding, in_double_precision
from torch._inductor.utils import run_and_get_code
from transactions import one_thread  # noqa: F401

from nwor_ops import RecurrentCache, RecurrentStates, ops
from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.testing.layouts import memory
from nwor_ops.transaction.protocol import State


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_cache(**options) -> RecurrentCache:
    sizes = {"num_slots": 4, "max_window": 3, "num_key_heads": 1, "num_value_heads": 2, "key_size": 64,
             "value_size": 64}  # fmt: skip
    return RecurrentCache.new(**(sizes | options))


def new_states() -> RecurrentStates:
    return RecurrentStates(max_num_requests=2, device="cpu")


def one_layer() -> Decoding:
    decoding = Decoding(["gdn"], num_slots=4, max_window=3, max_requests=2)
    decoding.start(1, 2)
    return decoding


# ---------------------------------------------------------------- bit-identical results


WINDOWS = (4, 1, 1, 4)  # tokens: steps without drafts after one that may have accepted some


@pytest.mark.parametrize("kind", KINDS | CHUNK_KINDS)
def test_texts_equal_the_plain_recurrence(device, kind):
    """The kept tokens of a request's windows form a text. Compare with its outputs in double precision, without drafts.

    Three requests are at other windows, and one has windows of any length. States are folded at random between them.
    """
    decoding = Decoding([kind], chunk=CHUNK * (kind in CHUNK_KINDS), device=device)
    if (bias := decoding.weights[kind].dt_bias) is not None:
        bias.sub_(3.0)  # states that forget slowly, so that their errors stay
    slots = [3, 1, 7, 2]  # 7: the last one
    decoding.start(*slots)
    texts: dict[int, list] = {slot: [] for slot in slots}
    for step in range(24):
        lengths = [*(WINDOWS[(step + place) % 4] for place in range(3)), decoding.draw(1, 4)]
        kept = [decoding.draw(1, length) for length in lengths]
        decoding.begin(slots, lengths)
        inputs = decoding.inputs(kind, sum(lengths))
        inputs["out"] = decoding.verify(kind, inputs)
        decoding.states.commit(decoding.tensor(kept))
        for row, (slot, number) in enumerate(zip(slots, kept, strict=True)):
            begin = sum(lengths[:row])
            texts[slot].append({name: tensor[begin : begin + number] for name, tensor in inputs.items()})
        decoding.states.fold(decoding.tensor(slot for slot in slots if decoding.draw(0, 3) == 0))
    # Each window rounds a bfloat16 state once, and each output once.
    tolerance = 0.03 if decoding.kinds[kind].state_dtype == torch.bfloat16 else 0.005
    for parts in texts.values():
        text = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        expected = in_double_precision(decoding.kinds[kind], decoding.weights[kind], text)
        assert len(expected) > 30
        assert (text["out"].double() - expected).abs().max() < tolerance * expected.abs().max()


BOTH_FORMS = pytest.mark.parametrize("kinds", [KINDS, CHUNK_KINDS], ids=["exact", "chunk"])


@BOTH_FORMS
@pytest.mark.parametrize("prompt", [31, 32, 33])
def test_prefill_and_decode_apart_equal_one_engine(device, prompt, kinds):
    """A prompt is read in windows of 5 rows. The last owners of the slots that get its state left rows of theirs."""
    options = {"chunk": CHUNK * (kinds is CHUNK_KINDS), "max_window": 8, "device": device}
    prefill, decode = Decoding(kinds, **options), Decoding(kinds, **options)
    prefill.start(1, 3)
    decode.start(2)
    prefill.window({3: 5}, {3: 4})
    decode.window({2: 5}, {2: 4})
    for begin in range(0, prompt, 5):
        length = min(5, prompt - begin)
        prefill.window({1: length}, {1: length})
    prefill.states.copy(prefill.tensor([1]), prefill.tensor([3]))
    prefill.states.fold(prefill.tensor([1]))
    decode.states.fold(decode.tensor([2]))
    for name, one in prefill.every_state.items():
        one.held[3] = decode.every_state[name].held[2] = one.held[1]
        decode.state_of(2, name).copy_(prefill.state_of(1, name))
        for layer, slot in ((one, 1), (one, 3), (decode.every_state[name], 2)):
            layer.begin_chunk(slot)
    prefill.assert_folded(1, 3)
    decode.assert_folded(2)
    for length, kept in ((8, 3), (1, 1), (5, 5), (8, 8), (8, 1)):
        prefill.window({3: length, 1: 1}, {3: kept, 1: 1})
        decode.window({2: length}, {2: kept})


@BOTH_FORMS
@pytest.mark.parametrize("invalid", [0, -1, 5, 2**31 - 1])
def test_invalid_count_leaves_other_requests_alone(device, invalid, kinds):
    """The CPU raises before it writes. CUDA skips the third of four requests. The others equal a run without it."""
    runs = []
    for third, number in ((3, invalid), (-1, 2)):
        decoding = Decoding(kinds, chunk=CHUNK * (kinds is CHUNK_KINDS), device=device)
        states, caches = decoding.states, decoding.caches.values()
        decoding.start(1, 2, 3, 4)
        decoding.begin([1, 2, 3, 4], [4] * 4)
        decoding.forward()
        counts = decoding.tensor([3, 1, number, 4])
        if device == "cpu" and third == 3:
            buffers = [states.cursors.table, states.num_kept, *(t for c in caches for t in (c.state, *c.records))]
            before = memory(buffers)
            with pytest.raises(ValueError, match=rf"^commit: num_kept must be 1 to 4 for request 2 .* got {invalid}$"):
                states.commit(counts)
            assert all(map(torch.equal, memory(buffers), before))
            assert states.skipped_requests() == 0
            return
        states.commit(counts)
        outputs = []
        for _ in range(2):
            decoding.begin([1, 2, third, 4], [2, 1, 4, 3])
            outputs += [decoding.verify(name, decoding.inputs(name, 10)) for name in kinds]
            states.commit(decoding.tensor([2, 1, 1, 3]))
        states.fold(decoding.tensor([1, 2, 4]))
        states.reset(decoding.tensor([3]))  # its slot can be used again
        decoding.begin([3], [1])
        states.cancel()
        assert states.skipped_requests() == (2 if third == 3 else 0)  # once for each window
        assert not any(out[3:7].any() for out in outputs)
        runs.append([*outputs, *(cache.state[[1, 2, 4]] for cache in caches)])
    assert all(map(torch.equal, *runs))


# ---------------------------------------------------------------- errors in the middle of a call


def test_a_batch_without_any_window_needs_no_layer():
    decoding = one_layer()
    decoding.begin([1, -1], [9, 2], is_window=[False, True])
    decoding.states.commit(int32(1, 1))
    assert decoding.states.state is State.CLOSED


OPTIONS = {"scale": 0.5, "softplus_beta": 2.0, "softplus_threshold": 0.5, "use_qk_l2norm": False,
           "allow_neg_eigval": True, "norm_eps": 0.5, "gate_activation": "sigmoid"}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_op(name):
    decoding, outs = one_layer(), []
    decoding.begin([1], [3])
    states, cache, weights = decoding.states, decoding.caches["gdn"], decoding.weights["gdn"]
    inputs = decoding.inputs("gdn", 3)
    arguments = *(inputs[part] for part in "qkvab"), weights.A_log, weights.dt_bias
    gates = {"gate": inputs["gate"], "norm_weight": torch.ones(64)} if name in ("norm_eps", "gate_activation") else {}
    for options in ({}, {name: OPTIONS[name]}):
        outs.append((torch.zeros_like(inputs["v"]), torch.zeros(3, 2, 64, 64)))
        copies = [tensor.clone() for tensor in (cache.state, *cache.records, torch.zeros(1, dtype=torch.int64))]
        options = {"scale": 64**-0.5, "all_states": outs[-1][1]} | gates | options
        plan = states.plan, states.window_id, states.query_start_loc
        ops.gated_delta_verify(outs[-1][0], *copies, *arguments, *plan, **options)
    after = torch.zeros_like(outs[0][1])
    out = states.verify("gdn", *arguments, **gates | {name: OPTIONS[name], "all_states": after})
    assert not torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(out, outs[1][0])
    assert torch.equal(after, outs[1][1])


# ---------------------------------------------------------------- between windows


def test_reset(device):
    decoding = Decoding(device=device)
    decoding.start(1, 2)
    decoding.window({1: 4, 2: 4}, {1: 3, 2: 1})
    decoding.states.reset(decoding.tensor([0, 2, -5], torch.int64))
    for name in decoding.kinds:
        assert not decoding.state_of(2, name).any()
        assert decoding.state_of(3, name).isnan().all()
    assert decoding.states.cursors.table[[1, 2], 0].tolist() == [4, 0]


# ---------------------------------------------------------------- mistakes of an engine


def test_tokens_in_slot_0_are_refused():
    """Slot 0 is padding. A request there would get zeros."""
    decoding = Decoding(["gdn"], max_requests=3)
    decoding.start(1)
    with pytest.raises(ValueError, match=r"^begin: state_slots must be 1 to 7 for request 1, which has tokens, got 0"):
        decoding.states.begin(int32(1, 0, -1), int32(0, 2, 4, 6))
    assert decoding.states.state is State.CLOSED
    decoding.states.begin(int32(1, 0), int32(0, 2, 2))  # without tokens it is padding


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize("one_storage", [False, True], ids=["a storage each", "states of one storage"])
def test_compiled_layers_write_in_place_and_never_recompile(one_storage):
    decoding = Decoding(["gdn", "gdn again", "kda", "gated"], one_storage=one_storage, max_requests=3)
    decoding.start(1, 2)
    torch._dynamo.reset()

    def forward(inputs):
        return {name: decoding.verify(name, inputs[name]) * 2 for name in decoding.kinds}

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)
    sizes = {cache.state.numel() for cache in decoding.caches.values()}
    sizes |= {cache.state.untyped_storage().nbytes() // 4 for cache in decoding.caches.values()}
    lengths = [2, 4, 0]
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached graph shows no code
        for step in range(4):
            lengths = [decoding.draw(1, 4), decoding.draw(0, 4)]
            decoding.begin([1, 2], lengths)
            inputs = {name: decoding.inputs(name, 9) for name in decoding.kinds}
            if step == 0:
                outs, (source,) = run_and_get_code(compiled, inputs)
            else:
                with torch.compiler.set_stance("fail_on_recompile"):
                    outs = compiled(inputs)
            windows = {slot: length for slot, length in zip([1, 2], lengths, strict=True) if length}
            for name, layer in decoding.every_state.items():
                mine = {part: tensor[: sum(lengths)] for part, tensor in inputs[name].items()}
                expected = layer.verify(list(windows), list(windows.values()), mine)
                assert torch.equal(outs[name][: sum(lengths)], expected * 2)
                assert not outs[name][sum(lengths) :].any()
            decoding.commit({slot: decoding.draw(1, length) for slot, length in windows.items()})
    decoding.states.fold(int32(1, 2))
    decoding.assert_folded(1, 2)

    assert source.count("torch.ops.nwor.gated_delta_verify.default(") == len(decoding.kinds)
    allocated = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", source)
    assert len(allocated) >= len(decoding.kinds), "the pattern no longer matches what inductor writes"
    assert not sizes & {prod(int(size) for size in shape.split(",") if size.strip()) for shape in allocated}
    assert "clone" not in source
    torch._dynamo.reset()


@pytest.mark.parametrize("in_pages", [False, True])
def test_layers_of_one_storage_are_traced(in_pages):
    """Torch 2.13 cannot trace views that share a storage if their sizes are symbols, so they are numbers.

    It cannot trace a call that mutates views of one storage with several dtypes either. Such a call is in an op.
    """
    decoding = Decoding(["gdn", "kda"], one_storage=not in_pages, in_pages=in_pages)
    decoding.start(1)
    torch._dynamo.reset()

    def verify(out: torch.Tensor, inputs: list[torch.Tensor], name: str) -> None:
        weights = decoding.weights[name]
        decoding.states.verify(name, *inputs, weights.A_log, weights.dt_bias, out=out)

    call = torch.library.custom_op("nwor_test::verify", verify, mutates_args=("out",)) if in_pages else verify

    def forward(inputs):
        outs = {name: torch.zeros_like(inputs[name]["v"]) for name in decoding.kinds}
        for name, out in outs.items():
            call(out, [inputs[name][part] for part in "qkvab"], name)
        return {name: out * 2 for name, out in outs.items()}

    compiled = torch.compile(forward, fullgraph=True, dynamic=not in_pages)
    for length in (3, 2, 3):
        decoding.begin([1], [length])
        inputs = {name: decoding.inputs(name, length) for name in decoding.kinds}
        outs = compiled(inputs)
        for name, layer in decoding.every_state.items():
            assert torch.equal(outs[name], layer.verify([1], [length], inputs[name]) * 2)
        decoding.commit({1: 1})
    decoding.states.fold(int32(1))
    decoding.assert_folded(1)
    torch._dynamo.reset()


def test_a_compiled_call_outside_a_window_touches_nothing():
    """Compiled and captured code cannot see that no window is open, as in warm-up runs and padded batches."""
    decoding = Decoding(["gdn"])
    decoding.start(1, 2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda inputs: decoding.verify("gdn", inputs), fullgraph=True)
    cache = decoding.caches["gdn"]
    for close in ("neither", "commit", "cancel"):
        if close != "neither":
            decoding.window({1: 4, 2: 3}, {1: 2, 2: 3})
            decoding.begin([1], [4])
            inputs = decoding.forward()["gdn"]
            decoding.commit({1: 3}) if close == "commit" else decoding.states.cancel()
        else:
            inputs = decoding.inputs("gdn", 4)
        before = [tensor.clone() for tensor in (cache.state, *cache.records, decoding.states.cursors.table)]
        assert not compiled(inputs).any()
        for tensor, old in zip((cache.state, *cache.records, decoding.states.cursors.table), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
    decoding.states.fold(int32(1, 2))
    decoding.assert_folded(1, 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("layers", [0, 1])
def test_cancel_applies_one_chunk(layers):
    """18 rows are pending. The window would store 16 of them; the others stay pending."""
    decoding = Decoding(CHUNK_KINDS, chunk=CHUNK, max_window=3)
    decoding.start(1)
    for _ in range(6):
        decoding.window({1: 3}, {1: 3})
    decoding.begin([1], [3])
    decoding.forward(list(decoding.kinds)[:layers])
    decoding.states.cancel()
    decoding.window({1: 3}, {1: 2})
    decoding.states.fold(int32(1))
    decoding.assert_folded(1)


# ---------------------------------------------------------------- counters


def test_skipped_count_is_copied_now_and_then(device):
    cursors = Cursors(1, torch.device(device))
    cursors.copy_skipped()
    cursors.num_skipped += 2
    cursors.copy_skipped()  # too early
    assert cursors.latest_skipped() == 0
    cursors.COPY_PERIOD = 0.0
    cursors.copy_skipped()
    if device == "cuda":
        torch.cuda.synchronize()
    assert cursors.latest_skipped() == 2


def test_states_without_data():
    """On the meta device every tensor has address 0. This does not count as shared memory."""
    states = RecurrentStates(max_num_requests=2, device="meta")
    for name in ("a", "b"):
        states.register_layer(name, new_cache(device="meta", dtype=torch.float32))
    states.allocate()
    states.begin(int32(1, 0).to("meta"), int32(0, 3, 3).to("meta"))

    def rows(*shape):
        return torch.empty(3, *shape, device="meta")

    for name in ("a", "b"):
        out = states.verify(name, rows(1, 64), rows(1, 64), rows(2, 64), rows(2), rows(2), *rows(2)[:2])
        assert out.shape == (3, 2, 64)
    states.commit(int32(2, 0).to("meta"))
    states.fold(int32(1).to("meta"))


# ---------------------------------------------------------------- protocol


def test_calls_have_a_required_order():
    states = new_states()
    with pytest.raises(RuntimeError, match="allocate: no layer is registered"):
        states.allocate()
    states.register_layer("a", new_cache())
    with pytest.raises(RuntimeError, match="skipped_requests: the states must be allocated; call allocate"):
        states.skipped_requests()
    with pytest.raises(RuntimeError, match="begin: the states must be between windows, it is registering layers"):
        states.begin(int32(1), int32(0, 1))
    states.allocate()
    with pytest.raises(RuntimeError, match="register_layer: the states must be registering layers"):
        states.register_layer("b", new_cache())
    with pytest.raises(RuntimeError, match="allocate: the states must be registering layers"):
        states.allocate()
    for call in (lambda: states.commit(int32(1)), states.cancel):
        with pytest.raises(RuntimeError, match="the states must be inside a window, it is between windows"):
            call()


def test_a_window_is_committed_once():
    decoding = one_layer()
    inputs = decoding.inputs("gdn", 3)
    with pytest.raises(RuntimeError, match="verify of layer 'gdn': no window is open; call begin"):
        decoding.verify("gdn", inputs)
    decoding.begin([1], [3])
    before = decoding.states.plan.clone(), decoding.states.cursors.table.clone(), decoding.states.window_id.clone()
    with pytest.raises(RuntimeError, match="begin: the states must be between windows, it is inside a window"):
        decoding.begin([1], [3])
    for call in (decoding.states.fold, decoding.states.reset):
        with pytest.raises(RuntimeError, match="must be between windows, it is inside a window"):
            call(int32(1))
    with pytest.raises(RuntimeError, match="copy: the states must be between windows"):
        decoding.states.copy(int32(1), int32(2))
    with pytest.raises(RuntimeError, match="commit: every layer must run in a window, 'gdn' has not run in this"):
        decoding.states.commit(int32(1))
    after = decoding.states.plan, decoding.states.cursors.table, decoding.states.window_id
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    decoding.verify("gdn", inputs)
    state = decoding.caches["gdn"].state.clone()
    with pytest.raises(RuntimeError, match="verify: layer 'gdn' must run once in a window, it has run in this one"):
        decoding.verify("gdn", inputs)
    assert torch.equal(decoding.caches["gdn"].state[1:3], state[1:3])
    with pytest.raises(KeyError, match="verify: layer 'other' is not registered"):
        decoding.states.verify("other", *[inputs["q"]] * 7)
    decoding.states.commit(int32(2))
    with pytest.raises(RuntimeError, match="commit: the states must be inside a window"):
        decoding.states.commit(int32(2))


BEGIN = {"state_slots": int32(1, 2), "query_start_loc": int32(0, 3, 5)}
BEGINS = [
    ({"state_slots": int32(1, 2, 3), "query_start_loc": int32(0, 1, 2, 3)}, ValueError,
     "begin: state_slots must have at most 2 requests"),
    ({"state_slots": torch.ones(2)}, TypeError, "begin: state_slots must have dtype torch.int32 or torch.int64"),
    ({"state_slots": int32(1, 2)[None]}, ValueError, "begin: state_slots must have one dimension"),
    ({"state_slots": [1, 2]}, TypeError, "begin: state_slots must be a tensor"),
    *(({"num_computed_tokens": int32(2, 1), name: tensor.to("meta")}, TypeError, f"begin: {name} must be on device cpu")
      for name, tensor in (BEGIN | {"num_computed_tokens": int32(2, 1), "is_window": int32(1, 1) > 0}).items()),
    ({"state_slots": int32(1, 4)}, IndexError, "state_slots"),
    ({"state_slots": int32(2, 2)}, ValueError, "state_slots"),
    ({"query_start_loc": int32(0, 3)}, ValueError,
     "begin: query_start_loc must have one dimension, the first of at least 3"),
    ({"query_start_loc": torch.arange(3)}, TypeError, "begin: query_start_loc must have dtype torch.int32"),
    ({"query_start_loc": int32(0, 4, 5)}, ValueError, "query_start_loc"),
    ({"query_start_loc": int32(0, 3, 2)}, ValueError, "query_start_loc"),
    ({"is_window": torch.ones(1, dtype=torch.bool)}, ValueError, "is_window must be .num_requests. with at least 2"),
    ({"is_window": int32(1, 1)}, TypeError, "is_window must have dtype torch.bool"),
    ({"num_computed_tokens": int32(1)}, ValueError, "begin: num_computed_tokens must have one dimension, the first of"),
    ({"num_computed_tokens": int32(2, 1).float()}, TypeError, "begin: num_computed_tokens must have dtype"),
    ({"num_computed_tokens": int32(2, 1), "is_window": int32(1, 1)}, TypeError, "begin: is_window must have dtype"),
]  # fmt: skip


VERIFIES = [
    ({"q": None}, TypeError, "gated_delta_verify: q must be a tensor, got None"),
    ({"v": 3}, TypeError, "verify: v must be a tensor, got 3"),
    ({"k": torch.zeros(3, 1, 32, dtype=torch.bfloat16)}, ValueError, "gated_delta_verify: k must be"),
    ({"b": torch.zeros(3, 2, dtype=torch.int32)}, TypeError, "gated_delta_verify: b must have dtype"),
    ({"out": torch.zeros(3, 2, 64)}, TypeError, "gated_delta_verify: "),
]


@pytest.mark.parametrize(("replaced", "error", "sentence"), VERIFIES)
def test_invalid_inputs_are_refused_before_anything_is_written(replaced, error, sentence):
    decoding = one_layer()
    decoding.window({1: 3, 2: 3}, {1: 2, 2: 1})
    decoding.begin([1], [3])
    cache, weights = decoding.caches["gdn"], decoding.weights["gdn"]
    before = [tensor.clone() for tensor in (cache.state, *cache.records)]
    inputs = {name: tensor for name, tensor in decoding.inputs("gdn", 3).items() if name != "gate"}
    with pytest.raises(error, match=sentence):
        decoding.states.verify("gdn", **inputs | {"A_log": weights.A_log, "dt_bias": weights.dt_bias} | replaced)
    for tensor, old in zip((cache.state, *cache.records), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
    decoding.forward()
    decoding.commit({1: 3})


COMMITS = [
    (int32(1), ValueError, "commit: num_kept must have one dimension, the first of at least 2"),
    (torch.ones(2, dtype=torch.int64), TypeError, "commit: num_kept must have dtype torch.int32"),
    (int32(1, 1).to("meta"), TypeError, "commit: num_kept must be on device cpu, got meta"),
    ([1, 1], TypeError, "commit: num_kept must be a tensor"),
    *((int32(2, number), ValueError, rf"commit: num_kept must be 1 to 3 for request 1 \(slot 2\), got {number}")
      for number in (0, -1, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("num_kept", "error", "sentence"), COMMITS)
def test_invalid_commits_leave_the_window_open(num_kept, error, sentence):
    decoding = one_layer()
    decoding.begin([1, 2], [3, 3])
    decoding.forward()
    with pytest.raises(error, match=f"^{sentence}"):
        decoding.states.commit(num_kept)
    assert not decoding.states.num_kept.any()
    decoding.commit({1: 2, 2: 3})
    decoding.states.fold(int32(1, 2))
    decoding.assert_folded(1, 2)


BETWEEN = [
    ("fold", (int32(1, 1),), ValueError, "target_slots"),
    ("fold", (int32(1, 4),), IndexError, "slots"),
    ("fold", (torch.ones(1),), TypeError, "fold: slots must have dtype torch.int32 or torch.int64"),
    ("fold", (int32(1)[0],), ValueError, "fold: slots must have one dimension"),
    ("copy", (int32(1), int32(4)), IndexError, "target_slots"),
    ("copy", (int32(1), int32(2, 3)), ValueError, "copy: target_slots must be as many as source_slots, 1, got 2"),
    ("copy", (int32(1, 2), int32(3, 3)), ValueError, "target_slots"),
    ("copy", (int32(1, 2), int32(2, 3)), ValueError, "target_slots"),
    ("copy", ([1], int32(3)), TypeError, "copy: source_slots must be a tensor"),
    ("copy", (int32(1), [3]), TypeError, "copy: target_slots must be a tensor"),
    ("reset", (int32(1, 4),), IndexError, "reset: slots must be less than 4, got 4"),
    ("reset", (None,), TypeError, "reset: slots must be a tensor, got None"),
]


@pytest.mark.parametrize(
    ("method", "arguments", "error", "sentence"), [*BETWEEN, *(("begin", *case) for case in BEGINS)]
)
def test_invalid_calls_between_windows_change_nothing(method, arguments, error, sentence):
    decoding = one_layer()
    decoding.window({1: 3, 2: 3}, {1: 2, 2: 1})
    states, call = decoding.states, getattr(decoding.states, method)
    buffers = (states.plan, states.cursors.table, states.window_id, states.query_start_loc, states.num_kept,
               decoding.caches["gdn"].state[1:3])  # fmt: skip
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(error, match=sentence):
        call(**BEGIN | arguments) if method == "begin" else call(*arguments)
    assert states.state is State.CLOSED
    assert all(map(torch.equal, buffers, before))
    decoding.window({1: 2, 2: 3}, {1: 2, 2: 1})
    states.fold(int32(1, 2))
    decoding.assert_folded(1, 2)


# ---------------------------------------------------------------- set-up


def replaced(name: str, change) -> tuple:
    cache = new_cache()
    tensors = {field: getattr(cache, field) for field in cache.__dataclass_fields__}
    return tuple((tensors | {name: change(tensors[name])}).values())


CACHES = [
    (lambda: new_cache(max_window=33), ValueError, "max_window must be at most 32, got 33"),
    (lambda: new_cache(chunk=16, max_window=9), ValueError, "max_window must be at most 8, got 9"),
    (lambda: new_cache(key_size=192), ValueError, "state must be of key_width 64, 96, 128 or 256"),
    (lambda: new_cache(chunk=8), ValueError, "chunk must be 0 or 16, got 8"),
    (lambda: RecurrentCache(*replaced("state", lambda t: t.half())), TypeError, "state must have dtype"),
    (lambda: RecurrentCache(*replaced("record_norms", lambda t: t[1:])), ValueError, "record_norms must be"),
    (lambda: RecurrentCache(*replaced("record_updates", lambda t: t.to("meta"))), TypeError,
     "record_updates must be on device cpu like the other arguments, got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "sentence"), CACHES)
def test_invalid_caches(make, error, sentence):
    """The op checks shapes and dtypes. test_bad_classes.py passes wrong types and numbers."""
    with pytest.raises(error, match=f"^RecurrentCache(.new)?: {sentence}"):
        make()


LAYERS = [
    ({"num_slots": 5}, ValueError, "'b' must have 4 slots with records of 3 rows as the layers before, got 5 and 3"),
    ({"max_window": 2}, ValueError, "'b' must have 4 slots with records of 3 rows as the layers before, got 4 and 2"),
    ({"device": "meta"}, TypeError, "register_layer: cache of 'b' must be on device cpu, got meta"),
    ({"key_size": 128, "value_size": 128, "chunk": 16}, ValueError, "must have the chunk of the layers before, 0, got"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "error", "sentence"), LAYERS)
def test_layers_that_do_not_match(sizes, error, sentence):
    states = new_states()
    states.register_layer("a", new_cache())
    with pytest.raises(error, match=sentence):
        states.register_layer("b", new_cache(**sizes))
    with pytest.raises(ValueError, match="register_layer: name must be new, 'a' is registered already"):
        states.register_layer("a", new_cache())
    with pytest.raises(TypeError, match="register_layer: cache must be a RecurrentCache, got"):
        states.register_layer("b", new_cache().state)
    with pytest.raises(TypeError, match="register_layer: name must be a string, got 3"):
        states.register_layer(3, new_cache())
    assert list(states._layers) == ["a"]
    states.allocate()


def test_other_strides_take_another_launch():
    states, cache = new_states(), new_cache()
    memory = torch.zeros(4, 3, 64, 64)
    spaced = memory[:, :2]
    states.register_layer("a", cache)
    states.register_layer("b", RecurrentCache(spaced, *new_cache().records))
    states.allocate()
    for state in (cache.state, spaced):
        state[1].normal_()
    states.copy(int32(1), int32(2))
    for state in (cache.state, spaced):
        assert torch.equal(state[2], state[1])
        assert state[1].count_nonzero() > 0
        assert state[[0, 3]].count_nonzero() == 0
    assert memory[:, 2].count_nonzero() == 0  # padding


def sharing(what: str) -> dict[str, RecurrentCache]:
    a, b = new_cache(), new_cache()
    if what == "one cache":
        return {"a": a, "b": a}
    memory = torch.zeros(a.state.numel() + b.record_updates.numel())
    within = memory[100:][: b.record_updates.numel()].view_as(b.record_updates)
    if what == "a state and another's record":
        return {"a": RecurrentCache(memory[: a.state.numel()].view_as(a.state), *a.records),
                "b": RecurrentCache(b.state, *b.records[:3], within)}  # fmt: skip
    assert what == "records of one layer"
    norms = memory[: a.record_norms.numel()].view_as(a.record_norms)
    decays = memory[norms.numel() - 1 :][: a.record_decays.numel()].view_as(a.record_decays)
    return {"a": RecurrentCache(a.state, a.record_keys, norms, decays, a.record_updates)}


SHARED = {
    "one cache": ("of 'a'", "of 'b'"),
    "a state and another's record": ("state of 'a'", "record_updates of 'b'"),
    "records of one layer": ("record_norms of 'a'", "record_decays of 'a'"),
}


@pytest.mark.parametrize("what", SHARED)
def test_layers_that_share_memory_are_refused(what):
    states = new_states()
    for name, cache in sharing(what).items():
        states.register_layer(name, cache)
    with pytest.raises(ValueError, match=r"^allocate: .* must not share memory") as caught:
        states.allocate()
    assert all(name in str(caught.value) for name in SHARED[what])
    assert states.state is State.REGISTERING
