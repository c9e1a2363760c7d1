"""Loading and exporting: what is refused, and by which name; atomic replacement; scalar heads;
fresh weights."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gyre.core.errors import InputError, SnapshotError
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.export import export_hub
from gyre.models.hub.load import load_hub, load_scalar_head, verify_export
from gyre.models.hub.tensors import plan_shards
from gyre.models.init import init_weights
from gyre.models.names import hub_entries
from gyre.models.spec import ModelSpec, hub_config_from_spec, spec_from_hub_config, spec_from_shape

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_size": 24,
}
FAMILIES = ["llama", "qwen2", "qwen3"]


def make_spec(family: str = "qwen3", tied: bool = True) -> ModelSpec:
    shape = ShapeConfig.model_validate({**TINY, "family": family, "tied": tied})
    return spec_from_shape(shape, vocab_size=32, bos_id=None, eos_ids=(1,))


def make_decoder(
    spec: ModelSpec | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Decoder:
    decoder = Decoder(spec or make_spec(), device=CPU, dtype=dtype)
    init_weights(decoder, seed)
    return decoder


@pytest.fixture
def export(tmp_path: Path) -> Path:
    export_hub(make_decoder(), tmp_path / "export", dtype=torch.float32, tokenizer_files=None)
    return tmp_path / "export"


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_hub(folder, device=CPU, dtype=torch.float32)
    return caught.value.message + " | " + caught.value.hint


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_table_covers_every_row_once(family: str, tied: bool) -> None:
    spec = make_spec(family, tied)
    decoder = Decoder(spec, device=CPU, dtype=torch.float32)
    shapes = spec.parameter_shapes()
    assert {name: tuple(p.shape) for name, p in decoder.named_parameters()} == shapes
    assert list(shapes) == [name for name, _ in decoder.named_parameters()]
    rows = {name: [0] * shape[0] for name, shape in shapes.items()}
    for entry in hub_entries(spec):
        assert entry.shape == (entry.row_stop - entry.row_start, *shapes[entry.name][1:])
        for row in range(entry.row_start, entry.row_stop):
            rows[entry.name][row] += 1
    assert all(count == 1 for counts in rows.values() for count in counts)
    assert spec.num_parameters == sum(p.numel() for p in decoder.parameters())
    assert spec.weight_bytes(torch.bfloat16) == 2 * spec.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_spec_survives_the_hub_config(family: str, tied: bool) -> None:
    spec = make_spec(family, tied)
    assert spec_from_hub_config(json.loads(json.dumps(hub_config_from_spec(spec)))) == spec


def test_flops_count_the_matrix_products() -> None:
    spec = make_spec()
    per_layer = 16 * (32 + 16 + 3 * 24)  # q|k|v, out, gate|up|down
    assert spec.flops_per_token(0) == 2 * (2 * per_layer + 32 * 16)
    assert spec.flops_per_token(10) - spec.flops_per_token(0) == 10 * 2 * 4 * 16
    assert make_spec(tied=False).flops_per_token(0) == spec.flops_per_token(0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "use_sliding_window": True}, "use_sliding_window"),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "layer_types",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_config_that_we_cannot_honor_is_refused_by_key(
    export: Path, change: dict[str, object], named: str
) -> None:
    edit_config(export, **change)
    assert named in refusal(export)


def test_bad_tensors_are_refused_by_name(export: Path, tmp_path: Path) -> None:
    down, norm = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"

    def break_all(tensors: dict[str, Tensor]) -> None:
        del tensors[norm]
        tensors[down] = tensors[down].t().contiguous()
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)

    edit_tensors(export, break_all)
    message = refusal(export)
    assert f"missing: {norm}" in message
    assert f"{down} is [24, 16], config.json says [16, 24]" in message
    assert "model.layers.0.self_attn.q_proj.bias" in message


def test_a_repeated_tied_head_is_accepted_and_another_one_refused(export: Path) -> None:
    edit_tensors(
        export, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    load_hub(export, device=CPU, dtype=torch.float32)
    edit_tensors(export, lambda t: t["lm_head.weight"].add_(1.0))
    assert "lm_head.weight differs" in refusal(export)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_run_of_a_checkpoint_is_that_of_the_whole(tmp_path: Path, family: str) -> None:
    """Also of tensors that are fused with us and lie in several files."""
    decoder = make_decoder(make_spec(family, tied=False), dtype=torch.bfloat16)
    export_hub(
        decoder, tmp_path / "hub", dtype=torch.bfloat16, tokenizer_files=None, shard_bytes=2000
    )
    rng = random.Random(0)
    with closing(Checkpoint(tmp_path / "hub")) as source:
        assert source.shapes == {name: tuple(p.shape) for name, p in decoder.named_parameters()}
        for name, parameter in decoder.named_parameters():
            count = parameter.numel()
            cuts = [(0, count), (count - 1, count)] + [
                sorted(rng.sample(range(count + 1), 2)) for _ in range(8)
            ]
            for start, stop in cuts:
                out_N = torch.full((stop - start,), math.nan)
                source.read(name, start, stop, out_N)
                assert torch.equal(out_N, parameter.detach().view(-1)[start:stop].float()), (
                    name,
                    start,
                    stop,
                )


def test_a_repeated_head_is_compared_where_it_is_read(export: Path) -> None:
    """Each rank sees its own rows, so that one of them finds what differs."""

    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1.0

    edit_tensors(export, repeat)
    with closing(Checkpoint(export)) as source:
        source.read("embed.weight", 0, 31 * 16, torch.empty(31 * 16))
        with pytest.raises(InputError, match=r"lm_head\.weight differs"):
            source.read("embed.weight", 31 * 16, 32 * 16, torch.empty(16))


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="the kernel says nothing about pages"
)
def test_a_run_touches_its_own_pages(tmp_path: Path) -> None:
    """Of a file of 64 MB; a whole read is the proof that the count sees pages."""
    spec = spec_from_shape(
        ShapeConfig.model_validate({**TINY, "hidden_size": 64}),
        vocab_size=1 << 19,
        bos_id=None,
        eos_ids=(1,),
    )
    export_hub(
        make_decoder(spec, dtype=torch.bfloat16),
        tmp_path / "hub",
        dtype=torch.bfloat16,
        tokenizer_files=None,
    )
    rows, whole = 1 << 13, (1 << 19) * 64
    with closing(Checkpoint(tmp_path / "hub")) as source:
        before = mapped_bytes()
        source.read(
            "embed.weight",
            whole // 2,
            whole // 2 + rows * 64,
            torch.empty(rows * 64, dtype=torch.bfloat16),
        )
        part = mapped_bytes() - before
        source.read("embed.weight", 0, whole, torch.empty(whole, dtype=torch.bfloat16))
        assert part < 8 << 20 and mapped_bytes() - before > 60 << 20


def mapped_bytes() -> int:
    """Pages of mapped files that this process has touched."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line.split()[1] for line in status.splitlines() if line.startswith("RssFile"))
    )


def test_missing_and_torn_files_are_refused(export: Path, tmp_path: Path) -> None:
    weights = export / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert str(weights) in refusal(export)
    weights.unlink()
    assert "neither model.safetensors nor" in refusal(export)
    (export / "config.json").write_text("{")
    assert "config.json" in refusal(export)
    (export / "config.json").unlink()
    assert "has no config.json" in refusal(export)
    assert "does not exist" in refusal(tmp_path / "nowhere")


def test_a_lost_shard_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    export_hub(make_decoder(), folder, dtype=torch.float32, tokenizer_files=None, shard_bytes=4_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    load_hub(folder, device=CPU, dtype=torch.float32)
    shards[1].unlink()
    assert shards[1].name in refusal(folder)


def test_plan_shards_keeps_order_and_limit() -> None:
    assert plan_shards([4, 4, 9, 1, 1], 8) == [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_export_sees_one_changed_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = make_decoder(dtype=dtype)
    export_hub(decoder, tmp_path / "export", dtype=dtype, tokenizer_files=None)
    verify_export(tmp_path / "export", decoder)
    with torch.no_grad():
        decoder.layers[1].down.weight[3, 5] *= 1.01  # type: ignore[union-attr]
    with pytest.raises(SnapshotError, match="down_proj"):
        verify_export(tmp_path / "export", decoder)


def test_verify_export_sees_damage_on_disk(export: Path) -> None:
    edit_tensors(export, lambda t: t["model.norm.weight"].add_(1.0))
    with pytest.raises(SnapshotError, match=r"content of model\.norm\.weight"):
        verify_export(export, make_decoder())
    (export / "model.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotError, match="does not load"):
        verify_export(export, make_decoder())


def test_export_replaces_its_own_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    for seed in (0, 1):
        export_hub(make_decoder(seed=seed), folder, dtype=torch.float32, tokenizer_files=None)
    verify_export(folder, make_decoder(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="no export of ours"):
        export_hub(make_decoder(), precious, dtype=torch.float32, tokenizer_files=None)
    assert (precious / "thesis.txt").read_text() == "mine"


def test_a_failed_export_leaves_the_old_one(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gyre.models.hub.tensors.os.pwrite", full_disk)
    with pytest.raises(SnapshotError, match="No space left"):
        export_hub(make_decoder(seed=5), export, dtype=torch.float32, tokenizer_files=None)
    verify_export(export, make_decoder())
    assert [p.name for p in export.parent.iterdir()] == ["export"]


def test_tokenizer_files_come_along_but_no_foreign_weights(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (source / name).write_text(name)
    export_hub(make_decoder(), tmp_path / "export", dtype=torch.float32, tokenizer_files=source)
    verify_export(tmp_path / "export", make_decoder())
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "export" / "chat_template.jinja").is_file()


def test_scalar_head_round_trip_and_refusal(tmp_path: Path, export: Path) -> None:
    head = ScalarHead(16, device=CPU)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    export_hub(
        make_decoder(),
        tmp_path / "rm",
        dtype=torch.bfloat16,
        tokenizer_files=None,
        scalar_head=head,
    )
    again = load_scalar_head(tmp_path / "rm", device=CPU)
    assert torch.equal(again.weight, head.weight)
    hidden_NE = torch.randn(3, 16)
    torch.testing.assert_close(again(hidden_NE), hidden_NE @ head.weight[0])
    assert head(hidden_NE.bfloat16()).dtype == torch.float32
    with pytest.raises(InputError, match="scalar_head"):
        load_scalar_head(export, device=CPU)
    shutil.rmtree(tmp_path / "rm")


def test_init_is_a_function_of_seed_and_name_only() -> None:
    one, same, other = (
        make_decoder(seed=3),
        make_decoder(seed=3, dtype=torch.bfloat16),
        make_decoder(seed=4),
    )
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a.bfloat16(), b), name
        assert a.isfinite().all()
        assert name.endswith(("norm.weight", "bias")) or not torch.equal(a, c), name
    wide = make_spec()
    deep = Decoder(
        spec_from_hub_config({**hub_config_from_spec(wide), "num_hidden_layers": 8}),
        device=CPU,
        dtype=torch.float32,
    )
    init_weights(deep, 3)
    ratio = (
        deep.get_parameter("layers.0.down.weight").std()
        / one.get_parameter("layers.0.down.weight").std()
    )
    assert math.isclose(ratio.item(), 0.5, rel_tol=0.01)
