"""Runner: owns the KV cache, turns a plan into arrays, runs the compiled programs, brings results back."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import sys
from collections.abc import Callable

import jax
import numpy as np

from isomodel import device_memory, model
from isomodel.batch import NO_SLOT, Batch, KVCache
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout import programs
from isomodel.rollout.engine_config import EngineConfig, bucket
from isomodel.rollout.scheduler import Plan, StepResult
from isomodel.rollout.slots import SlotTable
from isomodel.specs import Params, weight_faults


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Running:
    """A plan that the device has been given.

    Attributes:
      brings: counts, Chosen and prompt log-probabilities (or None) on the device; `mixed`: of one step, without a leading axis.
      stands: tokens, kv_len and room of a decode loop's samples after it; None after a mixed step.
      state, sampling: what the loop was given.
    """

    brings: tuple
    mixed: bool = dataclasses.field(default=False, metadata=dict(static=True))
    stands: tuple[jax.Array, jax.Array, jax.Array] | None = None
    state: programs.Decoding | None = None
    sampling: programs.Sampling | None = None


class Runner:
    """Runs plans on the device. `params` may be replaced between steps by arrays of the same shapes and dtypes.

    Attributes:
      params: the weights of now. older: weights of other versions, by version, for plans that name them.
    """

    def __init__(self, cfg: ModelConfig, numerics: Numerics, params: Params, config: EngineConfig, slots: SlotTable):
        """`config` is resolved (EngineConfig.resolve).

        Raises:
          ValueError: a weight is missing, unknown, or of another shape or dtype (all are listed).
          OutOfDeviceMemory: the KV cache does not fit.
        """
        self.cfg, self.numerics, self.config, self.slots = cfg, numerics, config, slots
        self.shapes = programs.Shapes.of(config)
        self.params = self.checked(params)
        self.older: dict[int, Params] = {}
        self.cache: KVCache | None = None
        self.take_cache()
        model.rope(cfg, numerics)  # kept for every program; made now, as its conversion is compiled

    def checked(self, params: Params) -> Params:
        """The weights, if they are what the programs were compiled for; see __init__ for what it raises."""
        if faults := weight_faults(self.cfg, params, self.numerics.dtype):
            raise ValueError("engine: weights do not fit the model: " + "; ".join(faults))
        return dict(params)

    def take_cache(self) -> None:
        """Takes the memory of the KV cache, unless it is taken. Raises OutOfDeviceMemory."""
        if self.cache is not None:
            return
        c = self.config
        device_memory.require(
            c.num_pages * c.page_bytes(self.cfg, self.numerics.dtype),
            f"engine: a KV cache of {c.num_pages:,} pages of {c.page_size} tokens",
            "lower kv_memory, num_pages or memory_fraction",
        )
        self.cache = KVCache.zeros(self.cfg, c.num_pages, c.page_size, self.numerics.dtype)

    def release_cache(self) -> None:
        """Gives the memory of the KV cache back, with all keys and values; the next step takes it again."""
        if self.cache is not None:
            self.cache.k_LNpKd.delete()
            self.cache.v_LNpKd.delete()
            self.cache = None

    def _programs(self) -> list[Callable]:
        """Functions that compile everything that a step can need, one program each."""
        c, args = self.config, (self.cfg, self.numerics, self.shapes)
        todo = [functools.partial(programs.compiled_decode, *args, S) for S in c.seq_buckets]
        for T in c.token_buckets:
            todo.append(functools.partial(programs.compiled_mixed, *args, T, c.seq_buckets[-1]))
            if c.prompt_logprobs:
                todo.append(functools.partial(programs.compiled_score, self.cfg, self.numerics, T))
        return [*todo, functools.partial(programs.compiled_copy, *args)]

    def warmup(self, progress: bool | None = None) -> int:
        """Compiles every program, as many at a time as there are cores; returns how many. Engines of equal shapes in one
        process share them.

        `progress` None shows a bar on a terminal only.
        """
        todo = self._programs()
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            # The first alone: what the compiler loads once, and traces that programs share, are then there for the others.
            todo[0]()
            running = [pool.submit(build) for build in todo[1:]]
            done = concurrent.futures.as_completed(running)
            if progress or (progress is None and sys.stderr.isatty()):
                from rich.console import Console
                from rich.progress import track

                console = Console(stderr=True)
                done = track(done, "compiling", total=len(running), console=console, transient=True)
            try:
                for future in done:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return len(todo)

    def traces(self) -> dict[str, Callable[[], None]]:
        """{case: function that traces what this engine runs in it}, for `contract.derive`."""
        args, c = (self.cfg, self.numerics, self.shapes), self.config
        mixed = functools.partial(programs.mixed_step, *args)
        loop = functools.partial(programs.decode_loop, *args)
        T, S = c.token_buckets[-1], c.seq_buckets[-1]
        return {
            "prefill": lambda: jax.eval_shape(mixed, *programs.mixed_arguments(*args, T, S)),
            "decode": lambda: jax.eval_shape(loop, *programs.decode_arguments(*args, S)),
        }

    def start(self, plan: Plan, after: Running | None = None) -> Running:
        """Gives the device a plan: copies its pages, runs its rows and samples. Does not wait for it.

        Args:
          after: the decode loop before it, if the plan follows that one (Scheduler.follow): of the same samples in the same rows, which
            go on from where that leaves them, whatever it brings.
        """
        self.take_cache()
        if plan.copies:
            self._copy(plan.copies)
        if plan.chunks:
            return self._mixed(plan)
        if after is None:
            return self._loop(plan, *self._decoding(plan))
        tables_SP = self._tables(plan.slots, len(after.state.page_table_SP))
        tokens_S, kv_len_S, room_S = after.stands
        state = programs.Decoding(tokens_S, kv_len_S, room_S, after.state.stops_SE, tables_SP, np.int32(plan.steps))
        return self._loop(plan, state, after.sampling)

    def result(self, running: Running) -> StepResult:
        """What a plan brought, as soon as the device is done with it."""
        counts, chosen, scored = jax.device_get(running.brings)
        if running.mixed:
            chosen = jax.tree.map(lambda x: x[None], chosen)
        return StepResult(counts, chosen, scored)

    def _params(self, plan: Plan) -> Params:
        return self.older.get(plan.version, self.params)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        run = programs.compiled_copy(self.cfg, self.numerics, self.shapes)
        for i in range(0, len(copies), programs.COPY_PAGES):
            pages = np.full((programs.COPY_PAGES, 2), (0, self.config.num_pages), np.int32)
            part = copies[i : i + programs.COPY_PAGES]
            pages[: len(part)] = part
            self.cache = run(self.cache, pages[:, 0].copy(), pages[:, 1].copy())

    def _sampling(self, slots: np.ndarray, S: int) -> programs.Sampling:
        t, n = self.slots, len(slots)

        def take(table_M: np.ndarray, fill) -> np.ndarray:
            out = np.full((S, *table_M.shape[1:]), fill, table_M.dtype)
            out[:n] = table_M[slots]
            return out

        return programs.Sampling(
            take(t.keys_M2, 0),
            take(t.inv_temp_M, 0),
            take(t.top_k_M, 0),
            take(t.top_p_M, 1),
            take(t.min_p_M, 0),
        )

    def _tables(self, slots: np.ndarray, S: int) -> np.ndarray:
        out = np.zeros((S, self.shapes.table_width), np.int32)
        out[: len(slots)] = np.where(slots[:, None] >= 0, self.slots.page_table_MP[slots], 0)  # no slot: it has ended
        return out

    def _decoding(self, plan: Plan) -> tuple[programs.Decoding, programs.Sampling]:
        """Where the plan's samples stand by what the host knows, and how they sample."""
        samples, slots = plan.decode, plan.slots
        n = len(samples)
        S = bucket(self.config.seq_buckets, n)
        tokens_S, kv_len_S, room_S = np.zeros((3, S), np.int32)
        tokens_S[:n] = [s.tokens[s.count - 1] for s in samples]
        kv_len_S[:n] = [s.count for s in samples]
        room_S[:n] = [s.request.limit - s.count for s in samples]
        stops_SE = np.full((S, self.slots.stops_ME.shape[1]), -1, np.int32)
        stops_SE[:n] = self.slots.stops_ME[slots]
        state = programs.Decoding(tokens_S, kv_len_S, room_S, stops_SE, self._tables(slots, S), np.int32(plan.steps))
        return state, self._sampling(slots, S)

    def _loop(self, plan: Plan, state: programs.Decoding, sampling: programs.Sampling) -> Running:
        run = programs.compiled_decode(self.cfg, self.numerics, self.shapes, len(state.page_table_SP))
        self.cache, counts, chosen, stands = run(self._params(plan), self.cache, state, sampling)
        return Running((counts, chosen, None), False, stands, state, sampling)

    def _mixed(self, plan: Plan) -> Running:
        decode = plan.decode
        T, S = bucket(self.config.token_buckets, plan.rows), self.config.seq_buckets[-1]
        size = self.shapes.page_size
        slots = plan.slots
        tokens_T, positions_T, seq_T = np.zeros((3, T), np.int32)
        written_T = np.zeros(T, bool)
        q_start_S1 = np.full(S + 1, plan.rows, np.int32)
        kv_len_S = np.zeros(S, np.int32)
        row = len(decode)
        tokens_T[:row] = [s.tokens[s.count - 1] for s in decode]
        positions_T[:row] = [s.count - 1 for s in decode]
        seq_T[:row] = q_start_S1[:row] = range(row)
        written_T[:row] = True
        kv_len_S[:row] = [s.count for s in decode]
        for i, chunk in enumerate(plan.chunks, row):
            end, rows = chunk.start + chunk.count, slice(row, row + chunk.count)
            tokens_T[rows] = chunk.sample.tokens[chunk.start : end]
            positions_T[rows] = range(chunk.start, end)
            seq_T[rows] = i
            written_T[rows] = positions_T[rows] >= chunk.sample.kv_ready
            q_start_S1[i] = row
            kv_len_S[i] = end
            row += chunk.count
        tables_SP = self._tables(slots, S)
        slots_T = tables_SP[seq_T, positions_T // size] * size + positions_T % size
        batch = Batch(
            tokens_T, positions_T, np.where(written_T, slots_T, np.int32(NO_SLOT)), q_start_S1, kv_len_S, tables_SP
        )
        run = programs.compiled_mixed(self.cfg, self.numerics, self.shapes, T, S)
        self.cache, hidden_TD, chosen = run(self._params(plan), self.cache, batch, self._sampling(slots, S))
        scored = self._score(plan, hidden_TD, T) if any(not c.sample.request.scored for c in plan.chunks) else None
        return Running((np.ones(S, np.int32), chosen, scored), mixed=True)

    def _score(self, plan: Plan, hidden_TD: jax.Array, T: int) -> jax.Array:
        """Log-probability of each chunk row's next prompt token (rows without one score token 0; nobody reads it)."""
        targets_T, inv_temp_T = np.zeros(T, np.int32), np.ones(T, np.float32)
        row = len(plan.decode)
        for chunk in plan.chunks:
            prompt = chunk.sample.request.prompt
            following = prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
            targets_T[row : row + len(following)] = following
            inv_temp_T[row : row + chunk.count] = chunk.sample.request.params.inv_temp
            row += chunk.count
        return programs.compiled_score(self.cfg, self.numerics, T)(self._params(plan), hidden_TD, targets_T, inv_temp_T)
