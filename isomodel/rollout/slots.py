"""SlotTable: what the device needs to know of each running sample, as arrays by slot."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from isomodel.rollout.sequence import Sample

DEVICE_STOPS = 8
"""Stop token ids that the decode loop looks at on the device; the host looks at all of them after the loop."""


def device_stops(stop_ids: Iterable[int]) -> list[int]:
    """Those of a request's stop token ids that the decode loop looks at."""
    return sorted(stop_ids)[:DEVICE_STOPS]


class SlotTable:
    """Fixed slots; a step gathers the rows of the samples that it runs.

    Attributes (M slots, P page-table columns):
      page_table_MP: int32. keys_M2: uint32. inv_temp_M: float32, 0 is greedy.
      top_k_M: int32. top_p_M, min_p_M: float32. stops_ME: int32, -1 where unused.
    """

    def __init__(self, max_seqs: int, table_width: int):
        self.page_table_MP = np.zeros((max_seqs, table_width), np.int32)
        self.keys_M2 = np.zeros((max_seqs, 2), np.uint32)
        self.inv_temp_M = np.ones(max_seqs, np.float32)
        self.top_k_M = np.zeros(max_seqs, np.int32)
        self.top_p_M = np.ones(max_seqs, np.float32)
        self.min_p_M = np.zeros(max_seqs, np.float32)
        self.stops_ME = np.full((max_seqs, DEVICE_STOPS), -1, np.int32)
        self._free = list(range(max_seqs - 1, -1, -1))

    def __len__(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def take(self, sample: Sample) -> None:
        """Gives a free slot to `sample` and fills in its constants."""
        m = sample.slot = self._free.pop()
        params = sample.request.params
        self.keys_M2[m] = sample.key
        self.inv_temp_M[m] = params.sampler_inv_temp
        self.top_k_M[m] = params.top_k
        self.top_p_M[m] = params.top_p
        self.min_p_M[m] = params.min_p
        stops = device_stops(sample.request.stop_ids)
        self.stops_ME[m] = -1
        self.stops_ME[m, : len(stops)] = stops

    def give_back(self, sample: Sample) -> None:
        """Frees the sample's slot."""
        self._free.append(sample.slot)
        sample.slot = -1

    def set_pages(self, sample: Sample, first: int = 0) -> None:
        """Copies the sample's pages from number `first` on into its row of the page table."""
        self.page_table_MP[sample.slot, first : len(sample.pages)] = sample.pages[first:]
