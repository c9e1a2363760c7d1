"""A version on its way into vLLM: as text, as whole tensors of our names, and as rows of the hub's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import FolderTensors, Offer, RegisteredPart, RegisteredShards
from gyre.core.records import Manifest
from gyre.models.hub.checkpoint import Checkpoint
from gyre.sidecars.vllm.host_tensors import decode_offer, encode_offer, hub_rows, open_tensors
from gyre.weights.transports.addresses import SHM, host_id
from gyre.weights.transports.opened import PartOpener, Reading
from native_cases import save_tiny
from offers import offer_of
from part_cases import register, shared_folder, stores_of, with_wrong_checksum
from vllm_sidecar import tensors_of


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_rows_are_the_hubs_tensors_from_a_folder_and_from_shared_memory(
    family: str, tmp_path: Path
) -> None:
    """What transformers has written is what vLLM gets, to the bit and by its names."""
    model = save_tiny(tmp_path / "m", family)
    wanted = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    spec = Checkpoint(tmp_path / "m").spec
    if not spec.tied:
        wanted["lm_head.weight"] = model.state_dict()["lm_head.weight"]
    with shared_folder() as folder, stores_of(folder, 2) as stores:
        reading = Reading(host_id=host_id(folder), folder=folder, preference=(SHM,))
        manifest = Manifest(version=1, entries=(), shared=False)
        for offer in (
            register(stores, tensors_of(tmp_path / "m"), version=1),
            Offer(manifest=manifest, source=FolderTensors(folder=str(tmp_path / "m"))),
        ):
            given = decode_offer(encode_offer(offer))
            with open_tensors(given, spec, PartOpener(reading)) as tensors:
                found = {name: rows.clone() for name, rows in hub_rows(spec, tensors)}
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_another_model_and_torn_bytes_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "m", "qwen3")
    save_tiny(tmp_path / "other", "llama")
    spec = Checkpoint(tmp_path / "m").spec
    with shared_folder() as folder, stores_of(folder, 1) as stores:
        opener = PartOpener(Reading(host_id=host_id(folder), folder=folder, preference=(SHM,)))
        other = register(stores, tensors_of(tmp_path / "other"), version=1)
        with pytest.raises(InputError, match="do not fit vLLM's model"):
            open_tensors(other, spec, opener).__enter__()
        offer = register(stores, tensors_of(tmp_path / "m"), version=2)
        torn = with_wrong_checksum(offer, "final_norm.weight")
        with (
            pytest.raises(SnapshotError, match="checksum"),
            open_tensors(torn, spec, opener) as tensors,
        ):
            _ = dict(tensors)


def test_an_offer_crosses_as_it_is_and_tensors_do_not_cross() -> None:
    shards = RegisteredShards(parts=(RegisteredPart(addresses=("shm://h/n",), size_bytes=64),))
    offer = offer_of(3, {"w": torch.ones(4)}, checksums=True, epoch=2)
    crossing = replace(offer, source=shards)
    found = decode_offer(encode_offer(crossing))
    assert (found.manifest, found.source) == (offer.manifest, shards)
    with pytest.raises(InputError, match="given as LocalTensors, and vLLM takes a folder or"):
        encode_offer(offer)
