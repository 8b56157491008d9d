"""Test the declared contract: schemas, kernels and fakes of every op, and the results of opcheck."""

from __future__ import annotations

import pickle
import re
import textwrap

import pytest
import torch
from expecttest import assert_expected_inline
from processes import ROOT
from torch.utils._pytree import tree_leaves, tree_map

from nwor_ops import ops
from nwor_ops.meta import SPECS
from nwor_ops.ops import registry
from nwor_ops.testing import samples
from nwor_ops.testing.layouts import memory, twin
from nwor_ops.testing.samples import argument_names, ops_of

OPS = tuple(registry.OPS)
RETURNING = ("acceptance_mask", "acceptance_mask_from_rejected")


def overload(op):
    return getattr(torch.ops.nwor, op).default


def test_schema_table():
    """Compiled graphs of users hold these schemas. Change one only under a new name (EXPECTTEST_ACCEPT=1 rewrites)."""
    schemas = [str(overload(op)._schema) for op in OPS]
    table = "\n".join(textwrap.fill(schema, 100, subsequent_indent="    ") for schema in schemas)
    assert_expected_inline(table, """\
nwor::plan_window(Tensor query_start_loc, Tensor cu_num_draft_tokens, Tensor[] slot_mappings,
    Tensor(a!) log_rows, Tensor(b!) row_slots, Tensor(c!) row_requests, Tensor(d!) row_positions,
    Tensor(e!) counters, Tensor(f!) draft_start_loc, int? token_offset=None, int num_bonus_tokens=0,
    bool leading_zero=False) -> ()
nwor::acceptance_mask(Tensor draft_token_ids, Tensor sampled_token_ids, Tensor draft_start_loc) ->
    (Tensor accepted, Tensor num_accepted)
nwor::acceptance_mask_from_rejected(Tensor num_rejected, Tensor draft_start_loc, int
    num_draft_tokens) -> (Tensor accepted, Tensor num_accepted)
nwor::reject_rows(Tensor draft_token_ids, Tensor sampled_token_ids, Tensor draft_start_loc,
    Tensor(a!) row_rejected, Tensor(b!) num_accepted, Tensor(c!) counters) -> ()
nwor::reject_rows_from_rejected(Tensor num_rejected, Tensor draft_start_loc, Tensor(a!)
    row_rejected, Tensor(b!) num_accepted, Tensor(c!) counters) -> ()
nwor::prepare_prefill_inputs(Tensor target_input_ids, Tensor target_positions, Tensor
    target_query_start_loc, Tensor target_seq_lens, Tensor idx_mapping, Tensor num_sampled, Tensor
    num_rejected, Tensor last_sampled, Tensor next_prefill_tokens, Tensor(a!) input_ids, Tensor(b!)
    positions, Tensor(c!) query_start_loc, Tensor(d!) seq_lens, Tensor(e!) last_token_indices,
    Tensor(f!) current_draft_step) -> ()
nwor::prepare_decode_inputs(Tensor draft_tokens, Tensor target_seq_lens, Tensor num_rejected,
    Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) query_start_loc, Tensor(d!) seq_lens, int
    max_model_len, Tensor? idx_mapping=None, Tensor(e!)? sample_positions=None, bool
    advance_positions=True) -> ()
nwor::update_draft_inputs(Tensor sampled, Tensor current_draft_step, Tensor(a!) draft_tokens,
    Tensor(b!) input_ids, Tensor(c!) positions, Tensor(d!) seq_lens, int num_speculative_steps, int
    max_model_len, Tensor? idx_mapping=None, Tensor? hidden_states=None, Tensor(e!)?
    next_hidden_states=None, Tensor(f!)? sample_positions=None, bool advance_positions=True) -> ()
nwor::compute_slot_mappings(Tensor idx_mapping, Tensor query_start_loc, Tensor positions, Tensor[]
    block_tables, int[] block_sizes, Tensor(a!) slot_mappings, int cp_size=1, int cp_rank=0, int
    cp_interleave=1, Tensor? cp_sharded=None) -> ()
nwor::eagle_step(Tensor positions, Tensor block_table, Tensor(a!) seq_lens, Tensor(b!)
    new_positions, Tensor(c!) slot_mapping, int block_size, int max_model_len) -> ()
nwor::prepare_inputs_padded(Tensor cu_num_draft_tokens, Tensor valid_sampled_count, Tensor
    query_start_loc, Tensor(a!) token_indices_to_sample, Tensor(b!) num_rejected, Tensor?
    discarded=None) -> ()
nwor::prepare_next_token_padded(Tensor sampled_token_ids, Tensor discarded, Tensor
    backup_next_token_ids, Tensor(a!) next_token_ids, Tensor(b!) valid_sampled_count, int
    vocab_size) -> ()
nwor::gumbel_sample(Tensor logits, Tensor idx_mapping, Tensor temperature, Tensor seeds, Tensor
    positions, Tensor step, Tensor(a!) sampled, Tensor(b!)? logits_cache=None, Tensor(c!)?
    workspace=None) -> ()
nwor::copy_expand_inputs(Tensor target_input_ids, Tensor target_positions, Tensor
    target_query_start_loc, Tensor num_rejected, Tensor next_token_ids, Tensor(a!) input_ids,
    Tensor(b!) positions, Tensor(c!) is_rejected, Tensor(d!) is_masked, Tensor(e!)
    new_token_indices, int num_new_tokens=1, int padding_token_id=0, int mask_token_id=0, bool
    shift_input_ids=False, int? max_model_len=None, Tensor? idx_mapping=None, Tensor(f!)?
    hidden_state_mapping=None) -> ()
nwor::extend_queries(Tensor target_query_start_loc, Tensor target_seq_lens, Tensor positions, Tensor
    is_rejected, Tensor block_table, Tensor(a!) query_start_loc, Tensor(b!) seq_lens, Tensor(c!)
    slot_mapping, int block_size, int max_model_len, int num_new_tokens=1, Tensor? idx_mapping=None)
    -> ()
nwor::dcp_local_seq_lens(Tensor seq_lens, Tensor(a!) local_seq_lens, int dcp_size, int dcp_rank, int
    cp_interleave=1) -> ()
nwor::gather_step_tokens(Tensor input_ids, Tensor query_start_loc, Tensor cu_num_logits, Tensor
    idx_mapping, Tensor num_sampled, Tensor last_sampled, Tensor(a!) sampled_tokens, Tensor(b!)
    context_tokens) -> ()
nwor::update_draft_vocabulary(Tensor sampled_tokens, Tensor head, Tensor(a!) token_ids, Tensor(b!)
    row_of_token, Tensor(c!) weight, Tensor(d!) used, Tensor(e!) hand, Tensor(f!) counters, Tensor?
    prompt_tokens=None, int first_token=0) -> ()
nwor::argmax_draft_tokens(Tensor logits, Tensor token_ids, Tensor(a!) tokens, Tensor(b!)?
    values=None) -> ()
nwor::expand_draft_logits(Tensor logits, Tensor row_of_token, Tensor(a!) out) -> ()
nwor::plan_recurrent_window(Tensor(a!) plan, Tensor(b!) cursors, Tensor(c!) window_id, Tensor
    state_slots, Tensor query_start_loc, Tensor num_kept, int record_rows, Tensor? is_window=None,
    Tensor(d!)? num_skipped=None, int chunk=0) -> ()
nwor::plan_recurrent_fold(Tensor(a!) plan, Tensor(b!) cursors, Tensor source_slots, Tensor
    target_slots, Tensor num_rows, bool keep_source=False) -> ()
nwor::plan_recurrent_block_fold(Tensor(a!) plan, Tensor(b!) cursors, Tensor[] block_tables, Tensor
    idx_mapping, Tensor source_columns, Tensor num_kept, Tensor? target_columns=None, Tensor?
    num_computed_tokens=None, int block_size=0, bool moves_rows=False, Tensor(c!)? num_skipped=None)
    -> ()
nwor::gated_delta_verify(Tensor(a!) out, Tensor(b!) state, Tensor(c!) record_keys, Tensor(d!)
    record_norms, Tensor(e!) record_decays, Tensor(f!) record_updates, Tensor(g!) layer_window,
    Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, Tensor plan,
    Tensor window_id, Tensor query_start_loc, float scale, float softplus_beta=1., float
    softplus_threshold=20., bool use_qk_l2norm=True, Tensor? gate=None, Tensor? norm_weight=None,
    float norm_eps=1.0000000000000001e-05, str gate_activation="silu", Tensor(h!)? all_states=None,
    bool allow_neg_eigval=False, float? gate_lower_bound=None, int chunk=0) -> ()
nwor::gated_delta_fold(Tensor(a!)[] states, Tensor[] record_keys, Tensor[] record_norms, Tensor[]
    record_decays, Tensor[] record_updates, Tensor(b!)[] layer_windows, Tensor plan, Tensor?
    window_id=None, int chunk=0) -> ()
nwor::open_window(Tensor(a!)[] caches, int[] planes_per_group, Tensor query_start_loc, Tensor
    draft_start_loc, Tensor seq_lens, Tensor row_slots, Tensor shadow_blocks, Tensor(b!)[]
    slot_mappings, Tensor(c!)[] block_tables, Tensor(d!) saved_slots, Tensor(e!) tail_pages, Tensor?
    idx_mapping=None, Tensor(f!)? held_slots=None, Tensor? page_offsets=None, Tensor?
    plane_table=None) -> ()
nwor::close_window(Tensor(a!)[] caches, int[] planes_per_group, Tensor query_start_loc, Tensor
    draft_start_loc, Tensor row_rejected, Tensor shadow_blocks, Tensor saved_slots, Tensor
    tail_pages, Tensor(b!)[] slot_mappings, Tensor(c!)[] block_tables, Tensor? idx_mapping=None,
    Tensor(d!)? held_slots=None, Tensor? page_offsets=None, Tensor? plane_table=None) -> ()
nwor::close_window_from_rejected(Tensor(a!)[] caches, int[] planes_per_group, Tensor
    query_start_loc, Tensor draft_start_loc, Tensor num_rejected, Tensor(b!) row_rejected,
    Tensor(c!) num_accepted, Tensor(d!) counters, Tensor shadow_blocks, Tensor saved_slots, Tensor
    tail_pages, Tensor(e!)[] slot_mappings, Tensor(f!)[] block_tables, Tensor? idx_mapping=None,
    Tensor(g!)? held_slots=None, Tensor? page_offsets=None, Tensor? plane_table=None) -> ()
nwor::stage_kv(Tensor key, Tensor value, Tensor stage_rows, Tensor(a!) staged_key, Tensor(b!)
    staged_value, Tensor? window_id=None, Tensor(c!)? row_windows=None) -> ()
nwor::accept_staged(Tensor row_accepted, Tensor row_slots, Tensor window_id, Tensor row_windows, int
    num_slots, Tensor(a!) row_committed, Tensor(b!) counters, Tensor? row_requests=None, Tensor?
    row_positions=None) -> ()
nwor::commit_staged(Tensor staged_key, Tensor staged_value, Tensor row_slots, Tensor row_accepted,
    Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor k_scale, Tensor v_scale, str
    kv_cache_dtype, Tensor? row_requests=None, Tensor? row_positions=None) -> ()
nwor::move_slots(Tensor(a!)[] caches, Tensor src_slots, Tensor dst_slots, Tensor? page_offsets=None)
    -> ()
nwor::write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor
    slot_mapping, Tensor k_scale, Tensor v_scale, str kv_cache_dtype) -> ()
nwor::write_kv_logged(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor
    slot_mapping, Tensor k_scale, Tensor v_scale, str kv_cache_dtype, Tensor log_rows, Tensor(c!)
    key_log, Tensor(d!) value_log, Tensor? window_id=None, Tensor(e!)? row_windows=None) -> ()
nwor::log_slots(Tensor cache, Tensor slot_mapping, Tensor log_rows, Tensor(a!) log, Tensor?
    page_offsets=None, Tensor? window_id=None, Tensor(b!)? row_windows=None) -> ()
nwor::restore_slots(Tensor(a!)[] caches, Tensor log, Tensor row_slots, Tensor row_rejected, Tensor?
    page_offsets=None, Tensor? window_id=None, Tensor? row_windows=None, int? num_rows=None, Tensor?
    plane_table=None) -> ()
nwor::restore_slots_from_rejected(Tensor(a!)[] caches, Tensor log, Tensor row_slots, Tensor
    num_rejected, Tensor draft_start_loc, Tensor(b!) row_rejected, Tensor(c!) num_accepted,
    Tensor(d!) counters, Tensor? page_offsets=None, Tensor? window_id=None, Tensor?
    row_windows=None, int? num_rows=None, Tensor? plane_table=None) -> ()""")  # fmt: skip


def test_every_op_is_documented_and_exported():
    import nwor_ops

    for op in OPS:
        wrapper = getattr(ops, op)
        assert wrapper.__doc__
        assert getattr(nwor_ops, op) is wrapper


@pytest.mark.parametrize("op", OPS)
def test_wrapper_takes_the_arguments_of_the_schema(op):
    """Function and op have the same names, order and defaults, so a call can use either."""
    import inspect

    parameters = inspect.signature(getattr(ops, op)).parameters.values()
    arguments = overload(op)._schema.arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        default = None if parameter.default is parameter.empty else parameter.default
        assert default == argument.default_value


@pytest.mark.parametrize("op", OPS)
def test_call_by_names(op):
    """Every argument can be passed by name, with the same result. A pickled function is found again."""
    arguments = samples.calls(op, 1)[0]
    ours = twin(arguments)
    getattr(ops, op)(*arguments)
    getattr(ops, op)(**dict(zip(argument_names(op), ours, strict=False)))
    assert all(torch.equal(a, b) for a, b in zip(memory(arguments), memory(ours), strict=True))
    assert pickle.loads(pickle.dumps(getattr(ops, op))) is getattr(ops, op)


@pytest.mark.parametrize("op", OPS)
def test_call_that_does_not_fit_the_signature(op):
    first, *rest = argument_names(op)
    arguments = samples.calls(op, 1)[0]
    with pytest.raises(TypeError, match=f"^{op}: missing a required argument: '{rest[0]}'$"):
        getattr(ops, op)(arguments[0])
    with pytest.raises(TypeError, match=f"^{op}: got an unexpected keyword argument 'drafts'$"):
        getattr(ops, op)(*arguments, drafts=1)
    with pytest.raises(TypeError, match=f"^{op}: multiple values for argument '{first}'$"):
        getattr(ops, op)(*arguments, **{first: arguments[0]})


@pytest.mark.parametrize("key", ["CPU", "Meta"])
@pytest.mark.parametrize("op", OPS)
def test_kernel_and_fake_are_registered(op, key):
    """opcheck does not notice a missing fake of an op that returns nothing. This test does."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"nwor::{op}", key)


@pytest.mark.parametrize("op", OPS)
def test_tag_and_results(op):
    assert torch.Tag.pt2_compliant_tag in overload(op).tags
    returns = overload(op)._schema.returns
    assert len(returns) == (2 if op in RETURNING else 0)
    assert all(r.alias_info is None for r in returns)


def test_counters_have_the_order_of_the_kernels():
    """`COUNTERS` has the order of the enum in csrc/accept.h."""
    source = (ROOT / "csrc" / "accept.h").read_text()
    names = re.search(r"enum Counter \{([^}]*)\}", source).group(1).split(",")
    assert [name.strip() for name in names] == [
        *(f"k{name.capitalize()}" for name in ops.COUNTERS),
        "kNumCounters",
    ]


@pytest.mark.parametrize("op", [op for op in OPS if op not in ops_of("recurrent")])
def test_shapes_in_csrc_are_those_of_meta(op):
    """Comments on the parameters of an op's check show the shape of each tensor, and which tensors are written."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*.h")))
    check = re.search(rf"NWOR_(?:BINDABLE_)?OP\(m, {op}, (\w+)\)", source)[1]
    parameters = re.search(rf"\b{check}\(\s*const char\* op,(.*?)\) {{\n", source, re.DOTALL)[1]
    notes = dict(re.findall(r"(\w+),?\s*// (.+)", parameters))
    for argument in overload(op)._schema.arguments:
        spec = SPECS[op].get(argument.name)
        if spec is None or not spec.shape:
            continue
        note = notes.pop(argument.name)
        assert all(shape in note for shape in re.findall(r"\[.*?\]", spec.shape)), note
        assert note.endswith("written") == (argument.alias_info is not None), note
    assert set(notes) <= {"k_scale", "v_scale", "plane_table"}


@pytest.mark.parametrize("op", OPS)
def test_opcheck(device, op):
    """All utilities: schema, autograd registration, fake tensor, AOT dispatch with dynamic shapes."""
    for arguments in samples.calls(op, 4, device):
        utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if any(isinstance(a, torch.Tensor) and "float8" in str(a.dtype) for a in tree_leaves(arguments)):
            utilities.remove("test_schema")  # it cannot compare tensors of these dtypes
        torch.library.opcheck(overload(op), arguments, test_utils=utilities)


@pytest.mark.parametrize("op", OPS)
def test_exactly_declared_arguments_are_written(device, op):
    """No check of torch finds an argument that is declared as mutated and never written."""
    written = set()
    declared = overload(op)._schema.arguments
    for arguments in samples.calls(op, 12, device):
        before = twin(arguments)
        getattr(ops, op)(*arguments)
        for argument, now, then in zip(declared, arguments, before, strict=False):
            if now is not None and not all(map(torch.equal, memory([now]), memory([then]))):
                written.add(argument.name)
    mutated = {argument.name for argument in declared if argument.alias_info is not None}
    assert written == mutated - {"workspace"}  # it is 0 again after the call


@pytest.mark.parametrize("op", OPS)
def test_meta(op):
    """Every op runs on `device="meta"` and returns the right shapes and dtypes."""
    for arguments in samples.calls(op, 4):
        result = getattr(ops, op)(*twin(arguments, "meta"))
        expected = getattr(ops, op)(*arguments)
        if op in RETURNING:
            assert [(r.device.type, r.dtype, r.shape) for r in result] == [("meta", e.dtype, e.shape) for e in expected]
        else:
            assert result is None


@pytest.mark.parametrize("op", OPS)
def test_results_own_their_memory(op):
    """The results of an op are new tensors. A caller may write to them without changing an argument."""
    arguments = samples.calls(op, 1)[0]
    if op not in RETURNING:
        assert getattr(ops, op)(*arguments) is None
        return
    before = twin(arguments)
    tree_map(lambda result: result.fill_(1), getattr(ops, op)(*arguments))
    assert all(torch.equal(a, b) for a, b in zip(memory(arguments), memory(before), strict=True))
