"""Counters of draft graphs, from the worker that counts to ``/metrics`` and ``nwor_ops.stats()``.

As in :mod:`nwor_ops.vllm.metrics.exporter`, whose exporter adds them up, but counted on the host: nothing to fetch.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.metrics import transport as boards
from nwor_ops.vllm.metrics.transport import Board

_publishers: weakref.WeakKeyDictionary[Any, DraftPublisher] = weakref.WeakKeyDictionary()


class DraftPublisher:
    """Writes what one speculator has counted to its board, twice a second, as long as it lives.

    Args:
        speculator: has ``counted()``, totals by name of a metric.
        board: the labels.
        path: the board's file.
        logger: vLLM's.
    """

    def __init__(self, speculator: Any, board: Board, path: Path, logger: Any) -> None:
        self.path = path
        self._speculator, self._labels, self._logger = weakref.ref(speculator), board, logger
        self._published: Board | None = None
        self._failed = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="nwor-draft-publisher", daemon=True).start()

    def board(self) -> Board | None:
        """The totals of this moment; None once the speculator is gone."""
        speculator = self._speculator()
        if speculator is None:
            return None
        labels = self._labels
        return Board(labels.role, labels.instance, labels.engine, labels.model_name, speculator.counted())

    def publish(self) -> None:
        """Replace the board if there is anything new."""
        board = self.board()
        if board is None or board == self._published:
            return
        try:
            boards.write(self.path, board)
        except OSError as error:
            if not self._failed:
                self._logger.warning("nwor: counters of draft graphs are not published: %s", error)
            self._failed = True
        else:
            self._published = board

    def _run(self) -> None:
        stopped = threading.Event()
        while self._speculator() is not None:
            self.publish()
            stopped.wait(boards.PERIOD)


def start(speculator: Any, vllm_config: Any, logger: Any) -> None:
    """Publish a speculator's counters from now on, if the engine wants metrics. Safe to call again."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if speculator in _publishers or not NworConfig.load(vllm_config.additional_config).emit_metrics:
        return
    engine = int(vllm_config.parallel_config.data_parallel_index)
    path = boards.new_path("drafter", str(vllm_config.instance_id), engine)
    if path is None or get_tensor_model_parallel_rank() != 0:  # all ranks replay the same graphs
        return
    model_name = str(vllm_config.model_config.served_model_name)
    board = Board("drafter", str(vllm_config.instance_id), engine, model_name, {})
    publisher = _publishers[speculator] = DraftPublisher(speculator, board, path, logger)
    publisher.start()


def here() -> dict[Path, Board]:
    """The boards of this process's speculators, as they would be written now."""
    found = {publisher.path: publisher.board() for publisher in _publishers.values()}
    return {path: board for path, board in found.items() if board is not None}
