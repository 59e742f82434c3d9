"""Folders of `save_pretrained` in Hugging Face transformers, without a network, and their model card."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lambdanets.models import Card, Preprocessing, create_model, from_pretrained
from lambdanets.models.model_card import GENERATED, README
from lambdanets.models.pretrained import push_to_hub
from lambdanets.train.inference.predict import Given, predict
from lambdanets.train.inference.trained import open_trained
from tests.models.helpers import SMALL, images, small

pytest.importorskip("timm")
pytest.importorskip("lambdanets.timm")  # registers our names

CARD = Card(Preprocessing(size=40), ("cat", "dog", "*<b>|x|*", "a", "b", "c", "d"), {"validation_top1": 0.784})


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="needs transformers: pip install transformers")


@pytest.mark.parametrize("case", SMALL)
def test_a_saved_folder_is_a_classifier_for_transformers(case: str, transformers, tmp_path: Path) -> None:
    network, x = small(case).eval(), images(case, dtype=torch.float64)
    network.save_pretrained(tmp_path / "ours")
    network.double()
    model, report = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), "every weight was found, shared tables too"
    with torch.no_grad():
        torch.testing.assert_close(model.double()(x).logits, network(x))
    model.save_pretrained(tmp_path / "theirs")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(again.double()(x).logits, network(x))


def test_features_in_transformers(transformers, tmp_path: Path) -> None:
    network, x = small("vanilla").eval(), images("vanilla")
    network.save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        found = model(x)
        torch.testing.assert_close(found.last_hidden_state, network.forward_features(x))
        torch.testing.assert_close(found.pooler_output, network.forward_head(found.last_hidden_state, pre_logits=True))


def test_the_pipeline_predicts_what_we_predict(transformers, tmp_path: Path) -> None:
    small("vanilla").save_pretrained(tmp_path / "model", CARD)
    generator = np.random.default_rng(0)
    picture = Image.fromarray(generator.integers(0, 256, (8, 10, 3), dtype=np.uint8)).resize((70, 50), 3)
    picture.save(tmp_path / "picture.png")
    classify = transformers.pipeline("image-classification", model=str(tmp_path / "model"), device="cpu")
    found = {one["label"]: one["score"] for one in classify(str(tmp_path / "picture.png"), top_k=7)}
    (ours,) = predict(open_trained(str(tmp_path / "model")), [Given("picture", str(tmp_path / "picture.png"))], top=7)
    assert found == pytest.approx(dict(ours.classes), rel=1e-3, abs=1e-6)
    assert [name for name, _ in ours.classes] == list(found)


def test_old_folders_load_as_before(tmp_path: Path) -> None:
    """They have the classes among the arguments, and no card."""
    import timm

    network, x = small("vanilla").eval(), images("vanilla")
    folder = network.save_pretrained(tmp_path)
    (folder / README).unlink()
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"model_args": {', '"model_args": {\n    "num_classes": 7,', 1))
    assert config.read_text() != text
    with torch.no_grad():
        assert torch.equal(from_pretrained(folder).eval()(x), network(x))
        assert torch.equal(timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(x), network(x))


def test_the_model_card_shows_results_and_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = small("vanilla")
    network.save_pretrained(tmp_path / "path" / "to" / "this" / "folder", CARD)
    text = (tmp_path / "path" / "to" / "this" / "folder" / README).read_text()
    assert text.startswith("---\nlibrary_name: lambdanets\n")
    assert "| validation&#95;top1 | 0.784 |" in text
    assert "7 classes (cat, dog, &#42;&#60;b&#62;&#124;x&#124;&#42;, a" in text
    assert "| 40 x 40 pixels, 3 channels" in text
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        if "transformers" not in block:
            made: dict = {}
            exec(block, made)
            assert torch.equal(made["model"].state_dict()["fc.weight"], network.state_dict()["fc.weight"])


def test_a_card_that_was_changed_stays(tmp_path: Path) -> None:
    network = create_model("lambda_patch_tiny", width=16, depth=4)
    network.save_pretrained(tmp_path, Card(metrics={"top1": 1.0}))
    network.save_pretrained(tmp_path, Card(metrics={"top1": 2.0}))
    assert "| top1 | 2 |" in (tmp_path / README).read_text()
    (tmp_path / README).write_text((tmp_path / README).read_text().replace(GENERATED, "mine"))
    network.save_pretrained(tmp_path, Card(metrics={"top1": 3.0}))
    assert "| top1 | 2 |" in (tmp_path / README).read_text()


@pytest.mark.parametrize("there", [True, False])
def test_a_card_on_the_hub_stays(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: dict[str, str] = {}

    class Hub:
        def create_repo(self, repo_id: str, exist_ok: bool) -> None: ...

        def file_exists(self, repo_id: str, filename: str, revision: str | None) -> bool:
            return there and (repo_id, filename, revision) == ("me/model", README, "v1")

        def upload_folder(self, repo_id: str, folder_path: str, revision: str) -> str:
            uploaded.update({path.name: path.read_text("latin-1") for path in Path(folder_path).iterdir()})
            return "address"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    network = create_model("lambda_patch_tiny", width=16, depth=4)
    assert push_to_hub(network, "me/model", revision="v1") == "address"
    assert (README in uploaded) is not there
    if not there:
        assert 'timm.create_model("hf-hub:me/model"' in uploaded[README]
