"""Mode stage, as far as it differs from cow.

Blocks are withheld from the scheduler, no writer is patched, and the audit compares several times per step.
test_engine.py and test_plugin.py cover what both modes share.
"""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_checks import STAGE, check_transaction, check_vllm_counts
from engines import Engines, prompts
from packed_rows import write_rows
from torch import Tensor

from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.audit.cache import AuditError, CacheAudit
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.layers.back_ends import PACKED_IMPLS, TRITON_IMPL, check_tables
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks, shadow_blocks

[FLASHINFER_IMPL] = [impl for impl in PACKED_IMPLS if "flashinfer" in impl]
BLOCKS, SIZE, HEADS, WIDTH = 6, 4, 2, 8  # block size of the caches in this file


def test_without_an_audit_no_writer_is_patched(engines: Engines) -> None:
    vanilla, ours = engines.pair(prompts(8), {"mode": "stage"})
    assert ours["tokens"] == vanilla["tokens"]
    assert not any(layer["wrapped"] for layer in ours["layers"].values())
    assert ours["session"]["stats"]["rejected"] > 0
    assert ours["session"]["vanilla_steps"] == {}


def test_a_model_that_writes_its_cache_itself(engines: Engines) -> None:
    """Its attention writes inside its forward, at the group's slots, and calls no writer of a layer. The rows are still
    staged."""
    vanilla, ours = engines.pair(prompts(12), STAGE, own_writer=True)
    assert ours["tokens"] == vanilla["tokens"]
    assert ours["own_writes"] == vanilla["own_writes"] > 0
    check_transaction(ours)
    check_vllm_counts(ours)


def test_a_cache_that_is_just_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result must not depend on rounding: blocks / (blocks / 10) is above 10 for some numbers."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(
        kv_cache_utils, "get_max_concurrency_for_kv_cache_config", lambda _, cache: cache.num_blocks / needed
    )
    vllm_config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
        model_config=SimpleNamespace(max_model_len=256),
    )
    for needed in range(1, 200):
        cache = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))],
            num_blocks=needed + 2,  # a shadow page, and the null block
            kv_cache_tensors=[],
        )
        assert shadow_blocks(vllm_config, cache).first == needed + 1
        cache.num_blocks -= 1
        with pytest.raises(Unsupported, match=f"a request of 256 tokens needs {needed}:"):
            shadow_blocks(vllm_config, cache)


@pytest.mark.parametrize("groups", [1, 2])
def test_block_bytes_equal_vllms_allocation(groups: int) -> None:
    """vLLM has one tensor per group, and each has the size of the whole allocation, because groups share memory."""
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    page = {"block_size": 16, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.bfloat16}
    specs = (
        kv_cache_interface.FullAttentionSpec(**page),
        kv_cache_interface.SlidingWindowSpec(**page, sliding_window=64),
    )
    kv_cache_groups = [
        kv_cache_interface.KVCacheGroupSpec([f"{group}.{layer}" for layer in range(3)], spec)
        for group, spec in enumerate(specs[:groups])
    ]
    vllm_config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=256),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        max_in_flight_tokens=512,
    )
    cache = get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory=1 << 20)
    assert len(cache.kv_cache_tensors) == groups
    allocated = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBHNC)["0.0"].untyped_storage().nbytes()
    shadow = shadow_blocks(vllm_config, cache)
    assert shadow.block_bytes * cache.num_blocks == allocated
    withheld = 8 * groups / cache.num_blocks * allocated / 2**20  # 4 requests, each with a tail page and one more
    assert f"{withheld:.1f} MiB) are shadow pages" in shadow.describe()


def test_refused_engine_keeps_all_blocks(engines: Engines) -> None:
    """With on_unsupported="vanilla": 4 concurrent requests need blocks that mode stage would have withheld."""
    nwor = {"mode": "stage", "on_unsupported": "vanilla"}
    result = engines.run(prompts(4), nwor=nwor, num_gpu_blocks_override=17, max_model_len=512, max_tokens=8)
    assert result["session"] is None
    assert result["metrics"]["num_preemptions"] == 0


@pytest.mark.parametrize(
    ("target", "drafter", "borrows", "refused"),
    [
        (TRITON_IMPL, TRITON_IMPL, True, None),
        (FLASHINFER_IMPL, FLASHINFER_IMPL, True, FLASHINFER_IMPL),
        (TRITON_IMPL, FLASHINFER_IMPL, True, FLASHINFER_IMPL),
        (TRITON_IMPL, FLASHINFER_IMPL, False, None),
    ],
)
def test_drafter_with_copied_table_is_refused(target: str, drafter: str, borrows: bool, refused: str | None) -> None:
    """Its back end may differ from the target's (``attention_backend`` of the speculative configuration)."""

    def attention(impl: str) -> Any:
        module, _, name = impl.rpartition(".")
        return SimpleNamespace(impl=type(name, (), {"__module__": module})())

    cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * WIDTH)
    layers = [TargetLayer("target", "0", cache, LayerCache.packed(cache), write_rows)]
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=SIZE))
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"target": attention(target), "draft": attention(drafter)}
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        speculative_config=SimpleNamespace(method="eagle"),
    )
    borrowers = {"draft"} if borrows else set()
    if refused is None:
        check_tables(runner, layers, borrowers)
        return
    with pytest.raises(
        Unsupported, match=rf"speculation by eagle with back end {refused} .*the runner's own block table"
    ):
        check_tables(runner, layers, borrowers)


def test_shadow_page_in_request_is_error() -> None:
    shadow = ShadowBlocks(num_blocks=20, groups=(0, 1), per_group=4, block_bytes=1)
    assert (shadow.first, shadow.of_group(0), shadow.of_group(1)) == (12, range(12, 16), range(16, 20))

    def output(new: Any = (), more: Any = ()) -> Any:
        requests = [SimpleNamespace(block_ids=blocks) for blocks in new]
        return SimpleNamespace(
            scheduled_new_reqs=requests, scheduled_cached_reqs=SimpleNamespace(new_block_ids=list(more))
        )

    shadow.check(output([([1, 11], [])], [None, ([], [11])]))
    for wrong in (output([([1], [2, 12])]), output(more=[None, ([19],)])):
        with pytest.raises(RuntimeError, match=r"gave block (12|19) to a request, but blocks 12 and above are shadow"):
            shadow.check(wrong)


class WarmedRunner:
    """The parts of a V2 runner that vLLM's warm-up uses: 8 requests of up to 4 drafts, blocks of 16."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
        self.kv_cache_config = SimpleNamespace(
            num_blocks=num_blocks, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], kv_cache_tensors=[]
        )
        self.vllm_config = SimpleNamespace(is_mm_encoder_only=False, num_lookahead_tokens=4)
        self.scheduler_config = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512)
        self.model_config = self.speculative_config = self.model_state = SimpleNamespace()
        self.kv_connector = SimpleNamespace(set_disabled=lambda disabled: None)
        self.max_num_reqs, self.max_model_len = 8, 256
        self.num_speculative_steps, self.decode_query_len = 4, 5
        self.adaptive_verification = self.rejection_sampler = self.kv_block_zeroer = self.block_tables = None
        self.is_pooling_model = self.is_encoder_decoder = self.is_last_pp_rank = False


@pytest.mark.parametrize("warm_up", ["warmup_kernels", "run_mixed_prefill_decode_warmup"])
def test_vllms_warm_up_uses_no_shadow_page(
    warm_up: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warm-up invents requests and allocates all blocks of the runner's cache itself, without a scheduler.

    An audit of its steps is logged.
    """
    from vllm.v1.worker.gpu import warmup

    from nwor_ops.vllm import plugin

    original = inspect.unwrap(getattr(warmup, warm_up), stop=lambda function: not hasattr(function, "_nwor_patch"))
    monkeypatch.setattr(warmup, warm_up, plugin._warming(original))  # an engine of an earlier test left its patch
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    arguments = (lambda output: shadow.check(output), lambda grammar: None)
    if warm_up != "warmup_kernels":
        arguments += (128,)
    shadow = ShadowBlocks(num_blocks=26, groups=(0,), per_group=16, block_bytes=1)
    runner = WarmedRunner(shadow.num_blocks)
    whole = runner.kv_cache_config
    with pytest.raises(RuntimeError, match=r"the scheduler gave block 1\d to a request"):
        getattr(warmup, warm_up)(runner, *arguments)
    audit = CacheAudit([], max_num_tokens=512)
    monkeypatch.setitem(plugin._sessions, runner, SimpleNamespace(shadow_blocks=shadow, listeners=(audit,)))
    monkeypatch.setattr(plugin, "vllm_logger", logging.getLogger)
    with caplog.at_level(logging.INFO):
        getattr(warmup, warm_up)(runner, *arguments)
    told = "nwor: vLLM's warm-up was audited, 0 steps with drafts"
    said = [message for message in caplog.messages if message.startswith("nwor")]
    assert said == ([told] if warm_up == "warmup_kernels" else [])
    assert runner.kv_cache_config is whole
    assert whole.num_blocks == 26


# ---------------------------------------------------------------- the audit without an engine

SHADOW = range(4, 6)
OWN = torch.tensor([2, 6, 7, 8])  # a prompt token of another request; then a token and its two drafts
REDIRECTED = torch.tensor([2, 18, 19, 20])
ROWS = torch.arange(2.0 * 4 * HEADS * WIDTH).view(2, 4, HEADS, WIDTH) + 2


class Step:
    """A step of one layer, correct except for what a test changes. The second draft is rejected."""

    def __init__(self, recorded: bool = True) -> None:
        self.cache = torch.ones(BLOCKS, SIZE, HEADS, 2 * WIDTH)
        layer = TargetLayer("layer", "0", self.cache, LayerCache.packed(self.cache), write_rows)
        self.audit = CacheAudit([layer], 8, shadow_blocks={"0": SHADOW})
        self.recorded = recorded

    def row(self, slot: int) -> Tensor:
        return self.cache[slot // SIZE, slot % SIZE]

    def begin(self, redirected: Tensor = REDIRECTED) -> None:
        self.audit.begin([0, 1, 4], [0, 2], {"0": OWN})
        self.cache[4, :2] = self.cache[1, :2]
        self.audit.opened({"0": redirected})

    def forward(self) -> None:
        """Begin the step and run its layer."""
        self.begin()
        if self.recorded:
            self.audit.record("layer", *ROWS, REDIRECTED, 0, ())
        write_rows(*ROWS, self.cache, REDIRECTED)
        self.row(21)[:] = 7  # other contents of a shadow page do not matter

    def commit(self) -> None:
        for own, shadow in zip((6, 7), (18, 19), strict=True):
            self.row(own)[:] = self.row(shadow)

    def compare(self) -> None:
        self.audit.commit(lambda: [1, 2], undone=True)

    def whole(self) -> None:
        self.forward()
        self.audit.forwarded("after the forward")
        self.audit.forwarded("before sampling")
        self.commit()
        self.compare()


@pytest.mark.parametrize("recorded", [True, False])
def test_a_step_as_it_should_be(recorded: bool) -> None:
    step = Step(recorded)
    step.whole()
    summary = step.audit.summary()
    counted = {name: summary[name] for name in ("drafted", "accepted", "rejected", "stale_rows")}
    assert counted == {"drafted": 2, "accepted": 1, "rejected": 1, "stale_rows": 0}
    assert (summary["moments"], summary["tail_rows"]) == (2, 2 * 2)  # slots 4 and 5, in both comparisons


@pytest.mark.parametrize("is_abandoned", [True, False])
def test_vanilla_step_ignores_shadow_pages(is_abandoned: bool) -> None:
    """A begin that failed may have copied committed rows there. A window may be abandoned before the forward."""
    step = Step()
    step.audit.begin([0, 1, 4], [0, 2], {"0": OWN})
    step.row(21)[:] = 7
    if is_abandoned:
        step.audit.opened({"0": REDIRECTED})
        step.audit.abandoned()
    step.audit.record("layer", *ROWS, OWN, 0, ())
    write_rows(*ROWS, step.cache, OWN)
    step.audit.forwarded("before sampling")
    step.audit.commit(lambda: [1, 3], undone=False)
    assert step.audit.summary()["steps"] == 1


@pytest.mark.parametrize("slot", [8, 16, 12])
def test_a_draft_that_is_not_redirected_is_found(slot: int) -> None:
    """The draft stays at its own slot, or goes to a page that is not a shadow page of its group.

    Block 3 is free; 4 and 5 are shadow pages.
    """
    redirected = REDIRECTED.clone()
    redirected[3] = slot
    step = Step()
    if slot == 16:
        step.begin(redirected)
        return
    with pytest.raises(AuditError, match=rf"the slots of these tokens must be in blocks 4 to 5: {slot} \(token 3\)"):
        step.begin(redirected)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("slot", [7, 8, 12])
def test_draft_in_request_page_is_found(slot: int, recorded: bool) -> None:
    """This includes an accepted draft's row, because acceptance is not known yet, and a page that does not belong to
    the step."""
    step = Step(recorded)
    step.forward()
    step.audit.forwarded("after the forward")
    step.row(slot)[0, 0] = 5
    with pytest.raises(AuditError, match=r"before sampling, .*bytes differ from the expected ones"):
        step.audit.forwarded("before sampling")


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("slot", "message"), [(8, "rejected drafts of group 0 left their rows in slots 8"), (7, "bytes")]
)
def test_wrong_copy_of_commit_is_found(slot: int, message: str, recorded: bool) -> None:
    step = Step(recorded)
    step.forward()
    step.audit.forwarded("before sampling")
    step.commit()
    step.row(slot)[0, 0] = 5
    with pytest.raises(AuditError, match=message):
        step.compare()


@pytest.mark.parametrize("recorded", [True, False])
def test_a_commit_that_forgets_a_row_is_found(recorded: bool) -> None:
    step = Step(recorded)
    step.forward()
    step.audit.forwarded("before sampling")
    with pytest.raises(AuditError, match=r"in layer layer slots 6 \(token 1\), 7 \(token 2\)"):
        step.compare()


@pytest.mark.parametrize("recorded", [True, False])
def test_shadow_page_without_committed_rows_is_found(recorded: bool) -> None:
    """Attention reads these rows there. Slot 5 is the last of them."""
    step = Step(recorded)
    step.forward()
    step.row(17)[1, 3] = 5
    message = r"after the forward, .* in layer layer attention .* 1 slots: 5 \(found at 17\)"
    with pytest.raises(AuditError, match=message):
        step.audit.forwarded("after the forward")


def test_wrong_row_in_shadow_page_is_found() -> None:
    """The copied row differs from what vLLM's own writer would have written."""
    step = Step()
    step.forward()
    step.row(19)[0, 0] = 5
    step.audit.forwarded("before sampling")
    step.commit()
    with pytest.raises(AuditError, match=r"in layer layer slots 7 \(token 2\)"):
        step.compare()


@pytest.mark.parametrize("earlier", ["nothing", "a step"])
def test_layer_unreached_by_failed_forward(earlier: str) -> None:
    """Cancel copies the contents of the shadow page, whatever they are: these slots may hold anything."""
    step = Step()
    if earlier == "a step":
        step.whole()
    step.begin()
    step.row(18)[:] = 3
    step.row(6)[:] = step.row(18)
    step.audit.commit(None, undone=True)
    step.begin()
    step.row(7)[:] = 3
    with pytest.raises(AuditError, match="rejected drafts of group 0 left their rows in slots 7"):
        step.audit.commit(None, undone=True)


@pytest.mark.parametrize("is_right", [True, False])
def test_wrong_row_of_cancel_is_found(is_right: bool) -> None:
    """Cancel copies the row of the given token, for which the layer's writer was called."""
    step = Step()
    step.forward()
    if is_right:
        step.row(6)[:] = step.row(18)
        step.audit.commit(None, undone=True)
        return
    with pytest.raises(AuditError, match=r"in layer layer slots 6 \(token 1\)"):
        step.audit.commit(None, undone=True)
