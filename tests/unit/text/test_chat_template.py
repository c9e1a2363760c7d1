"""Chat templates from elsewhere: hostile ones end as errors within their limits; published forms
render as transformers renders them, and name the token that ends a turn."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gyre.core.errors import ConfigError, InputError
from gyre.data.config import DataConfig
from gyre.data.sources import load_prompts
from gyre.text.chat_template import ChatTemplate
from gyre.text.render import render_example, render_prompt
from gyre.text.tokenizer import load_tokenizer
from unit.data.test_sources import Events
from unit.text.test_hub import LLAMA_CHAT, QWEN_CHAT, hub_folder

HOSTILE = {
    "a loop without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% "
    "endfor %}",
    "a huge text": "{{ ('x' * 3000000000) | length }}",
    "a huge field": "{{ '%99999999999d' % 1 }}",
    "a huge number": "{% set n = namespace(x=9) %}{% for i in range(40) %}{% set n.x = n.x ** 9 "
    "%}{% endfor %}",
    "much output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "a wrong type": "{{ 1 + 'a' }}",
    "a division by zero": "{{ 1 / 0 }}",
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a missing loader": "{% include 'other' %}",
    "no syntax": "{% for %}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a long number": "{{ 10 ** 5000 }}",
}
TURNS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_template_is_an_error_that_names_its_file(what: str) -> None:
    template = ChatTemplate(HOSTILE[what], {}, where="FOLDER/chat_template.jinja")
    with pytest.raises(InputError, match=r"FOLDER/chat_template\.jinja refused") as caught:
        template.render([TURNS], {})
    if what == "a loop without end":
        assert "CPU time" in caught.value.message


def test_a_template_works_after_it_was_refused_once_and_its_process_ends_with_it() -> None:
    template = ChatTemplate(
        "{{ 1 / (messages | length - 1) }}{{ messages[0].content }}", {}, where="f"
    )
    with pytest.raises(InputError, match="ZeroDivision"):
        template.render([TURNS], {})
    assert template.render([TURNS * 2, TURNS * 3], {}) == ["1.0hi", "0.5hi"]
    assert template.child is not None
    pid = template.child.process.pid
    del template
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.01)


FORMS = {
    "chatml": QWEN_CHAT,
    "llama": LLAMA_CHAT,
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  [{{ m.content }}]\n  {% "
    "endif %}\n{% endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% "
    "endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ "
    "dict(a=m.content) | tojson(indent=2) }}{% endfor %}",
    "names": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor "
    "%}{{ n.x }}{{ tools is none }}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompted", [False, True])
def test_rendered_as_transformers_renders(form: str, prompted: bool) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "<b>é 'x'"}, {"role": "user", "content": "2"}]
    ours = ChatTemplate(FORMS[form], {"bos_token": "<s>"}, where="f").render(
        [turns], {}, generation_prompt=prompted
    )
    theirs, _ = render_jinja_template(
        [turns], chat_template=FORMS[form], add_generation_prompt=prompted, bos_token="<s>"
    )
    assert ours == theirs


OPEN_CHAT = (  # as published with Qwen1.5: a last turn is closed only before a generation prompt
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>' + '\n'}}{% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
ENDS = {  # template, eos_token of the tokenizer, end of a turn
    "chatml of a base model": (QWEN_CHAT, "<|endoftext|>", "<|im_end|>"),
    "gemma": (
        "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content + "
        "'<end_of_turn>\n' }}{% endfor %}",
        "<eos>",
        "<end_of_turn>",
    ),
    "mistral": (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' "
        "' + m.content + ' ' + eos_token }}{% endfor %}",
        "</s>",
        "</s>",
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor "
        "%}{{ eos_token }}",
        "<|endoftext|>",
        "<|end|>",
    ),
    "thinking": (
        "{% for m in messages %}{{ '<|im_start|>' + ('<think></think>' if m.role == 'assistant' "
        "else '') + m.content | trim + '<|im_end|>' }}{% endfor %}",
        "<|endoftext|>",
        "<|im_end|>",
    ),
    "chatml of qwen 1.5": (OPEN_CHAT, "<|endoftext|>", "<|im_end|>"),
    "chatml of qwen 1.5, its system message": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% "
        "endif %}" + OPEN_CHAT,
        "<|endoftext|>",
        "<|im_end|>",
    ),
    "an end between turns of words": (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if not loop.last %}{{ "
        "'<|im_end|>\n' }}{% endif %}{% endfor %}",
        "</s>",
        "<|im_end|>",
    ),
    "openers only": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor "
        "%}",
        "</s>",
        "</s>",
    ),
    "openers only, of two tokens": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
        "'<|end_header_id|>' + m.content }}{% endfor %}",
        "</s>",
        "</s>",
    ),
    "openers only, after a system message": (
        "{{ '<|start_header_id|>You help.<|end_header_id|>' }}{% for m in messages %}{{ "
        "'<|im_start|>' + m.content }}{% endfor %}",
        "</s>",
        "</s>",
    ),
    "plain words": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "</s>",
        "</s>",
    ),
}


def folder_with(folder: Path, template: str, eos: str, *more: str) -> Path:
    from tokenizers import AddedToken, Tokenizer

    hub_folder(folder, "llama")
    (folder / "generation_config.json").unlink()
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (eos, *more)]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    template, eos, end = ENDS[name]
    ours = load_tokenizer(
        folder_with(tmp_path / "model", template, eos, end, "<|im_start|>", "<start_of_turn>")
    )
    assert ours.decode([ours.end_id]) == end
    assert {ours.decode([i]) for i in ours.eos_ids} == {eos, end}  # rollouts stop at both
    prompt, _ = render_prompt(ours, "1 + 1")
    tokens, mask = render_example(ours, prompt, "2")
    assert ours.decode(tokens[mask]) == "2" + end
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").eos_ids == ours.eos_ids
    named = load_tokenizer(tmp_path / "model", end_token=eos)
    assert named.decode([named.end_id]) == eos
    with pytest.raises(InputError, match=r"tokenizer\.end_token = '<no>'"):
        load_tokenizer(tmp_path / "model", end_token="<no>")


def test_bos_is_written_once(tmp_path: Path) -> None:
    ours = load_tokenizer(hub_folder(tmp_path, "llama"))
    bos = ours.decode([ours.bos_id or 0])
    for template in (
        "chat",
        "{prompt}",
        bos + "{prompt}",
        bos + "{system}{prompt}",
        "\n" + bos + "{prompt}",
    ):
        system = "S" if "{system}" in template else ""
        tokens, _ = render_prompt(ours, "1 + 1", template=template, system=system)
        assert tokens.tolist().count(ours.bos_id) == 1, template
    tokens, _ = render_prompt(ours, bos + "1 + 1", template="{prompt}")
    assert tokens.tolist().count(ours.bos_id) == 1


def test_a_system_message_without_a_place_is_refused(tmp_path: Path) -> None:
    users_only = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% "
        "endif %}{% endfor %}"
    )
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') "
        "}}{% endif %}" + QWEN_CHAT
    )
    deaf = load_tokenizer(folder_with(tmp_path / "a", users_only, "<|endoftext|>", "<|im_end|>"))
    with pytest.raises(ConfigError, match="leaves it out"):
        render_prompt(deaf, "1", system="S")
    with pytest.raises(ConfigError, match="leaves it out"):
        render_prompt(deaf, [{"role": "system", "content": "S"}, *TURNS])
    assert render_prompt(deaf, "1")[1] == "1<|im_end|>"
    strict = load_tokenizer(folder_with(tmp_path / "b", refusing, "<|endoftext|>", "<|im_end|>"))
    with pytest.raises(InputError, match="System role not supported"):
        render_prompt(strict, "1", system="S")
    with pytest.raises(ConfigError, match=r"no \{system\}"):
        render_prompt(strict, "1", system="S", template="{prompt}")


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "SYS"}
LATER = {
    "after an answer": [*TURNS, {"role": "assistant", "content": "a"}, SYSTEM, *TURNS],
    "after another": [{"role": "system", "content": "1"}, SYSTEM, *TURNS],
    "last": [*TURNS, SYSTEM],
    "second of three": [SYSTEM, *TURNS, SYSTEM, *TURNS],
}


@pytest.mark.parametrize("where", LATER)
def test_a_later_system_message_is_shown_or_refused_with_its_row(
    where: str, tmp_path: Path
) -> None:
    deaf = load_tokenizer(folder_with(tmp_path / "a", SYSTEM_FIRST, "<|endoftext|>", "<|im_end|>"))
    with pytest.raises(InputError, match="does not stand first"):
        render_prompt(deaf, LATER[where])
    assert "SYS" in render_prompt(deaf, [SYSTEM, *TURNS])[1]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": turns, "answer": "1"}) + "\n" for turns in (TURNS, LATER[where])
        )
    )
    config = DataConfig(source="jsonl", path=str(rows), held_out_fraction=0)
    with pytest.raises(InputError, match=r"rows\.jsonl:2: .*does not stand first"):
        load_prompts(config, deaf, emit=Events())
    whole = load_tokenizer(folder_with(tmp_path / "b", QWEN_CHAT, "<|endoftext|>", "<|im_end|>"))
    given = sum(turn is SYSTEM for turn in LATER[where])
    assert render_prompt(whole, LATER[where])[1].count("SYS") == given
    assert len(load_prompts(config, whole, emit=Events()).train) == 2


def test_no_code_of_a_folder_is_run_and_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "model", "qwen")
    settings = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"eos_token": "<|im_end|>"})
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}})
    )
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass EvilTokenizer: ...\nclass Evil: ...\n"
    )

    def asked(*_: object) -> str:
        (tmp_path / "asked").touch()
        return "y"

    monkeypatch.setattr("builtins.input", asked)
    try:
        load_tokenizer(folder)
    except InputError as error:
        assert "tokenizer" in error.message
    assert not (tmp_path / "ran").exists() and not (tmp_path / "asked").exists()
