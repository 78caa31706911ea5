"""Gathers what the ranks say of transfers: one is over once all of them are through with it."""

from __future__ import annotations

from compile_and_serve.runtime.connector.messages import FinishedTransfers


class GatheredTransfers:
    """Transfers that some of `num_ranks` ranks have ended. It has failed if one of them says so; the first one's reason counts."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_left: dict[int, int] = {}
        self._failed: dict[int, str] = {}
        self._ended = FinishedTransfers()

    def add(self, transfers: FinishedTransfers) -> None:
        """Take what one rank says."""
        for transfer_id, reason in transfers.failed.items():
            self._failed.setdefault(transfer_id, reason)
        for transfer_id in (*transfers.finished, *transfers.failed):
            left = self._ranks_left.pop(transfer_id, self._num_ranks) - 1
            if left:
                self._ranks_left[transfer_id] = left
            elif transfer_id in self._failed:
                self._ended.failed[transfer_id] = self._failed.pop(transfer_id)
            else:
                self._ended.finished.append(transfer_id)

    def take(self) -> FinishedTransfers | None:
        """What has ended on all ranks since the last call; None if nothing has."""
        ended = self._ended
        if not ended.finished and not ended.failed:
            return None
        self._ended = FinishedTransfers()
        return ended
