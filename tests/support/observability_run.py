"""A made-up but lifelike run folder for the tests of the report: cold start, then GRPO, killed once
and resumed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from gyre.observability.events import EventLog
from gyre.observability.hardware import describe_hardware
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans

CONFIG = """# GRPO on procedural arithmetic, from nothing, on a CPU
name = "arith_grpo_cpu"
seed = 0

[model.shape]
family = "qwen3"
hidden_size = 192
num_layers = 4

[data]
source = "reasoning_gym"
task = "chain_sum"
held_out_fraction = 0.1

[objective]
kind = "grpo"
clip_low = 0.2
clip_high = 0.28
kl_coef = 1e-3
"""

MIB = 1 << 20
OWNERS = (
    "engine.weights",
    "engine.kv",
    "actor.params",
    "actor.grads",
    "actor.optimizer",
    "reference",
)


class Clock:
    """Time that passes only when told to."""

    def __init__(self, now: float = 1_760_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


class Writer:
    """Lives one attempt of a run."""

    def __init__(self, folder: Path, clock: Clock, attempt: int, seed: int):
        self.clock, self.rng = clock, random.Random(seed * 1000 + attempt)
        self.log = EventLog(
            folder / "events.jsonl", attempt=attempt, clock=clock, check_schema=False
        )
        self.samples = SampleLog(folder / "samples.jsonl", self.log)
        self.spans = Spans(self.log.emit, clock=clock)
        self.stage = ""

    def phase(
        self, name: str, seconds: float, step: int, inner: dict[str, float] | None = None
    ) -> None:
        with self.spans.phase(name, step=step, stage=self.stage):
            for child, child_s in (inner or {}).items():
                with self.spans.phase(child, step=step, stage=self.stage):
                    self.clock.now += child_s * self.rng.uniform(0.9, 1.1)
            self.clock.now += seconds * self.rng.uniform(0.85, 1.2)
        self.memory(name, step)

    def memory(self, phase: str, step: int) -> None:
        away = {
            "rollout": ("actor.grads", "actor.optimizer", "reference"),
            "score": ("engine.kv", "actor.optimizer"),
            "train": ("engine.kv", "engine.weights", "reference"),
        }.get(phase, ())
        sizes = {
            "engine.weights": 13,
            "engine.kv": 64,
            "actor.params": 13,
            "actor.grads": 13,
            "actor.optimizer": 26,
            "reference": 13,
        }
        table = {}
        for owner in OWNERS:
            size = sizes[owner] * MIB if self.stage == "main" or owner.startswith("actor") else 0
            gone = owner in away
            kept = 0 if gone and owner == "engine.kv" else size
            disk = owner == "reference" and gone
            table[owner] = {"device": 0 if gone else size, "host": kept if gone and not disk else 0,
                            "disk": kept if disk else 0}  # fmt: skip
        used = sum(tiers["device"] for tiers in table.values())
        self.log.emit(
            "memory",
            phase=phase,
            step=step,
            stage=self.stage,
            owners=table,
            device_free_bytes=192 * MIB - used,
        )

    def evaluate(self, step: int, accuracy: float) -> None:
        self.phase("evaluate", 1.6, step)
        self.log.emit(
            "eval.done",
            name="held_out",
            accuracy=round(accuracy, 4),
            n=512,
            step=step,
            stage=self.stage,
        )

    def sft_step(self, step: int, steps: int) -> None:
        self.phase("train", 0.32, step, {"forward_backward": 0.16, "optimizer": 0.03})
        loss = 5.8 * math.exp(-step / (steps / 4)) + 0.42 + self.rng.gauss(0, 0.03)
        self.log.emit(
            "step.done",
            step=step,
            stage=self.stage,
            metrics={
                "loss": loss,
                "token_nll": loss,
                "grad_norm": 2.4 * math.exp(-step / 40) + self.rng.uniform(0.3, 0.6),
                "learning_rate": 1e-3 * min(1, step / 10) * (1 - 0.9 * step / steps),
                "tokens": 4096.0,
                "tokens_per_second": 8600 + self.rng.gauss(0, 260),
                "skipped_updates": 0.0,
                "padding_share": 0.04,
            },
        )

    def grpo_step(self, step: int, steps: int, groups: int) -> None:
        skill = learned(step, steps)
        self.phase("rollout", 0.6, step, {"prefill": 0.09, "decode": 1.1})
        self.phase("score", 0.07, step, {"reference": 0.34})
        self.phase("train", 0.1, step, {"forward_backward": 1.2, "optimizer": 0.06})
        self.phase("handover", 0.02, step)
        rule_s = self.rng.uniform(0.5, 0.8)
        rollout_s, reference_s = rule_s * 0.72, rule_s * self.rng.uniform(0.14, 0.27)
        self.log.emit(
            "reward.window",
            step=step,
            rule_s=rule_s,
            rollout_s=rollout_s,
            reference_s=reference_s,
            hidden_s=rollout_s + reference_s,
        )
        self.log.emit(
            "step.roles",
            step=step,
            seconds=4.0 * rule_s,
            collector_idle_s=0.5 * rule_s,
            learner_idle_s=rule_s,
            synchronous_s=6.5 * rule_s,
        )
        answer, form = (
            skill + self.rng.gauss(0, 0.03),
            min(1.0, 0.93 + 0.07 * skill + self.rng.gauss(0, 0.006)),
        )
        self.log.emit(
            "step.done",
            step=step,
            stage=self.stage,
            metrics={
                "reward": 0.9 * answer + 0.1 * form,
                "reward/answer": answer,
                "reward/format": form,
                "accuracy": answer,
                "length": 46 - 14 * skill + self.rng.gauss(0, 0.8),
                "entropy": 0.5 * (1 - 0.7 * skill) + self.rng.gauss(0, 0.01),
                "kl_reference": 0.02 * step / steps + abs(self.rng.gauss(0, 0.001)),
                "kl_old": abs(self.rng.gauss(0, 2e-4)),
                "clip_fraction": abs(self.rng.gauss(0.012, 0.004)),
                "clip_low_fraction": abs(self.rng.gauss(0.005, 0.002)),
                "clip_high_fraction": abs(self.rng.gauss(0.007, 0.002)),
                "logprob_gap": abs(self.rng.gauss(2.1e-7, 2e-8)),
                "logprob_gap_max": 3.1e-6,
                "loss": self.rng.gauss(0, 0.004),
                "grad_norm": self.rng.uniform(0.18, 0.5),
                "learning_rate": 3e-4,
                "tokens_per_second": 3900 + self.rng.gauss(0, 150),
                "ratio": 1 + self.rng.gauss(0, 3e-4),
                "tokens": 11800 + self.rng.gauss(0, 300),
                "skipped_updates": 0.0,
                "padding_share": abs(self.rng.gauss(0.05, 0.01)),
            },
        )
        for group in range(groups):
            self.group(step, group, skill)
        if step % 17 == 5:
            self.log.emit(
                "retry.sandbox",
                counted=True,
                reason="worker did not answer within 2.0 s",
                attempt=1,
            )
        if step == 31:
            self.log.emit("drop.rollout", reason="deadline of 20 s", rollout_id="r31-4-2", count=2)

    def group(self, step: int, number: int, skill: float) -> None:
        numbers = [self.rng.randint(10, 99) for _ in range(3)]
        prompt = (
            f"<|user|>\nCalculate {numbers[0]} + {numbers[1]} - "
            f"{numbers[2]}.<|end|>\n<|assistant|>\n"
        )
        for member in range(8):
            self.samples.write(self.sample(step, number, member, numbers, prompt, skill))

    def sample(
        self, step: int, group: int, member: int, numbers: list[int], prompt: str, skill: float
    ) -> dict[str, Any]:
        a, b, c = numbers
        right = self.rng.random() < skill
        result = a + b - c + (0 if right else self.rng.choice([-10, -1, 1, 9, 10]))
        text = (
            f"<think>{a} + {b} = {a + b}\n{a + b} - {c} = "
            f"{result}</think>\n<answer>{result}</answer><|end|>"
        )
        pieces = split_pieces(text)
        logprobs = [round(-abs(self.rng.gauss(0, 0.02)), 4) for _ in pieces]
        for at, piece in enumerate(pieces):
            if piece.isdigit():
                logprobs[at] = round(-self.rng.expovariate(1.2 if not right else 6), 4)
        return {
            "step": step,
            "stage": self.stage,
            "rollout_id": f"r{step}-{group}-{member}",
            "group_id": f"g{step}-{group}",
            "prompt": prompt,
            "completion": text,
            "tokens": [hash_id(piece) for piece in pieces],
            "pieces": pieces,
            "logprobs": logprobs,
            "score": 1.0 if right else 0.1,
            "finish": "stop" if self.rng.random() > 0.04 else "length",
            "parts": [
                {
                    "name": "answer",
                    "value": float(right),
                    "weight": 0.9,
                    "outcome": "ok",
                    "reason": f"found {result}, wanted {a + b - c}"
                    if not right
                    else f"{result} equals the answer",
                },
                {
                    "name": "format",
                    "value": 1.0,
                    "weight": 0.1,
                    "outcome": "ok",
                    "reason": "think and answer tags in order",
                },
            ],
        }


def learned(step: int, steps: int) -> float:
    return 0.46 + 0.5 / (1 + math.exp(-(step - steps * 0.3) / (steps * 0.09)))


def hash_id(piece: str) -> int:
    return sum(ord(char) * 31**at for at, char in enumerate(piece)) % 509


def split_pieces(text: str) -> list[str]:
    pieces: list[str] = []
    for special in ("<think>", "</think>", "<answer>", "</answer>", "<|end|>"):
        text = text.replace(special, f"\0{special}\0")
    for part in text.split("\0"):
        pieces += [part] if part.startswith("<") else list(part)
    return pieces


def write_run(
    folder: Path, *, sft_steps: int = 120, grpo_steps: int = 80, groups: int = 6, seed: int = 0
) -> Path:
    """Write a whole run into `folder`: two stages; the second is killed at two thirds and
    resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    plan = {
        "batch": {
            "prompts_per_step": 32,
            "completions_per_prompt": 8,
            "sequences_per_update": 256,
            "tokens_per_chunk": 8192,
        },
        "memory": {"device_budget_bytes": 192 * MIB},
    }
    (folder / "plan.json").write_text(json.dumps(plan, indent=2))
    clock = Clock()
    first = Writer(folder, clock, 1, seed)
    first.log.emit(
        "run.started",
        name="arith_grpo_cpu",
        objective="grpo",
        seed=seed,
        gyre="0.1.0",
        hardware=describe_hardware(),
        model={"family": "qwen3", "num_parameters": 2_100_000},
        stages=[{"name": "cold_start", "steps": sft_steps}, {"name": "main", "steps": grpo_steps}],
    )
    run_cold_start(first, sft_steps)
    killed_at, saved_at = grpo_steps * 2 // 3, grpo_steps // 2
    position = run_grpo(first, 1, killed_at, grpo_steps, groups, save_at=saved_at)
    first.log.close()
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"seq": 99999, "t": 17600')  # the line that the kill cut off
    clock.now += 5400
    second = Writer(folder, clock, 2, seed)
    second.log.fence(position["attempt"], position["seq"], step=saved_at)
    second.stage = "main"
    run_grpo(second, saved_at + 1, grpo_steps, grpo_steps, groups, save_at=grpo_steps)
    second.log.emit("run.done", step=grpo_steps, version=sft_steps + grpo_steps)
    second.log.close()
    return folder


def run_cold_start(writer: Writer, steps: int) -> None:
    writer.stage = "cold_start"
    writer.log.emit("stage.started", stage="cold_start", steps=steps)
    writer.evaluate(0, 0.0)
    for step in range(1, steps + 1):
        writer.sft_step(step, steps)
    writer.evaluate(steps, 0.459)


def run_grpo(
    writer: Writer, start: int, stop: int, steps: int, groups: int, *, save_at: int
) -> dict[str, int]:
    position: dict[str, int] = {}
    if start == 1:
        writer.stage = "main"
        writer.log.emit("stage.started", stage="main", steps=steps)
    for step in range(start, stop + 1):
        writer.grpo_step(step, steps, groups if step % 4 == 1 or step == steps else 0)
        if step % max(1, steps // 8) == 0 or step == steps:
            writer.evaluate(step, learned(step, steps) - 0.02)
        if step == save_at:
            writer.phase("snapshot", 0.2, step)
            writer.log.emit("snapshot.saved", step=step)
            position = writer.log.position()
    return position
