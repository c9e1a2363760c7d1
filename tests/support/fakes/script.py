"""Scripts: what a fake engine recites, in a vocabulary of bytes. In: a request, or a config. Out:
token ids, prompts. Callers: fakes.engine, fakes.source, wire (kind = "fake"), tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fakes.config import FakeEngineConfig, FakeSourceConfig
from gyre.core.records import Prompt, Request
from gyre.core.seeds import derive_seed
from gyre.text.tokenizer import Tokenizer

END, PAD = "<|end|>", "<|pad|>"

# (request, index of the completion, weight version) -> every token of the completion, the end token
# included
Script = Callable[[Request, int, int], Sequence[int]]


def byte_tokenizer() -> Tokenizer:
    """A real Tokenizer in which every byte is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    end_id, pad_id = backend.token_to_id(END), backend.token_to_id(PAD)
    assert end_id is not None and pad_id is not None
    return Tokenizer(backend, eos_ids=(end_id,), bos_id=None, pad_id=pad_id, chat_template="")


def table_script(table: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> Script:
    """Recite from a dictionary: prompt text -> the texts of its completions, taken in turn by
    index. A prompt that it does not hold is answered with nothing but the end token."""

    def recite(request: Request, index: int, version: int) -> Sequence[int]:
        answers = table.get(tokenizer.decode(request.tokens), ("",))
        return [*tokenizer.encode(answers[index % len(answers)]).tolist(), tokenizer.end_id]

    return recite


def learning_script(config: FakeEngineConfig, tokenizer: Tokenizer) -> Script:
    """Answer "a+b=" rightly with a probability that rises with the version: a policy that learns,
    without a model. Pure: the draw depends on the request's seed, the index and nothing else."""

    def recite(request: Request, index: int, version: int) -> Sequence[int]:
        left, _, right = tokenizer.decode(request.tokens).removesuffix("=").partition("+")
        answer = int(left) + int(right) if left.isdigit() and right.isdigit() else 0
        draw = random.Random(derive_seed(request.seed, "fake", index)).random()
        wrong = draw >= config.start_accuracy + config.gain_per_version * version
        return [*tokenizer.encode(str(answer + wrong)).tolist(), tokenizer.end_id]

    return recite


def sum_prompts(
    config: FakeSourceConfig, tokenizer: Tokenizer
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Return (train, held out): different sums of two numbers below 100."""
    chosen = random.Random(derive_seed(config.seed, "sums")).sample(
        range(10_000), config.num_prompts
    )
    prompts = []
    for pick in chosen:
        left, right = divmod(pick, 100)
        text = f"{left}+{right}="
        prompts.append(
            Prompt(
                prompt_id=f"{derive_seed('fake', text):016x}",
                tokens=tokenizer.encode(text).astype(np.int32),
                text=text,
                task={"answer": str(left + right)},
                source="fake",
            )
        )
    num_held_out = int(config.num_prompts * config.held_out_fraction)
    return tuple(prompts[num_held_out:]), tuple(prompts[:num_held_out])
