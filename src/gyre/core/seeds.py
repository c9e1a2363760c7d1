"""Seeds: one stable 63-bit seed from any path of names and numbers. In: (run seed, "rollout", step,
prompt, sample). Out: an int that depends on nothing else: not on order, process or
PYTHONHASHSEED."""

from __future__ import annotations

import hashlib


def derive_seed(*path: int | str) -> int:
    """Return a seed in [0, 2**63) that is a pure function of `path`.

    Parts are tagged with type and length, so that (1, "a") and ("1a",) differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in path:
        data = f"{type(part).__name__}:{part}".encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1
