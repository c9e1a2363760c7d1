"""A checkpoint whose model recites: each token is followed by one other, whatever came before. In:
a folder, texts by the character that begins them. Out: a model in hub layout.

A prompt ends with the last character of its last message, which so chooses the text of a greedy
answer. Nothing but the weights makes it so: the engine, the parsers and the server are the real
ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

WIDTH = 1024  # above the size of the vocabulary, so that any table of logits can be had
SURE = 16.0  # logit of the next token
END = "<|end|>"
# What a template of the Hermes kind shows: the server reads off it how calls and thoughts are written.
TEMPLATE = r"""
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools> <tool_call>{"name": <name>, "arguments": <object>}</tool_call>' }}{% endif %}
{%- for m in messages %}
    {{- '\n' + m.role + ': ' }}
    {%- if m.reasoning_content is string %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}
    {{- m.content }}
{%- endfor %}"""


def save_reciting(
    folder: Path, texts: Mapping[str, str], *, endless: Mapping[str, str], context_tokens: int
) -> Path:
    """`endless` texts begin again at their end. Other characters begin the first text."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True)
    alphabet = byte_characters()
    used = set(alphabet.values())
    vocab = {char: place for place, char in enumerate(alphabet.values())}
    follows: dict[int, int] = {}
    end_id = len(vocab) + sum(len(cut(text)) for text in (*texts.values(), *endless.values()))
    for start, text in {**texts, **endless}.items():
        last = begin = vocab[alphabet[start.encode()[0]]]
        for piece in unique_pieces(text, alphabet, used):
            follows[last] = last = vocab[piece] = len(vocab)
        follows[last] = follows[begin] if start in endless else end_id
    assert end_id < WIDTH
    default = follows[vocab[alphabet[next(iter(texts)).encode()[0]]]]
    while len(vocab) < end_id:
        vocab[f"¤{len(vocab)}"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    assert tokenizer.eos_token_id == end_id
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=end_id + 1, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, eos_token_id=end_id,
        max_position_embeddings=context_tokens, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        vectors = torch.randint(0, 2, (end_id + 1, WIDTH), generator=draws) * 2.0 - 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(vectors)
        logits = torch.zeros(end_id + 1, end_id + 1)
        for token in range(end_id):
            # others come near now and then, so that probabilities differ
            near = torch.randint(len(alphabet), end_id, (2,), generator=draws)
            logits[token, near] = SURE - 0.4 - 7 * torch.rand(2, generator=draws)
            logits[token, follows.get(token, default)] = SURE
        model.lm_head.weight.copy_(torch.linalg.lstsq(vectors, logits).solution.T)
    model.save_pretrained(folder)
    return folder


def cut(text: str) -> list[str]:
    """The words of a text with the space before each."""
    return re.findall(r"\s*[\w']+|\s*[^\w\s]+|\s+", text)


def unique_pieces(text: str, alphabet: Mapping[int, str], used: set[str]) -> list[str]:
    """Words, or several in one, such that no two pieces of the vocabulary are the same."""
    pieces: list[str] = []
    pending = ""
    for word in cut(text):
        pending += "".join(alphabet[byte] for byte in word.encode())
        if pending not in used:
            pieces.append(pending)
            used.add(pending)
            pending = ""
    if pending:
        pieces[-1] += pending
        assert pieces[-1] not in used
        used.add(pieces[-1])
    return pieces


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    found = {byte: chr(byte) for byte in kept}
    found.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return dict(sorted(found.items()))
