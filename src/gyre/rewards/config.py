"""Config of the rewards room: which parts a score has, how they run. In: a `[rewards]` table.

[[rewards.parts]]
kind = "answer"

[[rewards.parts]]
kind = "format"
weight = 0.2
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gyre.core.config import Section

FORMS = ("tag", "boxed", "hash")


class _Part(Section):
    weight: float = 1.0
    """Factor of this part in the score. A negative one makes it a penalty."""

    name: str = ""
    """Name in scores, curves and events; empty: the kind."""

    limit_s: float = Field(default=5.0, gt=0.0)
    """Longest time in seconds for one completion; past it the part fails with outcome "timeout". A
    part that failed counts as the least that it can give."""

    @model_validator(mode="before")
    @classmethod
    def name_after_kind(cls, values: Any) -> Any:
        kind = cls.model_fields.get("kind")
        if isinstance(values, dict) and not values.get("name") and kind is not None:
            return {**values, "name": kind.default}
        return values

    @property
    def total_limit_s(self) -> float:
        """Seconds until the worker of a check is killed."""
        return self.limit_s

    @property
    def values(self) -> tuple[float, ...]:
        """Values that the part can give, or their bounds, as far as known beforehand."""
        return (0.0, 1.0)

    @property
    def failed_value(self) -> float:
        """Value of a check that timed out, died, raised or gave no number: the one that contributes
        least to the score. With a negative weight that is the largest."""
        return min(self.values, key=lambda value: self.weight * value)

    @property
    def needs_num_tokens(self) -> bool:
        """Return whether the part judges by the number of tokens: words cannot stand for them."""
        return False

    def for_check(self) -> dict[str, Any]:
        """Return what the worker's check needs, as plain data."""
        return self.model_dump(mode="json")


class AnswerPart(_Part):
    """Compares the completion's answer with the task's."""

    kind: Literal["answer"] = "answer"
    """Answer matcher."""

    label_field: str = "answer"
    """Field of the task with the right answer."""

    forms: tuple[Literal["tag", "boxed", "hash", "number", "plain"], ...] = FORMS
    """Where the answer stands: <answer> tag, \\boxed{}, after ####, last number, all text; the
    first form that is there decides, and its last mark."""

    compare: Literal["auto", "exact", "numeric", "latex"] = "auto"
    """How answers are compared: exact (same characters), numeric (both one number), latex (same
    value by math-verify, which evaluates: the question counts as an answer), auto (by the label: a
    number is compared as numeric, an option's letter as that, words as words, anything else as
    latex). docs/rewards.md has the rules."""

    tolerance: float = Field(default=1e-6, ge=0.0)
    """Relative difference up to which an answer is a label that is not whole; never more than half
    a unit of the label's last decimal. Whole labels are exact."""

    tail_chars: int = Field(default=0, ge=0)
    """Read only this many characters from the end of the completion; 0 reads all."""

    right: float = 1.0
    """Value for a right answer."""

    wrong: float = 0.0
    """Value for a wrong answer."""

    unreadable: float = 0.0
    """Value when no answer is found or it cannot be read."""

    @property
    def values(self) -> tuple[float, ...]:
        return (self.right, self.wrong, self.unreadable)


class FormatPart(_Part):
    """Checks for one <think> block and then one <answer> block, both with something inside, and
    nothing else."""

    kind: Literal["format"] = "format"
    """R1 format checker."""

    opened_by_prompt: bool = False
    """The prompt ends with <think>, so completions begin inside it."""

    partial: bool = False
    """When the format as a whole is not met, give 0.2 for each of the four tags that stands once;
    nothing when those are out of order, and nothing for the two tags of an empty block."""


class LengthPart(_Part):
    """Penalizes completions near the length limit: 0 down to -1."""

    kind: Literal["length"] = "length"
    """DAPO's soft overlong punishment."""

    soft_tokens: int = Field(ge=0)
    """Length in tokens up to which there is no penalty."""

    max_tokens: int = Field(ge=1)
    """Length in tokens from which the penalty is whole."""

    @property
    def values(self) -> tuple[float, ...]:
        return (-1.0, 0.0)

    @property
    def needs_num_tokens(self) -> bool:
        return True

    @model_validator(mode="after")
    def check_order(self) -> LengthPart:
        if self.soft_tokens >= self.max_tokens:
            raise ValueError(
                f"soft_tokens = {self.soft_tokens}: need less than max_tokens = {self.max_tokens}"
            )
        return self


class LimitsConfig(Section):
    """What one program may use in the sandbox."""

    wall_s: float = Field(default=5.0, gt=0.0)
    """Seconds of wall time per start."""

    cpu_s: float = Field(default=4.0, gt=0.0)
    """Seconds of CPU time of all its processes."""

    memory_mib: int = Field(default=512, ge=32)
    """Memory of all its processes in MiB."""

    processes: int = Field(default=16, ge=1)
    """Processes and threads at once."""

    output_kib: int = Field(default=1024, ge=1)
    """Standard output and error in KiB."""

    file_mib: int = Field(default=16, ge=1)
    """Files in its work folder in MiB."""


class CodePart(_Part):
    """Runs the completion's program against the task's tests in the sandbox."""

    kind: Literal["code"] = "code"
    """Code executor."""

    tests_field: str = "tests"
    """Field of the task with the tests: input and output, calls, asserts, check functions
    (docs/code_tests.md)."""

    function_field: str = "function"
    """Field of the task with the name of the function under test."""

    setup_field: str = "setup"
    """Field of the task with source that goes before the completion's program."""

    score: Literal["fraction", "all"] = "fraction"
    """Value: share of tests passed, or 1 only when all pass."""

    max_tests: int = Field(default=0, ge=0)
    """Use only the first so many tests; 0 uses all."""

    tolerance: float = Field(default=1e-6, ge=0.0)
    """Difference up to which decimals are the same."""

    limit_s: float = Field(default=20.0, gt=0.0)
    """Seconds for all tests of one completion; tests not begun by then have failed."""

    limits: LimitsConfig = LimitsConfig()
    """What one start of the program may use."""

    def for_check(self) -> dict[str, Any]:
        limits = {
            "wall_s": self.limits.wall_s,
            "cpu_s": self.limits.cpu_s,
            "memory_bytes": self.limits.memory_mib << 20,
            "processes": self.limits.processes,
            "output_bytes": self.limits.output_kib << 10,
            "file_bytes": self.limits.file_mib << 20,
        }
        return {**self.model_dump(mode="json"), "limits": limits}

    @property
    def total_limit_s(self) -> float:
        return self.limit_s + 30.0  # the sandbox keeps time itself; this is for its own faults


class FunctionPart(_Part):
    """A reward function of the user's."""

    kind: Literal["function"] = "function"
    """Python function by dotted path."""

    path: str
    """"module:function", called as function(task, completion, **options), and with prompt, finish
    and num_tokens where it names them; returns a number or (number, reason)."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for every call."""

    failed: float = 0.0
    """Value where the function raises, takes too long or returns no finite number. Where that would
    be worth more than the least that it gave to another completion of the step, it is that."""

    @property
    def values(self) -> tuple[float, ...]:
        return (self.failed,)

    @field_validator("path")
    @classmethod
    def check_path(cls, path: str) -> str:
        module, colon, function = path.partition(":")
        if not (module and colon and function):
            raise ValueError(f'{path!r} is not a dotted path: write "package.module:function"')
        return path


class ReasoningGymPart(_Part):
    """The scorer of the reasoning-gym task that made the problem; may give partial credit."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """reasoning-gym's own scorer."""

    task: str = ""
    """Name of the task; empty: as the problem says."""

    forms: tuple[Literal["tag", "boxed", "hash", "number", "plain"], ...] = FORMS
    """Where the answer stands, as in kind "answer"."""


class ModelPart(_Part):
    """A reward model. Evaluated by the trainer beside the rules; the loop adds its value to the
    score."""

    kind: Literal["model"] = "model"
    """Reward model."""

    path: str
    """Folder of a reward model: hub layout with scalar_head.safetensors."""


RewardPart = Annotated[
    AnswerPart | FormatPart | LengthPart | CodePart | FunctionPart | ReasoningGymPart | ModelPart,
    Field(discriminator="kind"),
]


class RewardsConfig(Section):
    """The score of a rollout: the weighted sum of its parts."""

    parts: tuple[RewardPart, ...] = (AnswerPart(),)
    """What is judged, each with its weight."""

    workers: int = Field(default=0, ge=0)
    """Worker processes; 0 starts one per core, 16 at most."""

    worker_memory_mib: int = Field(default=8192, ge=0)
    """Address space of a worker in MiB; 0 sets no limit. A worker whose rewards come to hold half
    of what is left to it at its start is replaced."""

    max_failed_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """Largest share of a part's checks in a loop step that may fail (time-outs included); past it
    the run stops before it trains on them. 1 goes on whatever happens."""

    deadline_s: float = Field(default=120.0, gt=0.0)
    """Seconds for one call of the scorer; parts that are missing then count as timeouts."""

    sandbox: Literal["auto", "strong", "weak"] = "auto"
    """Isolation of programs: strong refuses to start without; auto falls back, with an event; weak
    asks for none."""

    end_markers: tuple[str, ...] = (
        "<|end|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "</s>",
    )
    """Texts of end tokens; removed from the end of a completion before it is judged."""

    def model_part(self) -> ModelPart | None:
        """Return the learned reward, if there is one."""
        return next((part for part in self.parts if isinstance(part, ModelPart)), None)

    @field_validator("parts")
    @classmethod
    def check_names(cls, parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
        names = [part.name for part in parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two parts are named "{name}": give each its own name')
        return parts
