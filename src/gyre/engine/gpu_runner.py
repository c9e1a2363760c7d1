"""GPU runner: one Step on a CUDA device without waiting for it. In: rows and a Step. Out: a Flight. Caller: cycle.

A step that only decodes replays a CUDA graph captured for its batch size, LM head and sampling inside; the host sends
one small buffer before it. A step with prompt chunks runs the same kernels one by one. Input tokens of decoding rows
come from the device, where sampling left them, so that a step can be launched before the last one's tokens are known.
"""

# T tokens of the step, B decoding rows, N rows that choose, C chunks, R rows of the engine, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gyre.engine.attention import KvPool
from gyre.engine.draws import uniforms
from gyre.engine.gpu_forward import FusedForward
from gyre.engine.gpu_layout import cut_pieces, cut_tiles, most_pieces, plan_graph_batches, plan_piece
from gyre.engine.gpu_state import DeviceRows, Staging
from gyre.engine.rows import Rows
from gyre.engine.rulebook import RuleBook
from gyre.engine.runner import Flight, TorchFlight
from gyre.engine.sampler import choose
from gyre.engine.scheduler import Step
from gyre.engine.settle import Sampled
from gyre.kernels.gpu.decode_attention import PROGRAMS_PER_SM, DecodeScratch, DecodeWork, decode_attention
from gyre.kernels.gpu.pointwise import enter_pages
from gyre.kernels.gpu.prefill_attention import TILE_QUERIES, PrefillWork, describe_pages, prefill_attention
from gyre.kernels.gpu.sample import SampleScratch, sample
from gyre.models.decoder import Decoder

OUT_SLOTS = 4  # results that may be on their way at once


class GpuFlight:
    """A launched step whose tokens are copied to `host_3B` (int32 bits) when `done` has happened."""

    def __init__(self, host_3B: Tensor, count: int, done: torch.cuda.Event) -> None:
        self._host_3B, self._count, self._done = host_3B, count, done

    def fetch(self) -> Sampled:
        self._done.synchronize()
        result = self._host_3B[:, : self._count].numpy()
        return Sampled(
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
        emit: Callable[..., None],
    ) -> None:
        self.decoder, self.pool, self.emit = decoder, pool, emit
        self.device = decoder.device
        spec = decoder.spec
        self._rows = DeviceRows(
            max_running=max_running, pages_per_row=-(-spec.context_tokens // pool.page_tokens), device=self.device
        )
        self._forward = FusedForward(decoder, pool, self._rows.table_RP)
        self._programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(self.device).multi_processor_count
        items = max_running + most_pieces(pool.num_pages * pool.page_tokens, spec.num_kv_heads)
        entries = 3 * max_running * self._rows.pages_per_row
        choosing = {
            "uniform": ("float64", max_running),
            "inverse": ("float32", max_running),
            "row": ("int32", max_running),
            "position": ("int32", max_running),
            "first": ("int32", max_running),
            "size": ("int32", 2),
        }
        self._staging = Staging({**choosing, "tail": ("int32", items + entries)}, self.device)
        tokens = dict.fromkeys(("token_t", "position_t", "row_t"), ("int32", token_budget))
        chunks = dict.fromkeys(("source", "row_c", "first_c", "start_c", "count_c"), ("int32", max_running))
        tiles = {"tile": ("int32", max_running + token_budget // TILE_QUERIES)}
        self._mixed = Staging({**tokens, **chunks, **tiles}, self.device)
        self._scratch = DecodeScratch.make(items, spec.num_heads, spec.head_dim, self.device)
        self._sampling = SampleScratch.make(max_running, spec.vocab_size, self.device)
        self._out_3B = torch.zeros(3, max_running, dtype=torch.int32, device=self.device)
        self._out_host = [torch.zeros(3, max_running, dtype=torch.int32, pin_memory=True) for _ in range(OUT_SLOTS)]
        self._turn = 0
        self._rules = RuleBook(spec.vocab_size, self.device)
        self._descriptors = [describe_pages(pool.layer(index)) for index in range(spec.num_layers)]
        self._batches = plan_graph_batches(max_running)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._logits_of: dict[int, Tensor] = {}  # of the graphs that stop before sampling
        self._memory = torch.cuda.graph_pool_handle()
        self._addresses: tuple[int, ...] = ()
        self._tensors = list(decoder.parameters())

    # -- steps

    @torch.inference_mode()
    def launch(self, rows: Rows, step: Step) -> Flight:
        """Send the step to the device and return at once."""
        self._check_addresses()
        if len(step.restored_rows):
            self._restore(rows, step)
        plain = not rows.truncated_R[step.sample_rows].any()
        if step.chunks:
            logits_NV = self._run_mixed(rows, step)
        else:
            logits_NV = self._replay(rows, step, plain)
        if step.copies:
            self.pool.copy_pages(step.copies)
        count = len(step.sample_rows)
        if logits_NV is not None and count and not plain:
            return self._choose_by_rules(rows, step, logits_NV)
        if logits_NV is not None and count:
            self._sample(logits_NV, count)
        return self._bring_out(count)

    def _choose_by_rules(self, rows: Rows, step: Step, logits_NV: Tensor) -> Flight:
        """Choose outside the graphs, for rows that truncate."""
        rules = self._rules.rules_for(rows, step.sample_rows)
        count = len(step.sample_rows)
        choice = choose(logits_NV.float(), rules, self._staging.on_device["uniform"][:count])
        row_N = self._staging.on_device["row"][:count]
        self._rows.last_R.index_copy_(0, row_N.long(), choice.tokens_N.int())
        return TorchFlight(choice, rules)

    def _restore(self, rows: Rows, step: Step) -> None:
        """Rows that start decoding with a token that the device has not chosen: it comes from the host."""
        row_S = step.restored_rows
        token_S = rows.tokens_RW[row_S, rows.computed_R[row_S]].astype(np.int32)
        pairs_2S = torch.from_numpy(np.stack([row_S, token_S]).astype(np.int64)).pin_memory()
        row, token = pairs_2S.to(self.device, non_blocking=True)
        self._rows.last_R.index_copy_(0, row, token.int())

    def _replay(self, rows: Rows, step: Step, plain: bool) -> Tensor | None:
        """Decode by graph. Returns the logits when sampling is left to do."""
        count = len(step.decode_rows)
        size = next(size for size in self._batches if size >= count)
        if (size, plain) not in self._graphs:
            self._capture(size, plain)
        self._stage_decode(rows, step, size)
        self._graphs[size, plain].replay()
        return None if plain else self._logits_of[size][:count]

    def _stage_decode(self, rows: Rows, step: Step, size: int) -> None:
        """Write and send what a step needs besides its prompt chunks. `size` places, the last ones padding."""
        views, row_B, row_N = self._staging.begin(), step.decode_rows, step.sample_rows  # the first B of N are row_B
        count, position_B = len(row_B), rows.computed_R[row_B]
        views["row"][: len(row_N)], views["row"][len(row_N) : size] = row_N, self._rows.max_running
        views["position"][:count], views["position"][count:size] = position_B, -1
        self._stage_choosing(views, rows, step, size)
        piece = plan_piece(int(position_B.sum()) + count, self.decoder.spec.num_kv_heads, self.pool.page_tokens)
        first_B, item_I = cut_pieces(position_B + 1, piece)
        views["first"][:count], views["size"][:] = first_B, (len(item_I), piece)
        touched = np.concatenate([row_B, np.asarray([chunk.row for chunk in step.chunks], dtype=np.int64)])
        entries_3N = self._rows.new_entries(rows, touched)
        tail, items = views["tail"], len(item_I)
        tail[:items] = item_I
        tail[items : items + entries_3N.size] = entries_3N.reshape(-1)
        self._staging.send(items + entries_3N.size)
        if entries_3N.size:
            entered = self._staging.on_device["tail"][items : items + entries_3N.size]
            enter_pages(self._rows.table_RP, entered.view(3, -1))

    def _stage_choosing(self, views: dict[str, np.ndarray], rows: Rows, step: Step, size: int) -> None:
        row_N, position_N = step.sample_rows, step.sample_positions
        count = len(row_N)
        temperature_N = rows.temperature_R[row_N]
        inverse_N = views["inverse"][:count]
        inverse_N[:] = 0.0
        np.divide(1.0, temperature_N, out=inverse_N, where=temperature_N > 0.0)
        views["uniform"][:count] = uniforms(rows.key_R[row_N], position_N - rows.prompt_R[row_N])
        views["inverse"][count:size], views["uniform"][count:size] = 1.0, 0.0

    def _run_mixed(self, rows: Rows, step: Step) -> Tensor | None:
        """Run a step with prompt chunks. Returns logits_NV of the rows that choose, or None when none does."""
        num_decode, num_rows = len(step.decode_rows), len(step.sample_rows)
        self._stage_decode(rows, step, num_decode)
        num_tokens, num_tiles = self._stage_mixed(rows, step)
        device = self._mixed.on_device
        token_T, position_T, row_T = (device[name][:num_tokens] for name in ("token_t", "position_t", "row_t"))
        if num_decode:
            torch.index_select(self._rows.last_R, 0, row_T[:num_decode], out=token_T[:num_decode])
        count = len(step.chunks)
        chunks = PrefillWork(
            row_C=device["row_c"][:count],
            first_C=device["first_c"][:count],
            start_C=device["start_c"][:count],
            count_C=device["count_c"][:count],
            item_I=device["tile"][:num_tiles],
        )
        num_kv = self.decoder.spec.num_kv_heads

        def attend(layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
            if num_decode:
                self._attend_decode(layer, q_THD[:num_decode], out_THD[:num_decode])
            prefill_attention(
                q_THD, self._descriptors[layer], self._rows.table_RP, chunks, out_THD, num_kv_heads=num_kv
            )

        x_TE = self._forward.residual(token_T, position_T, row_T, attend)
        if num_rows == 0:
            return None
        return self._forward.logits(x_TE.index_select(0, device["source"][:num_rows]))

    def _stage_mixed(self, rows: Rows, step: Step) -> tuple[int, int]:
        """Write and send tokens and chunks. Returns how many tokens and tiles there are."""
        views, row_B = self._mixed.begin(), step.decode_rows
        row_C = np.asarray([chunk.row for chunk in step.chunks], dtype=np.int64)
        start_C = np.asarray([chunk.start for chunk in step.chunks], dtype=np.int64)
        count_C = np.asarray([chunk.count for chunk in step.chunks], dtype=np.int64)
        end_C = len(row_B) + np.cumsum(count_C)
        first_C, num_tokens = end_C - count_C, int(end_C[-1])
        chunk_T = np.repeat(np.arange(len(row_C)), count_C)
        rows_T = row_C[chunk_T]
        positions_T = np.arange(len(row_B), num_tokens) - first_C[chunk_T] + start_C[chunk_T]
        views["token_t"][len(row_B) : num_tokens] = rows.tokens_RW[rows_T, positions_T]
        views["position_t"][: len(row_B)] = rows.computed_R[row_B]
        views["position_t"][len(row_B) : num_tokens] = positions_T
        views["row_t"][: len(row_B)], views["row_t"][len(row_B) : num_tokens] = row_B, rows_T
        source_N = np.concatenate([np.arange(len(row_B)), end_C[step.sample_chunks] - 1])
        views["source"][: len(source_N)] = source_N
        for name, values in (("row_c", row_C), ("first_c", first_C), ("start_c", start_C), ("count_c", count_C)):
            views[name][: len(row_C)] = values
        item_I = cut_tiles(start_C, count_C, TILE_QUERIES)
        views["tile"][: len(item_I)] = item_I
        self._mixed.send(len(item_I))
        return num_tokens, len(item_I)

    # -- pieces of a step, captured or not

    def _attend_decode(self, layer: int, q_BHD: Tensor, out_BHD: Tensor) -> None:
        device, batch = self._staging.on_device, len(q_BHD)
        work = DecodeWork(
            row_B=device["row"][:batch],
            position_B=device["position"][:batch],
            first_B=device["first"][:batch],
            item_I=device["tail"],
            size_2=device["size"],
        )
        decode_attention(
            q_BHD,
            self.pool.layer(layer),
            self._rows.table_RP,
            work,
            self._scratch,
            out_BHD,
            num_programs=self._programs,
        )

    def _decode_logits(self, size: int) -> Tensor:
        """Return logits of `size` places from what was staged."""
        device = self._staging.on_device
        row_B, position_B = device["row"][:size], device["position"][:size]
        token_B = self._rows.last_R.index_select(0, row_B)
        return self._forward.logits(self._forward.residual(token_B, position_B, row_B, self._attend_decode))

    def _sample(self, logits_NV: Tensor, count: int) -> None:
        """Choose for the staged rows; tokens go to the out buffer and to the rows."""
        device = self._staging.on_device
        sample(
            logits_NV,
            device["inverse"][:count],
            device["uniform"][:count],
            self._sampling,
            device["row"][:count],
            self._rows.last_R,
            self._out_3B[0],
            self._out_3B[1:].view(torch.float32),
        )

    def _bring_out(self, count: int) -> Flight:
        self._turn = (self._turn + 1) % OUT_SLOTS
        host_3B, done = self._out_host[self._turn], torch.cuda.Event()
        host_3B.copy_(self._out_3B, non_blocking=True)
        done.record()
        return GpuFlight(host_3B, count, done)

    # -- graphs

    @torch.inference_mode()
    def capture_all(self) -> int:
        """Capture a graph for every planned batch size, the largest first, so that the others reuse its memory. Return
        how many."""
        self._check_addresses()
        for size in reversed(self._batches):
            self._capture(size, plain=True)
        return len(self._graphs)

    def _capture(self, size: int, plain: bool) -> None:
        """Capture decoding of `size` places. The pass before it, which compiles kernels, runs on padding."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._stage_padding(size)
            self._sample(self._decode_logits(size), size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                logits_NV = self._decode_logits(size)
                if plain:
                    self._sample(logits_NV, size)
                else:
                    self._logits_of[size] = logits_NV
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[size, plain] = graph

    def _stage_padding(self, size: int) -> None:
        views = self._staging.begin()
        for name, value in (("row", self._rows.max_running), ("position", -1), ("first", 0), ("inverse", 1.0)):
            views[name][:size] = value
        views["uniform"][:size], views["size"][:] = 0.0, (0, self.pool.page_tokens)
        self._staging.send(0)

    def _check_addresses(self) -> None:
        """Graphs hold addresses. Virtual memory keeps those over moves; where there is none, or the owner of shared
        weights made them anew, capture anew."""
        addresses = (self.pool.tensor.data_ptr(), *(tensor.data_ptr() for tensor in self._tensors))
        if addresses == self._addresses:
            return
        captured, self._addresses = list(self._graphs), addresses
        self._descriptors = [describe_pages(self.pool.layer(index)) for index in range(len(self._descriptors))]
        self._graphs.clear()
        self._logits_of.clear()
        if captured:
            self.emit("engine.graphs_recaptured", graphs=len(captured), reason="weights or KV pages have new addresses")
            for size, plain in captured:
                self._capture(size, plain)
