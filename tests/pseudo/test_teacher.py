"""Teachers of other libraries, ensembles, and class lists that do not fit."""

import pytest
import torch
from safetensors.torch import save_file

from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.transforms import normalize
from lambdanets.pseudo.files import read_manifest
from lambdanets.pseudo.label import LabelOptions
from lambdanets.pseudo.teacher import open_teachers, read_names
from lambdanets.train.inference.command import Using
from tests.pseudo.made import USING, label_all, make_files, make_teacher
from tests.train.weights import MEAN, NAMES, SIZE, STD, small_network, small_weights

IMAGES = torch.randint(0, 256, (4, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def plain(network, preprocessing):
    with torch.no_grad():
        return network(normalize(IMAGES, preprocessing)).softmax(1)


def test_a_network_of_timm_with_local_weights(tmp_path):
    import timm

    network = timm.create_model("resnet10t", num_classes=5).eval()
    save_file(network.state_dict(), str(tmp_path / "w.safetensors"))
    found = open_teachers(f"timm:resnet10t@{tmp_path / 'w.safetensors'}", USING)
    assert found.class_names == ("0", "1", "2", "3", "4")
    preprocessing = found.teachers[0].preprocessing
    assert (preprocessing.size, preprocessing.crop) == (176, 0.875)
    torch.testing.assert_close(found.probabilities([IMAGES]), plain(network, preprocessing))
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne\n")
    named = open_teachers(f"timm:resnet10t@{tmp_path / 'w.safetensors'}", USING, str(tmp_path / "names.txt"))
    assert named.class_names == tuple("abcde")


def test_a_network_of_torchvision_with_local_weights(tmp_path):
    from torchvision import models

    network = models.get_model("mobilenet_v3_small", weights=None, num_classes=3).eval()
    torch.save({"state_dict": network.state_dict()}, tmp_path / "w.pth")
    found = open_teachers(f"torchvision:mobilenet_v3_small@{tmp_path / 'w.pth'}", USING)
    assert found.class_names == ("0", "1", "2")
    preprocessing = Preprocessing(size=224, crop=224 / 256, interpolation="bilinear")
    assert found.teachers[0].preprocessing == preprocessing
    torch.testing.assert_close(found.probabilities([IMAGES]), plain(network, preprocessing))


def save_both(network, folder):
    """A file of either format; in safetensors tensors are ordered by dtype and name, not as the network has them."""
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, folder / "w.safetensors")
    torch.save(network.state_dict(), folder / "w.pth")
    return [folder / "w.safetensors", folder / "w.pth"]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "maxvit_t"])
def test_classes_of_torchvision_are_counted_in_either_format(tmp_path, name):
    from torchvision import models

    network = models.get_model(name, weights=None, num_classes=10).eval()
    for path in save_both(network, tmp_path):
        found = open_teachers(f"torchvision:{name}@{path}", USING)
        assert found.class_names == tuple("0123456789")
        state = found.teachers[0].network.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in network.state_dict().items())


@pytest.mark.parametrize("name", ["levit_128s", "deit_tiny_distilled_patch16_224", "resnet10t"])
@pytest.mark.parametrize("classes", [10, 1000])
def test_classes_of_timm_are_counted_in_either_format(tmp_path, name, classes):
    import timm

    network = timm.create_model(name, num_classes=classes).eval()
    for path in save_both(network, tmp_path):
        found = open_teachers(f"timm:{name}@{path}", USING)
        assert len(found.class_names) == classes
        state = found.teachers[0].network.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in network.state_dict().items())


def test_a_pickle_that_could_run_code_is_refused(tmp_path):
    class Runs:
        def __reduce__(self):
            return print, ("it ran",)

    torch.save({"x": Runs()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="could run code"):
        open_teachers(f"timm:resnet10t@{tmp_path / 'w.pth'}", USING)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("timm:resnet10t", "has no weights: write timm:resnet10t@FILE"),
        ("timm:resnet10t@nowhere.safetensors", "no such weights file"),
        ("nowhere", "is not the folder of a run"),
        (",", "there is no teacher"),
    ],
)
def test_what_is_missing_is_said(what, says):
    with pytest.raises((ValueError, OSError), match=says):
        open_teachers(what, USING)


def test_weights_of_another_network_are_refused(tmp_path):
    save_file({"fc.bias": torch.zeros(3)}, str(tmp_path / "w.safetensors"))
    with pytest.raises(ValueError, match="does not fit timm:resnet10t"):
        open_teachers(f"timm:resnet10t@{tmp_path / 'w.safetensors'}", USING)
    with pytest.raises(ValueError, match="timm has no network"):
        open_teachers(f"timm:resnet1@{tmp_path / 'w.safetensors'}", USING)


def test_an_ensemble_is_the_mean_also_if_its_classes_are_in_another_order(tmp_path):
    one, first = small_weights(tmp_path / "one.safetensors")
    turned = (*NAMES[3:], *NAMES[:3])
    other, second = small_weights(tmp_path / "other.safetensors", turned, key_depth=2)
    found = open_teachers(f"{first}, {second}", USING)
    assert found.class_names == NAMES
    assert len(found.views) == 1
    preprocessing = Preprocessing(MEAN, STD, SIZE, 1.0)
    a, b = plain(one, preprocessing), plain(other, preprocessing)
    expected = (a + torch.cat([b[:, 4:], b[:, :4]], 1)) / 2
    torch.testing.assert_close(found.probabilities([IMAGES]), expected)
    assert not torch.allclose(found.probabilities([IMAGES]), (a + b) / 2, atol=1e-3)


def test_teachers_that_see_images_otherwise_share_an_ensemble(tmp_path):
    from lambdanets.models import Card, save_weights

    first = make_teacher(tmp_path / "one.safetensors")
    large = save_weights(small_network(), tmp_path / "large.safetensors", Card(Preprocessing(size=20), NAMES))
    done = label_all(f"{first},{large}", make_files(tmp_path / "files", 6), tmp_path / "out")
    assert done.images == 6
    assert [t["size"] for t in read_manifest(tmp_path / "out").teachers] == [SIZE, 20]


def test_a_teacher_with_another_class_list_is_refused(tmp_path):
    first = make_teacher(tmp_path / "one.safetensors")
    second = make_teacher(tmp_path / "other.safetensors", names=(*NAMES[:-1], "hen"))
    with pytest.raises(ValueError, match=r"other.safetensors has 7 classes and .* only one of them has '(gnu|hen)'"):
        open_teachers(f"{first},{second}", USING)
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"has 2 names, but .* has 7 classes"):
        open_teachers(first, USING, str(tmp_path / "names.txt"))
    (tmp_path / "names.txt").write_text("\n".join("abcdefg"))
    with pytest.raises(ValueError, match="has class names of its own"):
        open_teachers(first, USING, str(tmp_path / "names.txt"))


def test_half_precision_is_as_close_as_torchs(tmp_path):
    teacher = make_teacher(tmp_path / "one.safetensors")
    single = open_teachers(teacher, USING).probabilities([IMAGES])
    half = open_teachers(teacher, Using(device="cpu", precision="bfloat16")).probabilities([IMAGES])
    assert half.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(small_network(), Preprocessing(MEAN, STD, SIZE, 1.0)).float()
    assert (half - single).abs().max() <= 2 * (expected - single).abs().max()
    assert not torch.equal(half, single)


def test_names_of_imagenet():
    names = read_names("imagenet")
    assert len(names) == 1000
    assert names[0] == "n01440764"
    assert read_names("imagenet-words")[0] == "tench"


def test_names_of_weights(tmp_path):
    what = make_teacher(tmp_path / "one.safetensors")
    assert read_names(what) == NAMES
    small_network().save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="these weights do not name their classes"):
        read_names(str(tmp_path / "folder" / "model.safetensors"))


def test_options_are_checked():
    with pytest.raises(ValueError, match="max_broken"):
        LabelOptions(max_broken=2)
    with pytest.raises(ValueError, match="guard_distance"):
        LabelOptions(guard_distance=33)
