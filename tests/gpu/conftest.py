"""What several files of GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that Triton compiles or loads from now on."""
    import triton

    names: list[str] = []

    def note(*, fn, **more) -> None:
        names.append(str(getattr(fn, "name", fn)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    yield names
