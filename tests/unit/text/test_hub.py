"""Hub folders of the Llama 3 and Qwen kind, built small: ids, chat text and end tokens as
transformers has them."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gyre.core.errors import ConfigError, DeadlineError, InputError
from gyre.text import hub_child
from gyre.text.hub_child import PROGRAM, load_apart, load_kept
from gyre.text.render import render_prompt
from gyre.text.tokenizer import Tokenizer, load_tokenizer

WORDS = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_CHAT = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + "
    "'<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' "
    "}}{%- endif %}"
)
QWEN_CHAT = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' "
    "}}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- "
    "'<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
TEXTS = ["What is 12 + 345?", "héllo 日本 🙂 it's", "<answer>-7</answer>\n\n  x"]


def hub_folder(folder: Path, kind: str, *, chat: bool = True) -> Path:
    """Files as the hub has them, with a vocabulary trained on a few sentences."""
    specials = {
        "llama": [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ],
        "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    }[kind]
    backend = tokenizers.Tokenizer(models.BPE())
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        ["the user asked what the answer is"] * 20,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in specials]
    )
    if kind == "llama":
        bos = (specials[0], backend.token_to_id(specials[0]))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", special_tokens=[bos]
        )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    end = specials[-1]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast" if kind == "llama" else "Qwen2Tokenizer",
        "eos_token": end,
    }
    config |= {"bos_token": specials[0]} if kind == "llama" else {"pad_token": specials[0]}
    config |= {"chat_template": LLAMA_CHAT if kind == "llama" else QWEN_CHAT} if chat else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama" if kind == "llama" else "qwen3"})
    )
    further = [
        backend.token_to_id(token)
        for token in ([specials[1], end] if kind == "llama" else [end, specials[0]])
    ]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": further}))
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_folder(tmp_path_factory.mktemp(request.param), request.param)


def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def test_ids_and_text_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), reference(folder)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
    assert ours.vocab_size == len(theirs)
    assert ours.bos_id == theirs.bos_token_id


@pytest.mark.parametrize("system", ["", "Think first."])
def test_chat_prompt_is_that_of_transformers(folder: Path, system: str) -> None:
    ours, theirs = load_tokenizer(folder), reference(folder)
    messages = [{"role": "system", "content": system}] * bool(system) + [
        {"role": "user", "content": "What is 1 + 2?"}
    ]
    tokens, text = render_prompt(ours, "What is 1 + 2?", system=system)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert tokens.tolist() == encoded["input_ids"]
    assert tokens.tolist().count(ours.bos_id) == (1 if ours.bos_id is not None else 0)


def test_end_tokens_are_the_tokenizers_then_the_models(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), reference(folder)
    assert ours.end_id == theirs.eos_token_id
    assert set(ours.eos_ids) == set(
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    )
    assert len(ours.eos_ids) == 2


@pytest.mark.slow
def test_a_tokenizer_read_by_another_process_is_the_same(folder: Path) -> None:
    here, apart = load_tokenizer(folder), load_tokenizer(folder, read=load_apart)
    assert apart.fingerprint == here.fingerprint
    assert [apart.encode(text).tolist() for text in TEXTS] == [
        here.encode(text).tolist() for text in TEXTS
    ]
    turns = [{"role": "user", "content": "What is 1 + 2?"}]
    assert apart.render_chat(turns) == here.render_chat(turns)
    assert apart.prefix_ids == here.prefix_ids and apart.special_ids == here.special_ids


@pytest.mark.slow
def test_that_process_imports_nothing_of_the_folder_where_it_is_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizers", "transformers", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(folder, read=load_apart).fingerprint == load_tokenizer(folder).fingerprint


@pytest.mark.slow
def test_what_another_process_read_serves_others_once_it_is_there(
    folder: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(load_tokenizer, folder, read=partial(load_kept, kept=kept))
        apart = load_tokenizer(folder, read=partial(load_apart, keep=kept))
        assert waiting.result(60).fingerprint == apart.fingerprint


def test_what_does_not_come_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_child, "READ_S", 0.1)
    with pytest.raises(DeadlineError, match="was not read within"):
        load_tokenizer(folder, read=partial(load_kept, kept=tmp_path / "kept.json"))


def test_that_process_does_without_torch(folder: Path) -> None:
    argv = [sys.executable, "-P", "-X", "importtime", "-m", PROGRAM, str(folder)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    imported = {line.split("|")[-1].strip() for line in ran.stderr.splitlines()}
    assert "transformers" in imported and "torch" not in imported


def test_what_another_process_cannot_read_is_refused_as_here(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as here:
        load_tokenizer(tmp_path)
    with pytest.raises(InputError) as apart:
        load_tokenizer(tmp_path, read=load_apart)
    assert (apart.value.message, apart.value.hint) == (here.value.message, here.value.hint)


def test_saving_keeps_everything(folder: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(folder)
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint
    assert again.eos_ids == ours.eos_ids
    messages = [{"role": "user", "content": "hi"}]
    assert again.render_chat(messages) == ours.render_chat(messages)
    theirs = reference(tmp_path)
    assert [theirs(text)["input_ids"] for text in TEXTS] == [
        reference(folder)(text)["input_ids"] for text in TEXTS
    ]


def test_template_options_reach_the_template(tmp_path: Path) -> None:
    ours = load_tokenizer(hub_folder(tmp_path, "qwen"))
    _, text = render_prompt(ours, "hi", options={"enable_thinking": False})
    assert text.endswith("<think>\n\n</think>\n\n")


def test_plain_template_begins_with_bos_where_the_model_wants_it(tmp_path: Path) -> None:
    for kind, count in (("llama", 1), ("qwen", 0)):
        ours = load_tokenizer(hub_folder(tmp_path / kind, kind, chat=False))
        tokens, text = render_prompt(ours, "1 + 2", template="{system}|{prompt}|", system="S")
        assert text == "S|1 + 2|"
        assert ours.decode(tokens[count:]) == text
        assert tokens[:count].tolist() == ([ours.bos_id] if count else [])


def test_no_chat_template_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    ours = load_tokenizer(hub_folder(tmp_path, "qwen", chat=False))
    with pytest.raises(InputError, match="no chat template") as caught:
        render_prompt(ours, "hi")
    assert "data.template" in caught.value.hint


def test_template_that_refuses_is_an_error_of_the_user(tmp_path: Path) -> None:
    path = hub_folder(tmp_path, "llama") / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "chat_template": "{{ raise_exception('no system message') }}"
    }
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="no system message"):
        render_prompt(load_tokenizer(tmp_path), "hi", system="s")


def test_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path, "llama", chat=False)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no end token"):
        load_tokenizer(folder)


def test_bad_template_is_refused() -> None:
    from unit.text.test_tokenizer import TOKENIZER

    ours: Tokenizer = TOKENIZER
    with pytest.raises(ConfigError, match=r"\{prompt\}"):
        render_prompt(ours, "hi", template="Question:")
    with pytest.raises(ConfigError, match="conversation"):
        render_prompt(ours, [{"role": "user", "content": "hi"}], template="{prompt}")
