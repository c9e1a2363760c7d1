"""Load balancer: the effects around routing. In: requests, the engines that take work, what comes
of the requests. Out: an engine for each; what each engine has to do, likely has cached, and was
given.

What is known of an engine ends with its process: its load, and what is believed of its cache. Its
standing and its counts go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gyre.cluster.engine_pool.affinity import (
    PrefixBelief,
    PrefixHasher,
    PrefixSum,
    SessionTable,
)
from gyre.cluster.engine_pool.ejection import (
    EjectionPolicy,
    Standing,
    eject,
    find_share,
    observe,
    return_s,
)
from gyre.cluster.engine_pool.replica import EngineReplica
from gyre.cluster.engine_pool.routing import (
    EngineCandidate,
    RequestWork,
    RoutingPolicy,
    choose,
    estimate_work,
    follow_mean,
    rest_tokens,
)
from gyre.core.events import Emit
from gyre.core.records import EngineStats, Request, RoutingStats


@dataclass(slots=True, kw_only=True, eq=False)
class EngineLife:
    """An engine from the start of its process to its end."""

    member: EngineReplica
    life: int  # no other has this number
    load: int = 0  # what it has still to do, in tokens of a prompt
    page_tokens: int = 0
    belief: PrefixBelief | None = None  # None: nothing is known of its cache
    epoch: int = 0  # how often its cache was dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedPrompt:
    """The keys of a prompt's pages."""

    keys: Sequence[int] = ()
    end: PrefixSum = field(default_factory=PrefixSum)  # of all its tokens
    num_shared: int = 0  # pages that a cache may give; an engine computes the last token itself


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedRequest:
    """A request at an engine, and what it counts for there."""

    engine: EngineLife
    prompt_work: int  # until its first token has come
    answer_work: int  # of each completion that has not ended
    num_open: int
    prompt: HashedPrompt
    epoch: int  # of the engine, when it was placed


class LoadBalancer:
    """Chooses among the engines of these names by `policy`. Without `ejection` none is
    ejected."""

    def __init__(
        self,
        policy: RoutingPolicy,
        names: Sequence[str],
        *,
        ejection: EjectionPolicy | None,
        seed: int,
        emit: Emit,
    ) -> None:
        self._policy: RoutingPolicy = policy
        self._ejection = ejection
        self._emit = emit
        self._hasher = PrefixHasher(seed)
        self._sessions = SessionTable()
        self._engines: dict[str, EngineLife] = {}
        self._places = {name: place for place, name in enumerate(names)}
        self._standings = dict.fromkeys(names, Standing())
        self._counts = dict.fromkeys(names, RoutingStats())
        self._answered: Counter[str] = Counter()
        self._lives = 0
        self._turn = 0
        self._mean_answer: float | None = None
        self._ignores_ejections = False

    # What is known of the engines
    # ----------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Take in an engine that was not there at the start, or is back under its name."""
        self._places.setdefault(name, len(self._places))
        self._standings.setdefault(name, Standing())
        self._counts.setdefault(name, RoutingStats())

    def num_routed(self, name: str) -> int:
        """Return the requests that the engine of this name was given, in all its lives."""
        return self._counts[name].requests if name in self._counts else 0

    def take_answered(self) -> dict[str, int]:
        """Return the completions that each engine has ended whole since the last call, by name."""
        answered, self._answered = self._answered, Counter()
        return dict(answered)

    def learn(self, member: EngineReplica, stats: EngineStats) -> None:
        """Take in how large the prefix cache of an engine is that has just started."""
        engine = self._life_of(member)
        has_cache = stats.prefix_page_tokens > 0 and stats.pages_total > 0
        engine.page_tokens = stats.prefix_page_tokens
        engine.belief = PrefixBelief(stats.pages_total) if has_cache else None

    def forget(self, member: EngineReplica) -> None:
        """Note that an engine has dropped its cache, as it does with new weights."""
        engine = self._life_of(member)
        engine.epoch += 1
        if engine.belief is not None:
            engine.belief.forget()

    def lose(self, member: EngineReplica, now_s: float) -> None:
        """Note the end of an engine's process. The next one gets its share slowly."""
        engine = self._engines.get(member.name)
        if engine is not None and engine.member is member:
            del self._engines[member.name]
        if self._ejection is not None:
            self._eject(member.name, now_s)

    def look(self, members: Sequence[EngineReplica], now_s: float) -> None:
        """Eject engines that stand still, and let those return that go on."""
        if self._ejection is None:
            return
        for member in members:
            before = self._standings[member.name]
            still_s = member.still_s
            after = observe(before, still_s=still_s, now_s=now_s, policy=self._ejection)
            if after.state == "ejected" != before.state:
                self._eject(member.name, now_s)
                requests = len(member.unanswered)
                self._emit("engine.ejected", engine=member.name, still_s=still_s, requests=requests)
                continue
            self._standings[member.name] = after
            if after.state == "returning" != before.state:
                takes_s = return_s(after, self._ejection)
                self._emit("engine.returning", engine=member.name, return_s=takes_s)

    def stats(self, member: EngineReplica, now_s: float) -> RoutingStats:
        """Return what the engine was given, and its share of what comes."""
        engine = self._engines.get(member.name)
        counts = self._counts[member.name]
        return replace(
            counts,
            share=self._share(member.name, now_s),
            load=0 if engine is None else engine.load,
            believed_pages=0 if engine is None or engine.belief is None else len(engine.belief),
            sessions=len(self._sessions),
        )

    # A request from its choice to its end
    # ----------------------------------------------------------------------------------------------

    def place(
        self,
        requests: Sequence[Request],
        members: Sequence[EngineReplica],
        *,
        outstanding: Mapping[str, int],
        now_s: float,
    ) -> list[PlacedRequest]:
        """Return where each of the requests is placed, in order, each counted before the next is
        placed. `outstanding`: tokens that each engine has still to compute at most, for policies
        that do not estimate."""
        self.look(members, now_s)
        engines = [self._life_of(member) for member in members]
        shares = {engine.life: self._share(engine.member.name, now_s) for engine in engines}
        self._note_ignored(members, shares)
        loads = {
            engine.life: engine.load if self.estimates else outstanding[engine.member.name]
            for engine in engines
        }
        all_placed = []
        for request in requests:
            found = self._place_one(request, engines, loads, shares)
            loads[found.engine.life] += found.prompt_work + found.answer_work * found.num_open
            all_placed.append(found)
        return all_placed

    def _place_one(
        self,
        request: Request,
        engines: Sequence[EngineLife],
        loads: Mapping[int, int],
        shares: Mapping[int, float],
    ) -> PlacedRequest:
        salt, session_id, session = request.tenant_salt, request.session_id, None
        prompts: Mapping[int, HashedPrompt] = {}
        if self.estimates:
            work = estimate_work(request, self._mean_answer)
            prompts = self._hash_prompt(request, engines)
            session = self._sessions.find(salt, session_id) if session_id else None
        else:
            work = RequestWork(prompt_tokens=len(request.tokens), answer_work=rest_tokens(request))
        candidates = [
            EngineCandidate(
                name=engine.member.name,
                place=self._places[engine.member.name],
                load=loads[engine.life],
                share=shares[engine.life],
                hit_tokens=count_hit(engine, prompts.get(engine.page_tokens)),
                has_session=engine.life == session,
                num_routed=self._counts[engine.member.name].requests if self.estimates else 0,
            )
            for engine in engines
        ]
        chosen = choose(candidates, work, policy=self._policy, turn=self._turn)
        self._turn = chosen.place + 1
        engine = self._engines[chosen.name]
        if self.estimates and session_id:
            self._sessions.note(salt, session_id, engine.life)
        self._count(request, chosen, moved=session in loads and not chosen.has_session)
        return make_placed(request, work, chosen, engine, prompts.get(engine.page_tokens))

    @property
    def estimates(self) -> bool:
        """True where loads are estimated, instead of what is left at most."""
        return self._policy == "prefix"

    def begin(self, placed: PlacedRequest) -> None:
        """Note that a request's first token has come: its prompt is computed."""
        placed.engine.load -= placed.prompt_work
        placed.prompt_work = 0

    def end_one(
        self, placed: PlacedRequest, tokens: Sequence[np.ndarray], *, is_whole: bool
    ) -> None:
        """Note the end of a completion with all its tokens, whose KV stays in the cache. One that
        is not whole, since it was broken off, says nothing about the length of answers."""
        self.begin(placed)
        placed.num_open -= 1
        engine, prompt = placed.engine, placed.prompt
        engine.load -= placed.answer_work
        count = sum(map(len, tokens))
        if is_whole:
            self._mean_answer = follow_mean(self._mean_answer, count)
            self._answered[engine.member.name] += 1
        if engine.belief is None or placed.epoch != engine.epoch:
            return
        room = engine.belief.capacity_pages * engine.page_tokens - prompt.end.num_tokens
        if count > room or not prompt.end.num_tokens:
            return  # the engine cannot keep it whole
        more, _ = self._hasher.extend(prompt.end, np.concatenate(tokens), engine.page_tokens)
        engine.belief.remember([*prompt.keys, *more])

    def release(self, placed: PlacedRequest) -> None:
        """Note that a request is at its engine no more."""
        placed.engine.load -= placed.prompt_work + placed.num_open * placed.answer_work
        placed.prompt_work = placed.num_open = 0

    # Parts
    # ----------------------------------------------------------------------------------------------

    def _life_of(self, member: EngineReplica) -> EngineLife:
        engine = self._engines.get(member.name)
        if engine is None or engine.member is not member:
            self._lives += 1
            engine = self._engines[member.name] = EngineLife(member=member, life=self._lives)
        return engine

    def _share(self, name: str, now_s: float) -> float:
        if self._ejection is None:
            return 1.0
        return find_share(self._standings[name], now_s, self._ejection)

    def _eject(self, name: str, now_s: float) -> None:
        before = self._standings[name]
        self._standings[name] = eject(before, now_s)
        if before.state != "ejected":
            counts = self._counts[name]
            self._counts[name] = replace(counts, ejections=counts.ejections + 1)

    def _note_ignored(self, members: Sequence[EngineReplica], shares: Mapping[int, float]) -> None:
        """Emit once that all engines are ejected, so that requests go to them all the same."""
        ignores = not any(shares.values())
        if ignores and not self._ignores_ejections:
            names = [member.name for member in members]
            self._emit("engine.ejections_ignored", engines=names)
        self._ignores_ejections = ignores

    def _hash_prompt(
        self, request: Request, engines: Sequence[EngineLife]
    ) -> dict[int, HashedPrompt]:
        """Return the keys by the size of a page, of which there is one unless engines differ."""
        longest: dict[int, int] = {}
        for engine in engines:
            if engine.belief is not None:
                most = engine.belief.capacity_pages * engine.page_tokens
                longest[engine.page_tokens] = max(most, longest.get(engine.page_tokens, 0))
        begin = self._hasher.begin(request.tenant_salt)
        found: dict[int, HashedPrompt] = {}
        tokens = np.asarray(request.tokens)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            return found  # no ids: every engine refuses it
        for page_tokens, most in longest.items():
            if len(tokens) > most:
                continue  # no engine keeps it whole
            keys, end = self._hasher.extend(begin, tokens, page_tokens)
            shared = max(0, len(tokens) - 1) // page_tokens
            found[page_tokens] = HashedPrompt(keys=keys, end=end, num_shared=shared)
        return found

    def _count(self, request: Request, chosen: EngineCandidate, *, moved: bool) -> None:
        """Count as the engine does: the prompt of a sibling completion is a hit."""
        counts = self._counts[chosen.name]
        siblings = (request.sampling.n - 1) * len(request.tokens)
        self._counts[chosen.name] = replace(
            counts,
            requests=counts.requests + 1,
            believed_hit_tokens=counts.believed_hit_tokens + chosen.hit_tokens + siblings,
            sessions_kept=counts.sessions_kept + int(chosen.has_session),
            sessions_moved=counts.sessions_moved + int(moved),
        )


def count_hit(engine: EngineLife, prompt: HashedPrompt | None) -> int:
    """Return how many of the prompt's tokens the engine likely has."""
    if prompt is None or engine.belief is None:
        return 0
    return engine.page_tokens * engine.belief.count_pages(prompt.keys[: prompt.num_shared])


def make_placed(
    request: Request,
    work: RequestWork,
    chosen: EngineCandidate,
    engine: EngineLife,
    prompt: HashedPrompt | None,
) -> PlacedRequest:
    """Count the request for its engine."""
    n = request.sampling.n
    placed = PlacedRequest(
        engine=engine,
        prompt_work=work.prompt_tokens - chosen.hit_tokens,
        answer_work=work.answer_work // n,
        num_open=n,
        prompt=prompt or HashedPrompt(),
        epoch=engine.epoch,
    )
    engine.load += placed.prompt_work + n * placed.answer_work
    if prompt is not None and engine.belief is not None:
        found = chosen.hit_tokens // engine.page_tokens
        engine.belief.remember(prompt.keys, num_found=found)
    return placed
