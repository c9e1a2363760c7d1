"""GPU runner: one Step on a CUDA device without waiting for it. In: rows and a Step. Out: a Flight.

A step that only decodes replays a CUDA graph captured for its batch size, LM head and sampling
inside; the host sends one small buffer before it. A step with prompt chunks runs the same kernels
one by one. Input tokens of decoding rows stay on the device, where sampling left them. A step can
thus be launched before the last one's tokens are known.
"""

# T tokens of the step, B decoding rows, N rows that choose, C chunks, R rows of the engine, V
# vocabulary

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.core.rounding import ceil_div
from gyre.distributed.comm_stats import Captured
from gyre.engine.kv_cache.pool import KvPool, to_device
from gyre.engine.runners.device_events import ResultEvent
from gyre.engine.runners.gpu_attention import ChunkArrays, GpuAttention
from gyre.engine.runners.gpu_buffers import DeviceRows, MirroredBuffer
from gyre.engine.runners.gpu_sampling import ShardSampling, WholeSampling
from gyre.engine.runners.gpu_work import plan_graph_batches, plan_piece
from gyre.engine.runners.torch_runner import TorchFlight
from gyre.engine.sampling.prompt_scoring import Scores, find_targets, score
from gyre.engine.sampling.sampler_state import SamplerState
from gyre.engine.sampling.shard_sampler import ShardSampler
from gyre.engine.scheduler.random import uniforms
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import Flight, SampledTokens, Step
from gyre.kernels.gpu.decode_attention import DecodeWork
from gyre.kernels.gpu.matmul import TILES
from gyre.kernels.gpu.pointwise import enter_pages
from gyre.kernels.gpu.work_list import INVARIANT_PIECE, align, cut_pieces
from gyre.models.decoder import Decoder
from gyre.models.fused_forward import FusedForward

OUT_SLOTS = 4  # results that may be on their way at once


class GpuFlight:
    """A launched step whose tokens are copied to `host_3B` (int32 bits) by its arrival."""

    def __init__(self, host_3B: Tensor, count: int, arrival: ResultEvent) -> None:
        self._host_3B = host_3B
        self._count = count
        self._arrival = arrival

    def fetch(self) -> SampledTokens:
        self._arrival.wait()
        result = self._host_3B[:, : self._count].numpy()
        return SampledTokens(
            tokens=result[0].copy(),
            logprobs=result[1].view(np.float32).copy(),
            raw_logprobs=result[2].view(np.float32).copy(),
            supports={},
        )


class GpuRunner:
    """Holds graphs, buffers and the device's view of the rows."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        max_running: int,
        token_budget: int,
        rows_at_once: int,
        invariant: bool,
        deadline_s: float,
        capture: torch.cuda.Stream,
        emit: Emit,
        sharded: ShardSampler | None = None,
    ) -> None:
        """Make the runner. Graphs are captured on the stream `capture`. With `sharded`, tensor
        ranks choose from their parts of the logits."""
        self.decoder = decoder
        self.pool = pool
        self.emit = emit
        self.capture_stream = capture
        self._deadline_s = deadline_s  # of a step
        self._token_budget = token_budget  # of a step
        self.device = decoder.device
        spec = decoder.spec
        self._rows = DeviceRows(
            max_running=max_running,
            pages_per_row=ceil_div(spec.context_tokens, pool.page_tokens),
            device=self.device,
        )
        self._forward = FusedForward(decoder, pool.layer, self._rows.table_RP, invariant=invariant)
        self._attention = GpuAttention(
            pool,
            self._rows.table_RP,
            num_heads=spec.num_heads,
            max_running=max_running,
            context_tokens=spec.context_tokens,
            invariant=invariant,
        )
        items = align(self._attention.max_items)
        entries = 3 * max_running * self._rows.pages_per_row
        choosing = {
            "uniform": ("float64", max_running),
            "inverse": ("float32", max_running),
            "row": ("int32", max_running),
            "position": ("int32", max_running),
            "first": ("int32", max_running),
            "size": ("int32", 2),
        }
        self._staging = MirroredBuffer(
            {**choosing, "tail": ("int32", items + entries)}, self.device, deadline_s=deadline_s
        )
        tokens = dict.fromkeys(("token_t", "position_t", "row_t"), ("int32", token_budget))
        self._mixed = MirroredBuffer(
            {**tokens, "source": ("int32", max_running)}, self.device, deadline_s=deadline_s
        )
        self._sampling = (
            WholeSampling(decoder, self._forward, max_running=max_running)
            if sharded is None
            else ShardSampling(decoder, self._forward, max_running=max_running, sharded=sharded)
        )
        self._out_3B = torch.zeros(3, max_running, dtype=torch.int32, device=self.device)
        self._out_host = [
            torch.zeros(3, max_running, dtype=torch.int32, pin_memory=True)
            for _ in range(OUT_SLOTS)
        ]
        self._turn = 0
        self._rules = SamplerState(
            decoder.whole_spec.vocab_size, self.device, rows_at_once=rows_at_once, sharded=sharded
        )
        self._shard = None if sharded is None else sharded.shard
        self._rows_at_once = rows_at_once  # of logits, where prompts are scored
        self._batches = plan_graph_batches(max_running)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._sent: dict[tuple[int, bool], Captured] = {}  # by each replay, over tensor ranks
        # Where graphs that stop before sampling leave their logits. Made now, so the ledger knows
        # it from the start.
        self._logits_NV = torch.empty(
            max_running, self._sampling.width, device=self.device, dtype=decoder.dtype
        )
        self._memory = torch.cuda.graph_pool_handle()
        self._addresses: tuple[int, ...] = ()
        self._tensors = list(decoder.parameters())

    # -- steps

    @torch.inference_mode()
    def launch(self, rows: InputBatch, step: Step) -> Flight:
        """Send the step to the device and return at once."""
        if len(step.restored_rows):
            self._restore(rows, step)
        row_N = step.sample_rows
        ruled_N = rows.has_rules(row_N)
        plain = not ruled_N.any()
        if step.chunks:
            logits_NV, scores = self._run_mixed(rows, step)
        else:
            logits_NV, scores = self._replay(rows, step, plain), None
        if step.copies:
            self.pool.copy_pages(step.copies)
        if logits_NV is not None and (scores is not None or not plain):
            return self._choose_by_rules(rows, step, logits_NV, scores, ruled_N)
        arrival = ResultEvent(step, self._deadline_s)
        if logits_NV is not None:
            self._sample(logits_NV)
        if len(row_N) == 0:
            return TorchFlight(None, None, scores, arrival)
        return self._bring_out(len(row_N), arrival)

    def _choose_by_rules(
        self,
        rows: InputBatch,
        step: Step,
        logits_NV: Tensor,
        scores: Scores | None,
        ruled_N: np.ndarray,
    ) -> Flight:
        """Choose outside the graphs: rows truncate, are shaped, or tell alternatives; or prompts
        are scored beside."""
        count = len(step.sample_rows)
        self._sample(logits_NV)
        choice, rules = self._rules.choose(
            logits_NV.float(), rows, step, self._staging.on_device["uniform"][:count]
        )
        asks_N = to_device(ruled_N, self.device)
        logprobs_2N = self._out_3B[1:, :count].view(torch.float32)
        tokens_N = torch.where(asks_N, choice.tokens_N, self._out_3B[0, :count].long())
        self._rows.last_R.index_copy_(
            0, self._staging.on_device["row"][:count].long(), tokens_N.int()
        )
        merged = replace(
            choice,
            tokens_N=tokens_N,
            logprobs_N=torch.where(asks_N, choice.logprobs_N.double(), logprobs_2N[0].double()),
            raw_logprobs_N=torch.where(asks_N, choice.raw_logprobs_N.float(), logprobs_2N[1]),
        )
        return TorchFlight(merged, rules, scores, ResultEvent(step, self._deadline_s))

    def _restore(self, rows: InputBatch, step: Step) -> None:
        """Rows that start decoding with a token that the device has not chosen: it comes from the
        host."""
        row_S = step.restored_rows
        token_S = rows.tokens_RW[row_S, rows.computed_R[row_S]].astype(np.int32)
        pairs_2S = torch.from_numpy(np.stack([row_S, token_S]).astype(np.int64)).pin_memory()
        row, token = pairs_2S.to(self.device, non_blocking=True)
        self._rows.last_R.index_copy_(0, row, token.int())

    def _replay(self, rows: InputBatch, step: Step, plain: bool) -> Tensor | None:
        """Decode by graph. Returns the logits when sampling is left to do."""
        count = len(step.decode_rows)
        size = next(size for size in self._batches if size >= count)
        if (size, plain) not in self.graphs:
            self._capture(size, plain)
        self._stage_decode(rows, step, size)
        self.graphs[size, plain].replay()
        if self.decoder.tensor is not None:
            self.decoder.tensor.group.traffic.replayed(self._sent[size, plain])
        return None if plain else self._logits_NV[:count]

    def _stage_decode(self, rows: InputBatch, step: Step, size: int) -> None:
        """Write and send what a step needs besides its prompt chunks. `size` places, the last ones
        padding."""
        # the first B of N are row_B
        views, row_B, row_N = self._staging.begin(), step.decode_rows, step.sample_rows
        count, position_B = len(row_B), rows.computed_R[row_B]
        views["row"][: len(row_N)], views["row"][len(row_N) : size] = row_N, self._rows.max_running
        views["position"][:count], views["position"][count:size] = position_B, -1
        self._stage_choosing(views, rows, step, size)
        piece = INVARIANT_PIECE
        if not self._attention.invariant:
            num_tokens, pool_tokens = int(position_B.sum()) + count, self._attention.pool_tokens
            piece = plan_piece(
                num_tokens, self.pool.num_kv_heads, self.pool.page_tokens, pool_tokens=pool_tokens
            )
        first_B, item_I = cut_pieces(position_B + 1, piece)
        views["first"][:count], views["size"][:] = first_B, (len(item_I), piece)
        touched = np.concatenate(
            [row_B, np.asarray([chunk.row for chunk in step.chunks], dtype=np.int64)]
        )
        entries_3N = self._rows.new_entries(rows, touched)
        tail, begin = views["tail"], align(len(item_I))
        tail[: len(item_I)] = item_I
        tail[begin : begin + entries_3N.size] = entries_3N.reshape(-1)
        self._staging.send(begin + entries_3N.size)
        if entries_3N.size:
            entered = self._staging.on_device["tail"][begin : begin + entries_3N.size]
            enter_pages(self._rows.table_RP, entered.view(3, -1))

    def _stage_choosing(
        self, views: dict[str, np.ndarray], rows: InputBatch, step: Step, size: int
    ) -> None:
        row_N, position_N = step.sample_rows, step.sample_positions
        count = len(row_N)
        temperature_N = rows.temperature_R[row_N]
        inverse_N = views["inverse"][:count]
        inverse_N[:] = 0.0
        np.divide(1.0, temperature_N, out=inverse_N, where=temperature_N > 0.0)
        views["uniform"][:count] = uniforms(rows.key_R[row_N], position_N - rows.prompt_R[row_N])
        views["inverse"][count:size], views["uniform"][count:size] = 1.0, 0.0

    def _run_mixed(self, rows: InputBatch, step: Step) -> tuple[Tensor | None, Scores | None]:
        """Run a step with prompt chunks. Returns logits_NV of the rows that choose, or None when
        none does; and the log-probs of prompts that want them."""
        num_decode, num_rows = len(step.decode_rows), len(step.sample_rows)
        self._stage_decode(rows, step, num_decode)
        chunks = ChunkArrays.of(step.chunks, num_decode)
        num_tokens = self._stage_mixed(rows, step, chunks)
        device = self._mixed.on_device
        token_T, position_T, row_T = (
            device[name][:num_tokens] for name in ("token_t", "position_t", "row_t")
        )
        if num_decode:
            torch.index_select(self._rows.last_R, 0, row_T[:num_decode], out=token_T[:num_decode])
        attend = self._attention.mixed(self._decode_work(num_decode), num_decode, chunks)
        source_N, targets = device["source"][:num_rows], find_targets(rows, step, chunks.first_C)
        if targets is not None:
            source_N = torch.cat([source_N, to_device(targets.place_Q, self.device).int()])
        x_NE = self._forward.residual(token_T, position_T, row_T, attend, source_N)
        scores = None
        if targets is not None:
            scores = score(
                targets,
                x_NE[num_rows:],
                self._sampling.logits,
                rows_at_once=self._rows_at_once,
                shard=self._shard,
            )
        return self._sampling.logits(x_NE[:num_rows]) if num_rows else None, scores

    def _stage_mixed(self, rows: InputBatch, step: Step, chunks: ChunkArrays) -> int:
        """Write and send the tokens. Returns how many there are."""
        views, row_B, num_decode = self._mixed.begin(), step.decode_rows, len(step.decode_rows)
        row_T, position_T = chunks.rows_and_positions()
        num_tokens = num_decode + len(row_T)
        views["token_t"][num_decode:num_tokens] = rows.tokens_RW[row_T, position_T]
        views["position_t"][:num_decode] = rows.computed_R[row_B]
        views["position_t"][num_decode:num_tokens] = position_T
        views["row_t"][:num_decode], views["row_t"][num_decode:num_tokens] = row_B, row_T
        last_C = chunks.first_C + chunks.count_C - 1
        source_N = np.concatenate([np.arange(num_decode), last_C[step.sample_chunks]])
        views["source"][: len(source_N)] = source_N
        self._mixed.send(len(source_N))
        return num_tokens

    # -- pieces of a step, captured or not

    def _decode_work(self, batch: int) -> DecodeWork:
        device = self._staging.on_device
        return DecodeWork(
            row_B=device["row"][:batch],
            position_B=device["position"][:batch],
            first_B=device["first"][:batch],
            item_I=device["tail"],
            size_2=device["size"],
        )

    def _decode_logits(self, size: int) -> Tensor:
        """Return logits of `size` places from what was staged."""
        device = self._staging.on_device
        row_B, position_B = device["row"][:size], device["position"][:size]
        token_B = self._rows.last_R.index_select(0, row_B)
        work = self._decode_work(size)

        def attend(layer: int, q_BHD: Tensor, out_BHD: Tensor) -> None:
            self._attention.decode(layer, q_BHD, out_BHD, work)

        return self._sampling.logits(self._forward.residual(token_B, position_B, row_B, attend))

    def _sample(self, logits_NV: Tensor) -> None:
        """Choose for the staged rows; tokens go to the out buffer and to the rows."""
        self._sampling.sample(
            logits_NV,
            self._staging.on_device,
            self._rows.last_R,
            self._out_3B[0],
            self._out_3B[1:].view(torch.float32),
        )

    def _bring_out(self, count: int, arrival: ResultEvent) -> Flight:
        self._turn = (self._turn + 1) % OUT_SLOTS
        host_3B = self._out_host[self._turn]
        host_3B.copy_(self._out_3B, non_blocking=True)
        arrival.mark()
        return GpuFlight(host_3B, count, arrival)

    # -- graphs

    @torch.inference_mode()
    def capture_all(self) -> float:
        """Choose the kernel for prompts, and capture a graph for every planned batch size, the
        largest first, so that the others reuse its memory. Return the seconds until the first was
        there, with kernels compiled."""
        begun_s, first_s = time.monotonic(), 0.0
        self.recapture()
        if self._attention.measures_prefill:
            self._attention.choose_prefill(self.emit)  # alone: it takes the faster one
        # a new thread computes on the first device, which may be another rank's
        use = partial(torch.cuda.set_device, self.device)
        with ThreadPoolExecutor(2, thread_name_prefix="compile", initializer=use) as beside:
            compiling = []
            if self._shard is None:
                compiling.append(beside.submit(self._compile_sampling))
            else:  # with exchanges, which all ranks make in one order
                self._compile_sampling()
            if not self._attention.measures_prefill:
                compiling.append(beside.submit(self._attention.choose_prefill, self.emit))
            self._warm()
            for size in reversed(self._batches):
                self._capture(size, plain=True)
                first_s = first_s or time.monotonic() - begun_s
            for work in compiling:
                work.result()
        return first_s

    @torch.inference_mode()
    def _compile_sampling(self) -> None:
        """Compile the sampling kernels, on a stream of their own. Their choice is discarded."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            self._sample(self._logits_NV)
        stream.synchronize()

    def _capture(self, size: int, plain: bool) -> None:
        """Capture decoding of `size` places. The pass before it, which compiles kernels, runs on
        padding."""
        stream = self.capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._stage_padding(size)
            self._sample(self._decode_logits(size))
            graph = torch.cuda.CUDAGraph()
            # Other threads may pin memory and copy meanwhile (a snapshot's), which is nothing to
            # this graph.
            with (
                self._capturing() as sent,
                torch.cuda.graph(
                    graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                logits_NV = self._decode_logits(size)
                if plain:
                    self._sample(logits_NV)
                else:
                    self._logits_NV[:size].copy_(logits_NV)
        torch.cuda.current_stream().wait_stream(stream)
        self.graphs[size, plain], self._sent[size, plain] = graph, sent

    def _capturing(self) -> contextlib.AbstractContextManager[Captured]:
        """Let collectives be captured. Ranks choose graphs by the steps that they share, so they
        capture at the same point."""
        tensor = self.decoder.tensor
        return contextlib.nullcontext(Captured()) if tensor is None else tensor.group.capturing()

    def _warm(self) -> None:
        """Compile what no graph holds: the page table's kernel, and in invariant mode the products'
        tiles for as many rows as a step with prompts may have. Prefill attention is compiled when
        it is chosen."""
        nobody, device = self._rows.max_running, self.device
        enter_pages(
            self._rows.table_RP,
            torch.tensor([[nobody], [0], [0]], dtype=torch.int32, device=device),
        )
        if not self._attention.invariant:
            return

        def attend_nothing(layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
            out_THD.zero_()

        for num_tokens in [fewest for fewest in TILES if fewest <= self._token_budget]:
            token_T, row_T = (
                torch.full((num_tokens,), n, dtype=torch.int32, device=device) for n in (0, nobody)
            )
            self._forward.residual(token_T, torch.full_like(row_T, -1), row_T, attend_nothing)

    def _stage_padding(self, size: int) -> None:
        views = self._staging.begin()
        for name, value in (
            ("row", self._rows.max_running),
            ("position", -1),
            ("first", 0),
            ("inverse", 1.0),
        ):
            views[name][:size] = value
        views["uniform"][:size], views["size"][:] = 0.0, (0, self.pool.page_tokens)
        self._staging.send(0)

    def has_moved(self) -> bool:
        """Return whether weights or KV pages have other addresses than the graphs. Virtual memory
        keeps addresses over moves. Without it, or when the owner of shared weights allocates them
        anew, they change."""
        return self._find_addresses() != self._addresses

    @torch.inference_mode()
    def recapture(self) -> None:
        """Capture the graphs that there are anew: they hold addresses."""
        captured, self._addresses = list(self.graphs), self._find_addresses()
        self._attention.refresh()
        self.graphs.clear()
        if captured:
            self.emit(
                "engine.graphs_recaptured",
                graphs=len(captured),
                reason="weights or KV pages have new addresses",
            )
            for size, plain in captured:
                self._capture(size, plain)

    def _find_addresses(self) -> tuple[int, ...]:
        return (self.pool.tensor.data_ptr(), *(tensor.data_ptr() for tensor in self._tensors))
