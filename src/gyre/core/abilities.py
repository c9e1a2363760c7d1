"""Abilities: what an engine can do beyond tokens in and tokens out. In: an engine's record, and a
request or a commit. Out: None, or why the engine refuses it, by name. Pure.

Every engine answers `abilities()`. The contract suite is parametrized by the record, so that what
an engine says of itself is tested both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.core.records import CommitPolicy, Request

COMMIT_POLICIES: tuple[CommitPolicy, ...] = ("drain", "keep_prefix", "continue")
SOURCES = ("SharedStorage", "LocalTensors", "LocalShards", "FolderTensors", "RegisteredShards")
MOST_TOP = 1 << 30  # no bound of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbilities:
    """What an engine can do; the defaults are all of the contract."""

    engine: str  # its name and version, for people
    # a draw depends on seed, completion and position alone: an interrupted completion goes on with
    # the tokens that it would have had
    draws_by_position: bool = True
    # the log-prob of the plain softmax beside the processed one, whatever the sampling; without it
    # `raw_logprobs` is NaN where the two differ
    raw_logprobs: bool = True
    truncation_sets: bool = True  # tells the tokens that top-k, top-p and min-p left choosable
    most_top_logprobs: int = MOST_TOP  # best tokens told beside a chosen one
    prompt_logprobs: bool = True
    penalties: bool = True  # repetition, presence and frequency, as docs/sampling.md has them
    logit_bias: bool = True
    min_tokens: bool = True
    stop_strings: bool = True  # where it was built with a tokenizer
    priorities: bool = True
    deadlines: bool = True
    traces: bool = True  # tells when each piece of a prompt was computed
    grammars: bool = False
    commit_policies: tuple[CommitPolicy, ...] = COMMIT_POLICIES
    # `prepare` puts the version beside the running one on the device; without it the version waits
    # in host memory, and `commit` loads it
    prepares_on_device: bool = True
    # of these kinds (`core.offers`) an offer's source may be
    sources: tuple[str, ...] = SOURCES
    sleep_levels: tuple[int, ...] = ()  # in which it can be parked instead of terminated


def find_unable(request: Request, abilities: EngineAbilities) -> str | None:
    """Return what the request asks for and the engine cannot do, or None."""
    sampling = request.sampling
    penalized = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
    truncates = sampling.temperature != 0.0 and (
        sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    )
    asked = (
        ("a grammar", request.grammar is not None, abilities.grammars),
        ("truncation (top_k, top_p, min_p)", truncates, abilities.truncation_sets),
        ("prompt_logprobs", sampling.prompt_logprobs is not None, abilities.prompt_logprobs),
        ("penalties", penalized, abilities.penalties),
        ("logit_bias", bool(sampling.logit_bias), abilities.logit_bias),
        ("min_tokens", sampling.min_tokens > 0, abilities.min_tokens),
        ("stop strings", bool(sampling.stop), abilities.stop_strings),
        ("a priority", request.priority != 0, abilities.priorities),
        ("a deadline", request.deadline_s is not None, abilities.deadlines),
        ("a trace of its prefill", request.traced, abilities.traces),
    )
    missing = [what for what, is_asked, is_able in asked if is_asked and not is_able]
    if sampling.top_logprobs > abilities.most_top_logprobs:
        missing.append(
            f"top_logprobs = {sampling.top_logprobs} (at most {abilities.most_top_logprobs})"
        )
    if not missing:
        return None
    return f"{abilities.engine} cannot do what the request asks for: {', '.join(missing)}"


def find_unable_commit(policy: CommitPolicy, abilities: EngineAbilities) -> str | None:
    """Return why the engine cannot commit by this policy, or None."""
    if policy in abilities.commit_policies:
        return None
    can = ", ".join(abilities.commit_policies)
    return f"{abilities.engine} cannot commit with policy '{policy}'; it takes {can}"
