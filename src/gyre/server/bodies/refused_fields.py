"""Refused fields: what other servers of OpenAI's API take and this one does not. In: a body's JSON.
Out: the first field whose value would change the answer, with what to do instead; or the body
without those that ask for nothing.
"""

from __future__ import annotations

from typing import Any

_GRAMMAR = "grammars are not supported yet; ask for the format in the prompt"
_EFFORT = "the model has no such setting; say in the prompt how much to write"
_TEMPLATE = "the server renders with its own template; set data.template_options where it starts"

# Each is refused by name, with what to do instead.
REFUSED: dict[str, str] = {
    "response_format": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "structural_tag": _GRAMMAR,
    "functions": "the older form is not supported; give them as tools",
    "function_call": "the older form is not supported; give tool_choice",
    "suffix": "text cannot be inserted before a suffix; put it into the prompt",
    "best_of": "every completion is returned; choose among n of them",
    "audio": "answers are text alone; leave it out",
    "modalities": "answers are text alone; give ['text']",
    "prediction": "no text is predicted; leave it out",
    "web_search_options": "nothing is searched; give what is known in the prompt",
    "reasoning_effort": _EFFORT,
    "verbosity": _EFFORT,
    "service_tier": "there is one tier; give 'auto' or 'default', and priority for an order",
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "stop_token_ids": "tokens are not stopped at; give their texts as stop",
    "prompt_logprobs": "give echo and logprobs to /v1/completions",
    "truncate_prompt_tokens": "prompts are not cut; send a shorter one",
    "return_token_strs": "tokens are told by their ids; give each to /detokenize",
    "continue_final_message": "a message that is there is not continued; end with the user's",
    "use_beam_search": "beams are not searched; ask for n completions",
}
# What asks for no more than every answer has.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "return_token_strs": (False,),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
}


def find_refused(body: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first field that is refused, and what to do. Pure."""
    for name in body:
        if name in REFUSED and not _is_harmless(name, body):
            return name, REFUSED[name]
    return None


def drop_harmless(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body in which nothing is refused without the fields that could be. Pure."""
    if REFUSED.keys().isdisjoint(body):
        return body
    return {name: value for name, value in body.items() if name not in REFUSED}


def _is_harmless(name: str, body: dict[str, Any]) -> bool:
    value = body[name]
    if value is None or value in HARMLESS.get(name, ()):
        return True
    return name == "best_of" and type(value) is int and value in (1, body.get("n"))
