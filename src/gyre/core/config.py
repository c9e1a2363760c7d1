"""Config base: the base class of every `config.py`. In: a mapping from TOML. Out: a frozen, checked
section.

Unknown keys are refused with the nearest valid key; pydantic checks types.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

# an error's type; its context has the key, the nearest one and all that are accepted
UNKNOWN_KEY = "unknown_key"


class Section(BaseModel):
    """One table of the TOML. Frozen; an unknown key raises an error that names the nearest valid
    one."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = set(cls.model_fields) | {
            field.alias for field in cls.model_fields.values() if field.alias
        }
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                context = {"key": str(key), "near": near, "accepted": ", ".join(sorted(known))}
                context["did_you_mean"] = f"; did you mean '{near[0]}'?" if near else ""
                raise PydanticCustomError(
                    UNKNOWN_KEY, "unknown key '{key}'{did_you_mean} (accepted: {accepted})", context
                )
        return values
