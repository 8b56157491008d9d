"""A KV connector that exports every page of every running request, partial tail pages included.

It exports at every time at which vLLM permits this, and counts rows of rejected drafts, and valid rows that are
missing. It reads the pages at which the scheduler says that a request's tokens are. Nothing of this library is used
except the position of a slot. After sampling, the sampler tells which drafts were rejected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from engine_faults import is_v2
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.forward_context import get_forward_context

MOMENTS = ("attention", "forward", "save", "end")


@dataclass
class Running(KVConnectorMetadata):
    """A request in a step: its blocks, and the number of its computed tokens."""

    requests: dict[str, tuple[list[int], int]] = field(default_factory=dict)


@dataclass
class Request:
    """One request in one step."""

    name: str
    slots: Tensor  # slots of all its pages, in the order of its tokens
    scheduled: int
    length: int  # number of tokens, including those of this step
    rejected: int = 0
    before: dict[str, Tensor] = field(default_factory=dict)
    exported: list[tuple[str, str, Tensor]] = field(default_factory=list)  # event, layer, rows

    @property
    def valid(self) -> int:
        return self.length - self.rejected


class Exports:
    """Everything that one runner's connector exported.

    Args:
        runner: a model runner of either generation, with the plugin's patches. They are patched again.
        session: the plugin's session, which knows the position of a slot.

    Attributes:
        counts: by event, the number of rows, of rows with a draft that was (or is then) rejected, and of valid rows
            that differ from the cache at the request's end.
        shadow_slots: how often the arguments of a layer named a slot of a shadow page.
    """

    def __init__(self, runner: Any, session: Any) -> None:
        self.counts: dict[str, Counter[str]] = {moment: Counter() for moment in MOMENTS}
        self.shadow_slots = 0
        self._session = session
        self._layers = {layer.name: layer for layer in session.layers.values()}
        self._lengths: dict[str, Tensor] = {}
        self._requests: list[Request] = []
        self._last: dict[str, Request] = {}
        self._kept: dict[str, list[tuple[str, str, Tensor]]] = {}
        view = next(iter(self._layers.values())).cache.planes[0].view
        self._device, self._block_size = view.device, view.shape[1]
        v2 = is_v2(runner)
        self._wrap(runner, "prepare_attn" if v2 else "_prepare_inputs", self._prepared_v2 if v2 else self._prepared_v1)
        self._wrap(runner, "sample" if v2 else "_sample", self._sampled_v2 if v2 else self._sampled_v1)
        self._runner = runner

    @staticmethod
    def _wrap(runner: Any, name: str, hear: Any) -> None:
        method = getattr(runner, name)

        def wrapped(*args: Any) -> Any:
            result = method(*args)
            hear(args, result)
            return result

        setattr(runner, name, wrapped)

    # ------------------------------------------------------------ events of the runner

    def _prepared_v1(self, args: Any, result: Any) -> None:
        names = self._runner.input_batch.req_ids
        self._lengths = dict(zip(names, self._runner.seq_lens[: len(names)].clone().unbind(), strict=True))

    def _prepared_v2(self, args: Any, result: Any) -> None:
        [batch] = args
        names = batch.req_ids
        self._lengths = dict(zip(names, batch.seq_lens[: len(names)].clone().unbind(), strict=True))

    def _sampled_v1(self, args: Any, output: Any) -> None:
        if args[1] is None:
            return self._sampled({})
        sampled = (output.sampled_token_ids >= 0).sum(-1).tolist()
        drafts = args[1].num_draft_tokens
        rejected = [count + 1 - kept if count else 0 for count, kept in zip(drafts, sampled, strict=True)]
        return self._sampled(dict(zip(self._runner.input_batch.req_ids, rejected, strict=False)))

    def _sampled_v2(self, args: Any, output: Any) -> None:
        batch = args[1]
        if batch.num_draft_tokens == 0:
            return self._sampled({})
        drafts, rejected = batch.num_draft_tokens_per_req, output[2].tolist()
        rejected = [number if count else 0 for count, number in zip(drafts, rejected, strict=False)]
        return self._sampled(dict(zip(batch.req_ids, rejected, strict=False)))

    def _sampled(self, rejected: dict[str, int]) -> None:
        for request in self._requests:
            request.rejected = rejected.get(request.name, 0)

    # ------------------------------------------------------------ events of the connector

    def bound(self, running: Running) -> None:
        """The step's inputs are prepared, and its forward follows."""
        self._requests = []
        for name, (blocks, scheduled) in running.requests.items():
            starts = torch.tensor(blocks)[:, None] * self._block_size
            slots = (starts + torch.arange(self._block_size)).flatten()
            request = Request(name, slots.to(self._device), scheduled, length=int(self._lengths[name]))
            request.before = {layer: self._rows(layer, request.slots) for layer in self._layers}
            self._requests.append(request)

    def at(self, moment: str, layers: list[str] | None = None) -> None:
        """Export the pages of all requests in the step."""
        for request in self._requests:
            for layer in layers or self._layers:
                request.exported.append((moment, layer, self._rows(layer, request.slots)))

    def layer(self, name: str, attn_metadata: Any) -> None:
        """Export during attention, or on its behalf."""
        if name not in self._layers:
            return
        metadata = get_forward_context().attn_metadata
        assert metadata[name] is attn_metadata, f"the forward context belongs to another call than the one for {name}"
        if self._session.shadow_blocks is not None:
            slots = attn_metadata.slot_mapping
            self.shadow_slots += int((slots >= self._session.shadow_blocks.first * self._block_size).sum())
        self.at("attention", [name])

    def saved(self) -> None:
        """vLLM has finished everything in a step."""
        self.at("save")
        for request in self._requests:
            self._judge(request, request.exported)
            for moment, layer, rows in request.exported:
                # After the forward, the tokens of the step are not accepted or rejected yet.
                valid = request.length - request.scheduled if moment == "forward" else request.valid
                self._kept.setdefault(request.name, []).append((moment, layer, rows[:valid]))
            self._last[request.name] = request
        self._requests = []

    def finished(self, name: str) -> None:
        """A request has ended, and still owns its blocks."""
        request = self._last.pop(name)
        final = {layer: self._rows(layer, request.slots) for layer in self._layers}
        self._judge(request, [("end", layer, rows) for layer, rows in final.items()])
        for moment, layer, rows in self._kept.pop(name):
            missing = (rows != final[layer][: len(rows)]).any(-1)
            self.counts[moment]["missing"] += int(missing.sum())

    def _judge(self, request: Request, exported: list[tuple[str, str, Tensor]]) -> None:
        """Count the exported rows. A rejected draft's row is there if its slot differs from what it held before the
        step."""
        drafts = slice(request.valid, request.length)
        for moment, layer, rows in exported:
            self.counts[moment]["rows"] += len(rows)
            self.counts[moment]["rejected"] += int((rows[drafts] != request.before[layer][drafts]).any(-1).sum())

    def _rows(self, layer: str, slots: Tensor) -> Tensor:
        """Return uint8 ``[len(slots), bytes of a row]``."""
        blocks, offsets = slots // self._block_size, slots % self._block_size
        found = []
        for plane in self._layers[layer].cache.planes:
            if plane.page_offsets is None:
                rows = plane.view[blocks, offsets]
            else:
                pages = plane.view.transpose(1, 2)[blocks].flatten(2)
                places = plane.page_offsets[offsets].long()[:, None].expand(-1, pages.shape[1], -1)
                rows = pages.gather(2, places)
            found.append(rows.flatten(1).view(torch.uint8))
        return torch.cat(found, -1)

    def summary(self) -> dict[str, Any]:
        counts = {moment: {what: found[what] for what in ("rows", "rejected", "missing")}
                  for moment, found in self.counts.items()}  # fmt: skip
        return {"counts": counts, "shadow_slots": self.shadow_slots, "unfinished": sorted(self._last)}


watching: list[Exports] = []


def watch(llm: Any) -> Exports:
    """Make the connector of this process's engine export, from now on."""
    import nwor_ops.vllm

    [session] = nwor_ops.vllm.sessions()
    watching.append(Exports(llm.llm_engine.model_executor.driver_worker.worker.model_runner, session))
    return watching[0]


class ExportConnector(KVConnectorBase_V1, SupportsHMA):
    """Export pages. See the module docstring."""

    reads_kv_cache_in_order = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks: dict[str, list[int]] = {}

    # ------------------------------------------------------------ in the worker

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for exports in watching if connector_metadata.requests else ():
            exports.bound(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The V1 runner calls this after the forward, because nothing is loaded before it."""
        if not kwargs:
            self.finish_forward()

    def finish_forward(self) -> None:
        """The V2 runner calls this after the forward."""
        for exports in watching:
            exports.at("forward")

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        for exports in watching:
            exports.layer(layer_name, attn_metadata)

    def wait_for_save(self) -> None:
        for exports in watching:
            exports.saved()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for exports in watching:
            for name in finished_req_ids:
                exports.finished(name)
        return finished_req_ids, None

    # ------------------------------------------------------------ in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Running:
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._blocks[name] = []
            self._blocks[name] += blocks[0] if blocks else ()
        return Running(
            {name: (list(self._blocks[name]), count) for name, count in scheduler_output.num_scheduled_tokens.items()}
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep its blocks until the worker has exported them."""
        return True, None

    # vLLM calls this method if a connector supports several KV-cache groups.
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, None


class SilentConnector(ExportConnector):
    """A connector that does not declare when it reads the cache."""

    reads_kv_cache_in_order = False
