"""An engine that takes versions which ranks have registered: theirs to the bit, or its last one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_cases import Bench, go, make_decoder, tensors_of, tokens_of, versions_of
from gyre.core.errors import GyreError, InputError
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import Reading
from part_cases import register, shared_folder, stores_of, with_wrong_checksum


def same(found, expected) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def started(folder: Path) -> Bench:
    bench = Bench(shared=False)
    bench.engine.read_parts(Reading(host_id=host_id(folder), folder=folder))
    await bench.engine.start(dummy=False)
    return bench


@pytest.mark.parametrize("policy", ["drain", "continue"])
def test_versions_are_taken_one_after_the_other(policy) -> None:
    async def main() -> None:
        with shared_folder() as folder, stores_of(folder, 2) as stores:
            bench = await started(folder)
            before = tokens_of(await bench.ask())
            seen = [before]
            for version in (1, 2, 3):
                new = tensors_of(make_decoder(version + 4))
                await bench.engine.prepare(register(stores, new, version=version))
                assert tokens_of(await bench.ask()) == seen[-1], "a prepared version is not seen"
                await bench.engine.commit(version, policy=policy)
                results = await bench.ask()
                assert versions_of(results) == {version}
                assert same(tensors_of(bench.decoder), new)
                seen.append(tokens_of(results))
            assert len({str(tokens) for tokens in seen}) == len(seen)

    go(main)


def test_a_version_that_is_not_whole_leaves_the_last_one_serving() -> None:
    async def main() -> None:
        with shared_folder() as folder, stores_of(folder, 2) as stores:
            bench = await started(folder)
            own = {name: tensor.clone() for name, tensor in tensors_of(bench.decoder).items()}
            before = tokens_of(await bench.ask())
            new = tensors_of(make_decoder(5))
            name = list(new)[3]
            wrong = with_wrong_checksum(register(stores, new, version=1), name)
            with pytest.raises(GyreError, match=f"{name} of version 1"):
                await bench.engine.prepare(wrong)
            overwritten = register(stores, new, version=2)
            await bench.engine.prepare(overwritten)
            for version in (3, 4):
                register(stores, tensors_of(make_decoder(9)), version=version)
            with pytest.raises(GyreError, match="overwritten"):
                await bench.engine.commit(2, policy="drain")
            assert same(tensors_of(bench.decoder), own)
            results = await bench.ask()
            assert tokens_of(results) == before and versions_of(results) == {0}
            await bench.engine.rollback()
            with pytest.raises(InputError, match="has version 4 of epoch 0, and not version 2"):
                await bench.engine.prepare(overwritten)
            await bench.engine.prepare(register(stores, new, version=5))
            await bench.engine.commit(5, policy="drain")
            assert same(tensors_of(bench.decoder), new)

    go(main)
