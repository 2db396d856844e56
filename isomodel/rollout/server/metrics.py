"""ServerMetrics: what /metrics says, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isomodel.rollout.outputs import EngineStats

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

COUNTERS = {
    "generated_tokens": "tokens sampled",
    "prefill_rows": "prompt positions that ran",
    "decode_rows": "positions of sampled tokens that ran",
    "decode_steps": "steps of the device with rows that decode, each of a loop for itself",
    "reused_tokens": "positions whose keys and values were there already",
    "prefix_queries": "full pages looked up in the prefix cache",
    "prefix_hits": "full pages found in the prefix cache",
    "preemptions": "samples that gave up their pages and came back",
    "evictions": "cached pages that gave way to new ones",
    "completions": "samples finished, aborted ones too",
    "steps": "looks of the host; a decode loop is one",
}
GAUGES = {
    "running": "samples that have a slot",
    "waiting": "samples that wait for one",
    "pages_in_use": "pages held",
    "pages": "pages there are",
}
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class ServerMetrics:
    """Counts requests and steps, and shows the engine's own totals. A registry of its own: several may live."""

    def __init__(self):
        self._registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "isomodel_requests",
            "requests answered, by endpoint and status",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._prompt_tokens = prometheus_client.Counter(
            "isomodel_prompt_tokens", "tokens of the prompts taken", registry=self._registry
        )
        self._steps = prometheus_client.Histogram(
            "isomodel_step_seconds", "seconds of a step", buckets=STEP_SECONDS, registry=self._registry
        )

    def show_engine(self, stats: Callable[[], EngineStats], version: Callable[[], int]) -> None:
        """Adds an engine's totals, read when someone asks."""
        self._registry.register(_EngineCollector(stats, version))

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def took(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def stepped(self, seconds: float) -> None:
        """From the engine's thread."""
        self._steps.observe(seconds)

    def text(self) -> bytes:
        """The answer of /metrics."""
        return prometheus_client.generate_latest(self._registry)


class _EngineCollector:
    def __init__(self, stats: Callable[[], EngineStats], version: Callable[[], int]):
        self._stats, self._version = stats, version

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, help_ in COUNTERS.items():
            yield CounterMetricFamily(f"isomodel_{name}", help_, value=getattr(stats, name))
        for name, help_ in GAUGES.items():
            yield GaugeMetricFamily(f"isomodel_{name}", help_, value=getattr(stats, name))
        yield GaugeMetricFamily(
            "isomodel_weight_version", "version of the weights that sample now", value=self._version()
        )
