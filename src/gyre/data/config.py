"""Config of the data: which problems, how rendered, how split. In: a `[data]` table. Out: a
DataConfig."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gyre.core.config import Section


class DataConfig(Section):
    """One source of problems, examples or preference pairs. An empty text means "none"."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "datasets"] = "reasoning_gym"
    """Procedural problems, a .jsonl or .jsonl.gz file, a .parquet file, or a `datasets` name or
    saved folder."""

    task: str = "chain_sum"
    """reasoning_gym: name of the task."""

    task_options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: options of the task, for example min_terms, max_digits."""

    num_problems: int = Field(default=4096, ge=1)
    """reasoning_gym: different problems to generate, held-out ones included."""

    seed: int = Field(default=0, ge=0)
    """reasoning_gym: chooses which problems are generated; pairs: chooses the wrong answers. Not
    the order."""

    answer_only_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """reasoning_gym: share of worked examples that leave <think> empty and only state the answer,
    as data of mixed quality does; which ones is decided by a hash of seed and prompt. Of pairs:
    share of the rejected responses."""

    path: str = ""
    """jsonl, parquet: the file. datasets: local folder written by save_to_disk, or a hub name."""

    name: str = ""
    """datasets: configuration of the data set, for example "main"."""

    split: str = "train"
    """datasets: split to read."""

    held_out_path: str = ""
    """jsonl, parquet: a file with the held-out rows; training rows with the same prompt are
    dropped."""

    held_out_split: str = ""
    """datasets: split with the held-out rows; training rows with the same prompt are dropped."""

    held_out_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of prompts held out, decided by a hash of the prompt's text alone; unused with
    held_out_path or _split."""

    prompt_field: str = "prompt"
    """Row field with the prompt: a text, or a list of {"role", "content"} messages. Of a list that
    ends with the assistant's turn, what is before that turn; it is refused where another field
    holds a response too. Where it is missing, or is chosen_field or rejected_field, the prompt is
    the turns that these two conversations share."""

    answer_field: str = "answer"
    """Row field with the right answer; empty when rewards need none (tests, reward model)."""

    answer_pattern: str = ""
    """Regular expression found in the answer field; the first group (or all) of its last match is
    the answer."""

    response_field: str = "response"
    """Row field with the response to learn (sft): a text, or a conversation that ends with it. May
    be prompt_field."""

    chosen_field: str = "chosen"
    """Row field with the better response (rm, dpo)."""

    rejected_field: str = "rejected"
    """Row field with the worse response (rm, dpo)."""

    system: str = ""
    """System message before each prompt, for example one that asks for
    <think>…</think><answer>…</answer>. Refused where the template has no place for it, or a row has
    a system message of its own."""

    template: str = "chat"
    """"chat" (the tokenizer's chat template) or a text with {prompt}, and {system} where `system`
    is set. BOS is put before the text where the vocabulary wants one and the text does not spell
    it."""

    template_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, for example enable_thinking = false for Qwen3."""

    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longest prompt in tokens; 0 sets no limit."""

    max_sequence_tokens: int = Field(default=0, ge=0)
    """Longest prompt with response (sft, rm, dpo) in tokens; 0 sets no limit."""

    overlong: Literal["error", "drop"] = "error"
    """What a longer one does: stop with its place in the file, or be dropped and counted."""

    @model_validator(mode="after")
    def check_source(self) -> DataConfig:
        if self.source == "reasoning_gym" and (
            self.path or self.held_out_path or self.held_out_split
        ):
            raise ValueError(
                'path, held_out_path and held_out_split are of no use with source = "reasoning_gym"'
            )
        if self.source != "reasoning_gym" and not self.path:
            raise ValueError(f'source = "{self.source}" needs path')
        if self.held_out_path and self.source == "datasets":
            raise ValueError('source = "datasets" takes held_out_split, not held_out_path')
        if self.held_out_split and self.source != "datasets":
            raise ValueError(f'source = "{self.source}" takes held_out_path, not held_out_split')
        if self.template != "chat" and "{prompt}" not in self.template:
            raise ValueError(
                f'template = {self.template!r}: need "chat" or a text that holds {{prompt}}'
            )
        if self.template != "chat" and self.system and "{system}" not in self.template:
            raise ValueError(
                f"system is set, and template = {self.template!r} has no {{system}} where it "
                "could stand: put it "
                "there, or leave system out"
            )
        return self
