"""A device without arithmetic: it keeps, for every slot of every page, which token of whom was
written there, and its next token is a hash of what a row's pages hold. So a wrong page, a stale
page, a missing write or a token that came from the wrong place changes an answer, and most fail at
once. It works in order and knows only what a launch tells it.
"""

from __future__ import annotations

import hashlib

import numpy as np

from gyre.core.records import Request
from gyre.engine.scheduler.core import EngineCore
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.step import SampledTokens, Step

PAGE_TOKENS, VOCAB, STOP = 4, 5, 4

Content = tuple[str, int, int, int]  # tenant salt, token, position, version


def next_token(known: np.ndarray) -> int:
    """A model without weights: the next token is a hash of everything before it."""
    return hashlib.blake2b(np.asarray(known, np.int32).tobytes(), digest_size=1).digest()[0] % VOCAB


def answer(request: Request, window: int | None = None) -> list[int]:
    """What one completion must be, computed without an engine. The model sees the newest `window`
    tokens, or all."""
    known = request.tokens.tolist()
    for _ in range(request.sampling.max_tokens):
        known.append(next_token(np.asarray(known[-window:] if window else known)))
        if known[-1] == STOP and not request.sampling.ignore_eos:
            break
    return known[len(request.tokens) :]


class PageMemory:
    """Stands for the KV pool."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], Content] = {}
        self.host: dict[int, dict[int, Content]] = {}  # pages in host memory, by slot
        self.swapped_pages = 0

    def clear(self) -> None:
        self.slots.clear()

    def copy_out(self, pages: np.ndarray, slots: np.ndarray) -> None:
        assert len(set(slots.tolist())) == len(slots)
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            held = {at: self.slots.get((page, at)) for at in range(PAGE_TOKENS)}
            self.host[slot] = {at: content for at, content in held.items() if content is not None}
        self.swapped_pages += len(pages)

    def copy_in(self, slots: np.ndarray, pages: np.ndarray) -> None:
        self.zero_pages(pages)
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            for at, content in self.host[slot].items():
                self.slots[page, at] = content

    def copy(self, source: int, target: int) -> None:
        for offset in range(PAGE_TOKENS):
            self.slots.pop((target, offset), None)
            if (source, offset) in self.slots:
                self.slots[(target, offset)] = self.slots[(source, offset)]

    def zero_pages(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            for offset in range(PAGE_TOKENS):
                self.slots.pop((page, offset), None)


class FakeFlight:
    """Computed at launch, as the device works in order; handed over late, and once."""

    def __init__(self, device: FakeDevice, sampled: SampledTokens) -> None:
        self._device, self._sampled = device, sampled
        self.number = device.launches

    def fetch(self) -> SampledTokens:
        assert self.number > self._device.fetched, "flights must be fetched in order, and once"
        self._device.fetched = self.number
        return self._sampled


class FakeDevice:
    """Stands for the runner."""

    def __init__(self, window: int | None = None) -> None:
        self.pool, self.window = PageMemory(), window
        self.last_token: dict[int, int] = {}  # by row
        self.largest_step = self.launches = self.fetched = self.computed = self.captures = 0
        self.loads: list[tuple[int, int]] = []  # of each launch: decoding rows, prompt tokens
        self.oldest_version = 0  # KV of an older one must not be read any more

    def launch(self, rows: InputBatch, step: Step) -> FakeFlight:
        self.launches += 1
        self.largest_step = max(self.largest_step, step.num_tokens)
        self.computed += step.num_tokens
        self.loads.append((len(step.decode_rows), step.num_tokens - len(step.decode_rows)))
        for row in step.restored_rows.tolist():
            assert rows.computed_R[row] < rows.known_R[row]
            self.last_token[row] = int(rows.tokens_RW[row, rows.computed_R[row]])
        spans = {int(row): (int(rows.computed_R[row]), 1) for row in step.decode_rows}
        for chunk in step.chunks:
            assert chunk.row not in spans and chunk.start + chunk.count <= rows.known_R[chunk.row]
            spans[chunk.row] = (chunk.start, chunk.count)
        written: set[tuple[int, int]] = set()
        for row, (start, count) in spans.items():
            decoding = row in step.decode_rows
            for position in range(start, start + count):
                slot = self._slot(rows, row, position)
                assert slot not in written and slot[0] != 0
                written.add(slot)
                token = self.last_token[row] if decoding else int(rows.tokens_RW[row, position])
                self.pool.slots[slot] = (self._salt(rows, row), token, position, step.version)
        past = {
            row: self._read(rows, row, start, start + count, step)
            for row, (start, count) in spans.items()
        }
        for source, target in step.copies:
            self.pool.copy(source, target)
        return FakeFlight(self, self.choose(step, rows, past))

    def has_moved(self) -> bool:
        return False

    def recapture(self) -> None:
        self.captures += 1

    def choose(self, step: Step, rows: InputBatch, past: dict[int, np.ndarray]) -> SampledTokens:
        sources = [
            *step.decode_rows.tolist(),
            *(step.chunks[i].row for i in step.sample_chunks.tolist()),
        ]
        tokens = [next_token(past[source]) for source in sources]
        for row, at, token in zip(step.sample_rows, step.sample_positions, tokens, strict=True):
            assert at == rows.length_R[row]
            assert (
                rows.generation_R[row]
                == step.sample_generations[step.sample_rows.tolist().index(row)]
                > 0
            )
            self.last_token[int(row)] = token
            # plausible garbage: nobody may use it yet
            rows.tokens_RW[row, at] = rows.tokens_RW[row, at - 1]
        zeros = np.zeros(len(tokens), np.float32)
        return SampledTokens(
            tokens=np.asarray(tokens, np.int32), logprobs=zeros, raw_logprobs=zeros, supports={}
        )

    def _read(self, rows: InputBatch, row: int, start: int, end: int, step: Step) -> np.ndarray:
        """Return the tokens that the row's last token sees. What any of its tokens sees must be its
        own past."""
        first = max(0, start - self.window + 1) if self.window else 0
        held = [self.pool.slots[self._slot(rows, row, position)] for position in range(first, end)]
        assert [content[2] for content in held] == list(range(first, end))
        assert {content[0] for content in held} == {self._salt(rows, row)}
        assert min(content[3] for content in held) >= self.oldest_version
        if rows.kv_version_R[row] != -1:
            assert {content[3] for content in held} == {step.version}
        tokens = np.asarray([content[1] for content in held], np.int32)
        known = min(end, int(rows.known_R[row]))
        assert (tokens[: known - first] == rows.tokens_RW[row, first:known]).all()
        return tokens[-self.window :] if self.window else tokens

    def _slot(self, rows: InputBatch, row: int, position: int) -> tuple[int, int]:
        return int(rows.table_RP[row, position // PAGE_TOKENS]), position % PAGE_TOKENS

    def _salt(self, rows: InputBatch, row: int) -> str:
        return rows.sequence_at(row).request.tenant_salt


def make_core(
    state: SchedulerState,
    device: FakeDevice,
    *,
    budget: int = 64,
    depth: int = 0,
) -> EngineCore:
    """A core of weights 0 over the device, whose pages may go to the host; no token ends an
    answer."""
    return EngineCore(
        state,
        device,  # type: ignore[arg-type]
        token_budget=budget,
        version=0,
        eos_ids=(),
        tokenizer=None,
        depth=depth,
        host=device.pool,
    )
