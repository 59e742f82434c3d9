"""Files are loaded by their runtimes and give what the original gives; what cannot work is refused with a sentence."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lambdanets.cli import main
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.export import formats
from lambdanets.export.check import compare, shapes_to_compare
from lambdanets.export.formats import FORMATS, export
from lambdanets.models import Network, create_model
from lambdanets.models.pretrained import Card, from_pretrained, save_pretrained
from lambdanets.train.inference.evaluate import find_images
from lambdanets.train.inference.predict import Given, predict
from lambdanets.train.inference.trained import open_trained
from tests.models.helpers import randomized, settled
from tests.support.file_size import limit, unlimited_afterwards

TOLERANCE = 2e-5  # of the largest score, in float32


def tiny(**options: object) -> Network:
    shape = {"depths": (1, 1, 1, 1), "widths": (8, 8, 12, 16), "stem": "small", "placement": "CLCL", "image_size": 32}
    network = create_model("resnet26", num_classes=5, **{**shape, "scope": 5, **options})
    network = settled(randomized(network), torch.randn(8, 3, 32, 32)).eval()
    network.card = Card(Preprocessing(size=32), class_names=("a", "b", "c", "d", "<e>"))
    return network


def relative(found: np.ndarray | torch.Tensor, expected: torch.Tensor) -> float:
    return float((torch.as_tensor(found) - expected).abs().max() / expected.abs().max())


def run_onnx(path: Path, images: torch.Tensor) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["scores"], {"images": images.numpy()})[0]


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return tiny()


@torch.no_grad()
def test_fixed_size(network: Network, tmp_path: Path) -> None:
    done = export(network, tmp_path, formats=("onnx", "program", "safetensors"), rounds=1)
    written = ["README.md", "config.json", "model.onnx", "model.pt2", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == written
    assert [one.format for one in done.files] == ["onnx", "program", "safetensors"]
    assert all(one.difference < TOLERANCE and one.bytes > 1e4 and one.latency.cpu > 0 for one in done.files)
    images = torch.randn(5, 3, 32, 32)
    expected = network(images)
    assert relative(run_onnx(tmp_path / "model.onnx", images), expected) < TOLERANCE
    assert relative(torch.export.load(tmp_path / "model.pt2").module()(images), expected) < TOLERANCE
    assert relative(from_pretrained(tmp_path).eval()(images), expected) < TOLERANCE
    onnx = pytest.importorskip("onnx")
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ["batch", 3, 32, 32]
    ours = json.loads({p.key: p.value for p in model.metadata_props}["lambdanets"])
    assert ours["class_names"] == ["a", "b", "c", "d", "<e>"]
    assert ours["preprocessing"]["size"] == 32


@torch.no_grad()
def test_any_size(network: Network, tmp_path: Path) -> None:
    done = export(network, tmp_path, formats=("onnx", "program"), size="dynamic", rounds=1)
    assert len({shape[2:] for shape in done.shapes}) > 3
    program = torch.export.load(tmp_path / "model.pt2").module()
    generator = torch.Generator().manual_seed(5)
    sides = torch.randint(12, 60, (6, 2), generator=generator).tolist()
    for batch, (height, width) in enumerate([*sides, [32, 32]], start=1):
        images = torch.randn(batch, 3, height, width)
        expected = network(images)
        assert relative(run_onnx(tmp_path / "model.onnx", images), expected) < TOLERANCE
        assert relative(program(images), expected) < TOLERANCE


@torch.no_grad()
def test_any_size_where_shortcuts_pool(tmp_path: Path) -> None:
    options = {"depths": (1, 1, 3, 1), "widths": (8, 8, 8, 8), "num_classes": 3, "scope": 5, "image_size": 64}
    network = create_model("lambda_resnet50", **options)
    network = settled(randomized(network), torch.randn(4, 3, 64, 64)).eval()
    export(network, tmp_path, formats=("onnx",), size="dynamic", rounds=1)
    for height, width in ((65, 34), (50, 97), (33, 33)):
        images = torch.randn(2, 3, height, width)
        assert relative(run_onnx(tmp_path / "model.onnx", images), network(images)) < TOLERANCE


@torch.no_grad()
def test_openvino(network: Network, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="needs openvino: pip install 'lambdanets[openvino]'")
    done = export(network, tmp_path, formats=("openvino",), size="dynamic", rounds=1)
    assert done.files[0].difference < TOLERANCE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.bin", "model.xml"]
    model = openvino.Core().compile_model(tmp_path / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for batch, sides in enumerate([(32, 32), (41, 23)], start=1):
        images = torch.randn(batch, 3, *sides)
        assert relative(model({"images": images.numpy()})["scores"], network(images)) < TOLERANCE
    ours = json.loads(openvino.Core().read_model(tmp_path / "model.xml").get_rt_info(["lambdanets"]).astype(str))
    assert ours["class_names"] == ["a", "b", "c", "d", "<e>"]


def weights_of(path: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and type of each stored tensor."""
    onnx = pytest.importorskip("onnx")
    stored = onnx.load(path).graph.initializer
    return {t.name: (list(t.dims), onnx.TensorProto.DataType.Name(t.data_type)) for t in stored}


@torch.no_grad()
def test_int8_weights_and_the_accuracy_of_each_format(
    network: Network, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The labels are what the network predicts: its own top-1 is then 1."""
    model = save_pretrained(network, tmp_path / "model")
    generator = np.random.default_rng(7)
    given = []
    for number in range(24):
        path = tmp_path / f"{number}.png"
        Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((40, 40)).save(path)
        given.append(Given(str(number), str(path)))
    for path, one in zip(given, predict(open_trained(str(model)), given, top=1), strict=True):
        folder = tmp_path / "data" / one.classes[0][0]
        folder.mkdir(parents=True, exist_ok=True)
        Path(path.path).rename(folder / Path(path.path).name)
    assert len(list((tmp_path / "data").iterdir())) > 1
    arguments = ["export", str(model), str(tmp_path / "out"), "--rounds", "1", "--data", str(tmp_path / "data")]
    assert main([*arguments, "--formats", "onnx", "onnx-int8", "--images", "20"]) == 0
    shown = capsys.readouterr().out
    rows = [line.strip("│ ").split("│") for line in shown.splitlines() if line.startswith("│")]
    top1 = {row[0].strip(): float(row[-1].strip(" %")) for row in rows}
    assert top1["eager"] == top1["onnx"] == 100
    assert 70 <= top1["onnx-int8"] <= 100
    assert "Top-1: on 20 labelled images" in shown
    assert "except onnx-int8 (quantised)" in " ".join(shown.split())
    stored = weights_of(tmp_path / "out" / "model_int8.onnx")
    kinds = {name: kind for name, (shape, kind) in stored.items() if len(shape) > 1}
    assert {kind for name, kind in kinds.items() if "positions" in name} == {"FLOAT"}
    assert {kind for name, kind in kinds.items() if not re.search("positions|bias", name)} == {"INT8"}
    scores = run_onnx(tmp_path / "out" / "model_int8.onnx", torch.randn(4, 3, 32, 32))
    assert len(np.unique(scores)) == scores.size  # the scores themselves are not rounded
    assert main([*arguments, "--images", "0"]) == 2


def test_int8_without_images_is_calibrated_with_noise(network: Network, tmp_path: Path) -> None:
    done = export(network, tmp_path, formats=("onnx-int8",), rounds=1)
    assert 1e-4 < done.files[0].difference < 0.5
    assert (done.images, done.top1, done.files[0].top1) == (0, None, None)


def test_scores_that_are_not_finite_are_refused(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(FORMATS["safetensors"], read=lambda path: lambda images: network(images) * torch.inf, rounds=True)
    monkeypatch.setitem(FORMATS, "safetensors", wrong)
    with pytest.raises(ValueError, match=r"safetensors gives scores that are not finite"):
        export(network, tmp_path, formats=("safetensors",), rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_classes_that_do_not_match_are_refused_first(network: Network, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "data" / name / "one.png")
    with pytest.raises(ValueError, match=r"the data has the class 'cat'"):
        export(network, tmp_path / "out", formats=("safetensors",), images=find_images("", str(tmp_path / "data")))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_ahead_of_time(network: Network, tmp_path: Path) -> None:
    done = export(network, tmp_path, formats=("aoti",), rounds=1)
    images = torch.randn(4, 3, 32, 32)
    found = torch._inductor.aoti_load_package(str(done.files[0].path))(images)
    assert relative(found, network(images)) < TOLERANCE


def test_a_result_that_differs_is_not_kept(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(FORMATS["safetensors"], read=lambda path: lambda images: network(images) * 1.001)
    monkeypatch.setitem(FORMATS, "safetensors", wrong)
    with pytest.raises(ValueError, match=r"safetensors differs .* nothing was kept"):
        export(network, tmp_path, formats=("safetensors",), rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_comparing_sees_what_is_wrong() -> None:
    shapes = shapes_to_compare((1, 3, 8, 8), dynamic=True, smallest=5)
    assert len({shape[2:] for shape in shapes}) > 3
    assert all(min(shape[2:]) >= 5 for shape in shapes)

    def original(x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))

    assert compare(original, original, shapes) == 0
    assert compare(original, lambda x: original(x) + 0.1 * (x.shape[2] != 8), shapes) > 1e-2
    nan = compare(original, lambda x: original(x) * torch.nan, shapes)
    assert nan != nan
    with pytest.raises(ValueError, match="gave"):
        compare(original, lambda x: original(x)[:, :2], shapes)


def test_refusals(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"global scope, a table for maps up to 8 x 8.*--size fixed"):
        export(tiny(scope=(3, 3, 3, None)), tmp_path, formats=("safetensors",), size="dynamic")
    with pytest.raises(ValueError, match="unknown format tensorrt; choose from onnx"):
        export(network, tmp_path, formats=("tensorrt",))
    with pytest.raises(ValueError, match="no format"):
        export(network, tmp_path, formats=())
    with pytest.raises(ValueError, match="fixed or dynamic"):
        export(network, tmp_path, size="any")
    with pytest.raises(ValueError, match="got Linear"):
        export(torch.nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs images of at least"):
        export(network, tmp_path, formats=("safetensors",), size="dynamic", image_size=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"onnxscript.*pip install 'lambdanets\[export\]'"):
        export(network, tmp_path, formats=("onnx",))
    with pytest.raises(ValueError, match=r"openvino needs .*openvino: pip install 'lambdanets\[openvino\]'"):
        export(network, tmp_path, formats=("openvino",))
    assert list(tmp_path.iterdir()) == []


def test_command(network: Network, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    model = save_pretrained(network, tmp_path / "model")
    arguments = ["export", str(model), str(tmp_path / "out"), "--formats", "program", "safetensors", "--rounds", "1"]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["format"] for one in said["files"]] == ["program", "safetensors"]
    assert said["tolerance"] == formats.TOLERANCE
    assert 0 < said["rounding"] < TOLERANCE
    assert main([*arguments[:3], "--formats", "safetensors", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors │" in shown  # whole, also in 80 columns
    assert "CPU time" in shown
    assert main([*arguments, "--rounds", "0"]) == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
    assert main([*arguments, "--threads", "0"]) == 2
    assert "--threads must be at least 1, got 0" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2


def test_a_file_in_the_place_of_the_folder(network: Network, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="file is a file: exports go into a folder"):
            export(network, place, formats=("safetensors",))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["onnx", "program", "safetensors"])
def test_a_full_disk_is_an_oserror_and_leaves_no_file(name: str, network: Network, tmp_path: Path) -> None:
    """torch's own writer aborts the process, or raises something else."""
    with unlimited_afterwards():
        limit(1000)
        with pytest.raises(OSError, match=r"File too large|os error 27"):
            export(network, tmp_path, formats=(name,), rounds=1)
    assert not list(tmp_path.iterdir())


def test_files_of_other_formats_are_named(network: Network, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = export(network, tmp_path / "out", formats=("program", "safetensors"), rounds=1)
    assert first.left == ()
    model = save_pretrained(network, tmp_path / "model")
    arguments = ["export", str(model), str(tmp_path / "out"), "--rounds", "1", "--formats"]
    assert main([*arguments, "safetensors"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "earlier exports in this folder: model.pt2. If they are of another network, remove it" in said
    assert main([*arguments, "program", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == ["config.json", "README.md", "model.safetensors"]
    assert main([*arguments, "program", "safetensors"]) == 0
    assert "earlier exports" not in capsys.readouterr().out


def test_command_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["export", "resnet26", str(tmp_path), "--untrained", "--formats", "safetensors", "--rounds", "1"]
    small = ["depths=(1,1,1,1)", "widths=(8,8,8,8)", "placement=CCCL", "stem=small", "num_classes=3"]
    assert main([*arguments, "--image-size", "32", "--json", "--options", *small]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["shapes"][0] == [1, 3, 32, 32]
    assert from_pretrained(tmp_path).num_classes == 3
    for wrong, sentence in (
        (["--options", "placment=CCCL"], "placement"),
        (["--options", "scope"], "name=value"),
        (["--image-size", "0"], "image_size must be from 1 to 8192"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert sentence in capsys.readouterr().err
