"""An engine that takes a version from a folder: the folder's numbers to the bit, or nothing at
all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_cases import Bench, go, make_decoder, tensors_of, tokens_of, versions_of
from gyre.core.errors import GyreError, InputError
from gyre.core.offers import FolderTensors, Offer
from gyre.core.records import Manifest
from gyre.models.decoder import Decoder
from gyre.models.hub.export import export_hub
from gyre.models.hub.folders import (
    CHECKSUMS_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    SCALAR_HEAD_FILE,
    WEIGHTS_FILE,
)
from gyre.models.hub.load import load_hub

NAME = "model.layers.1.mlp.down_proj.weight"


def offer_folder(version: int, folder: Path) -> Offer:
    manifest = Manifest(version=version, entries=(), shared=False)
    return Offer(manifest=manifest, source=FolderTensors(folder=str(folder)))


def export(
    folder: Path, decoder: Decoder, *, shard_bytes: int = 1 << 30, dtype=torch.float32
) -> Path:
    export_hub(decoder, folder, dtype=dtype, tokenizer_files=None, shard_bytes=shard_bytes)
    return folder


@pytest.mark.parametrize("policy", ["drain", "continue"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_taken_as_a_fresh_engine_would_load_it(tmp_path, policy, dtype) -> None:
    async def main() -> None:
        folder = export(tmp_path / "new", make_decoder(5), shard_bytes=4000, dtype=dtype)
        assert (folder / INDEX_FILE).is_file()
        bench = Bench(shared=False)
        await bench.engine.start(dummy=False)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(bench.decoder).items()}
        before = tokens_of(await bench.ask())
        await bench.engine.prepare(offer_folder(3, folder))
        assert tokens_of(await bench.ask()) == before, "a prepared version must not be seen"
        await bench.engine.commit(3, policy=policy)
        results = await bench.ask()
        assert versions_of(results) == {3} and tokens_of(results) != before
        _, fresh = load_hub(folder, device=torch.device("cpu"), dtype=torch.float32)
        own = tensors_of(bench.decoder)
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors_of(fresh).items())
        assert {name: tensor.data_ptr() for name, tensor in own.items()} == addresses

    go(main)


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    return damage


def edit_json(name: str, **values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return damage


def flip_bit(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is no folder on this host"),
    "no config": (lambda folder: (folder / CONFIG_FILE).unlink(), "config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "has neither"),
    "truncated": (truncate, "cannot read"),
    "bit flipped": (flip_bit, f"does not match {CHECKSUMS_FILE}"),
    "tensor missing": (edit(lambda tensors: tensors.pop(NAME)), "missing: " + NAME),
    "tensor extra": (
        edit(lambda tensors: tensors.update(extra=torch.ones(2))),
        "not part of a qwen3 model of this config: extra",
    ),
    "another shape": (
        edit(lambda tensors: tensors.update({NAME: tensors[NAME][:, :-1].contiguous()})),
        "of another shape: " + NAME,
    ),
    "whole numbers": (
        edit(lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int32)})),
        "no floating-point weights",
    ),
    "another dtype than its checksum": (
        edit(lambda tensors: tensors.update({NAME: tensors[NAME].half()})),
        f"{NAME} does not match",
    ),
    "another model": (edit_json(CONFIG_FILE, rope_theta=5.0), "rope_theta is 5.0, not 10000"),
    "wrong checksum": (edit_json(CHECKSUMS_FILE, **{NAME: "0" * 16}), f"{NAME} does not match"),
    "checksum of nothing": (edit_json(CHECKSUMS_FILE, more="0" * 16), "more does not match"),
    "torn checksums": (
        lambda folder: (folder / CHECKSUMS_FILE).write_text('{"a'),
        "is not readable JSON",
    ),
    "reward model": (
        lambda folder: (folder / SCALAR_HEAD_FILE).write_bytes(b""),
        "is a reward model",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_changes_nothing_and_a_good_one_follows(tmp_path, damage) -> None:
    async def main() -> None:
        spoil, reason = DAMAGES[damage]
        good = export(tmp_path / "good", make_decoder(5))
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        spoil(bad)
        bench = Bench(shared=False)
        await bench.engine.start(dummy=False)
        before = {name: tensor.clone() for name, tensor in tensors_of(bench.decoder).items()}
        with pytest.raises(GyreError) as refused:
            await bench.engine.prepare(offer_folder(1, bad))
        assert reason in str(refused.value)
        with pytest.raises(InputError, match="not prepared"):
            await bench.engine.commit(1, policy="drain")
        own = tensors_of(bench.decoder)
        assert all(torch.equal(own[name], tensor) for name, tensor in before.items())
        assert versions_of(await bench.ask()) == {0}
        await bench.engine.prepare(offer_folder(1, good))
        await bench.engine.commit(1, policy="drain")
        assert versions_of(await bench.ask()) == {1}

    go(main)


def test_a_missing_shard_is_named(tmp_path) -> None:
    async def main() -> None:
        folder = export(tmp_path / "new", make_decoder(5), shard_bytes=4000)
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        bench = Bench(shared=False)
        await bench.engine.start(dummy=False)
        with pytest.raises(InputError, match=f"{shard.name} is not there"):
            await bench.engine.prepare(offer_folder(1, folder))

    go(main)


def test_shared_weights_take_no_folder(tmp_path) -> None:
    async def main() -> None:
        bench = Bench(shared=True)
        await bench.engine.start(dummy=False)
        with pytest.raises(InputError, match="the engine was built on shared weights"):
            await bench.engine.prepare(offer_folder(1, export(tmp_path / "new", make_decoder(5))))

    go(main)
