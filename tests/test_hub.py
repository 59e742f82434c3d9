"""Doors of other hubs: torch.hub's entry points, and the operation as a kernel package for the Hugging Face hub."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from lambdanets import LambdaLayer2d, list_models
from lambdanets.ops import Relative, lambda_reference
from tests.models.helpers import images, small
from tests.support.scripts import ROOT, script


def test_torch_hub_has_every_network(tmp_path: Path) -> None:
    assert set(list_models()) <= {name for name, value in vars(script("hubconf.py")).items() if callable(value)}
    options = {"placement": "CLLL", "num_classes": 7}
    network, x = small("vanilla").eval(), images("vanilla")
    network.save_pretrained(tmp_path)
    found = torch.hub.load(str(ROOT), "resnet26", source="local", pretrained=str(tmp_path), **options).eval()
    with torch.no_grad():
        assert torch.equal(found(x), network(x))


OUTSIDE = """
import importlib.util, sys
import torch

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lambdanets":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())

def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

kernel = load(sys.argv[1], "_kernel_1")
queries, keys, values, table, x, layer = torch.load(sys.argv[2], weights_only=True)
inputs = [one.requires_grad_() for one in (queries, keys, values, table)]
found = []
compiled = torch.compile(kernel.lambda_op, backend="aot_eager", fullgraph=True)
for function in (kernel.lambda_op, kernel.lambda_reference, compiled):
    output = function(queries, keys, values, kernel.Relative(table, (6, 5)))
    found.append([output.detach(), *torch.autograd.grad(output.square().sum(), inputs)])
assert not [name for name in sys.modules if name.partition(".")[0] in ("lambdanets", "rich", "tyro", "numpy.testing")]

module = torch.nn.Module()
module.to_queries, module.to_keys, module.to_values = (torch.nn.Linear(8, n, bias=False).double() for n in (8, 4, 6))
module.norm_queries, module.norm_values = torch.nn.BatchNorm2d(8).double(), torch.nn.BatchNorm2d(6).double()
module.heads = 2
module.register_buffer("table", torch.zeros(3, 3, 4).double())
module.load_state_dict(layer)
found.append([kernel.layers.LambdaLayer2d.forward(module.eval(), x).detach()])
if len(sys.argv) > 4:  # another version beside it
    load(sys.argv[4], "_kernel_2")
torch.save(found, sys.argv[3])
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    script("benchmarks/hub_kernel.py").HubKernel(folder, repo_id="me/lambda-op").run()
    return folder


def test_the_kernel_package_runs_without_lambdanets(kernel: Path, tmp_path: Path) -> None:
    """As `kernels` imports it: from a path outside of Python's, under a name of its own, two versions at once."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    B, side, H, K, V = 2, (6, 5), 2, 4, 3
    places = side[0] * side[1]
    inputs = [random(B, places, H, K), random(B, places, K), random(B, places, V), random(5, 3, K)]
    layer = LambdaLayer2d(8, 12, heads=2, key_depth=4, scope=3).double()
    layer(random(4, 8, 6, 5))
    x = random(2, 8, 6, 5)
    state = {name: value for name, value in layer.state_dict().items() if name != "positions.table"}
    state["table"] = layer.positions.table.detach()
    torch.save([*inputs, x, state], tmp_path / "inputs.pt")
    (tmp_path / "outside.py").write_text(OUTSIDE)
    source = kernel / "torch-ext" / "lambda_op"
    other = tmp_path / "other"
    namespace = re.search(r'NAMESPACE = "(\w+)"', (source / "triton" / "register.py").read_text())
    assert namespace is not None
    for path in source.rglob("*.py"):
        (other / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        (other / path.relative_to(source)).write_text(path.read_text().replace(namespace[1], f"{namespace[1]}_next"))
    arguments = [str(source), str(tmp_path / "inputs.pt"), str(tmp_path / "found.pt"), str(other)]
    command = [sys.executable, "-P", str(tmp_path / "outside.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *found, through_layer = torch.load(tmp_path / "found.pt", weights_only=True)
    inputs = [one.requires_grad_() for one in inputs]
    queries, keys, values, table = inputs
    output = lambda_reference(queries, keys, values, Relative(table, side))
    expected = [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]
    for way in found:
        torch.testing.assert_close(way, expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(through_layer[0], layer.eval()(x), rtol=1e-9, atol=1e-9)


def test_the_kernel_package_has_the_layout_of_kernel_builder(kernel: Path) -> None:
    said = tomllib.loads((kernel / "build.toml").read_text())
    assert said["torch-noarch"] == {}
    assert (said["general"]["name"], said["general"]["backends"]) == ("lambda-op", ["cpu", "cuda"])
    assert said["general"]["hub"]["repo-id"] == "me/lambda-op"
    assert 'get_kernel("me/lambda-op"' in (kernel / "README.md").read_text()
    sources = [path for path in kernel.rglob("*.py") if "benchmarks" not in path.parts]
    assert len(sources) > 30
    for path in sources:
        assert not re.search(r"^\s*(from|import) lambdanets", path.read_text(), re.MULTILINE), path
        assert not re.search(r"torch\.ops\.lambdanets|\"lambdanets[\":]", path.read_text()), path
    namespaces = {text for path in sources for text in re.findall(r"\blambda_op_[0-9a-f]{12}\b", path.read_text())}
    assert len(namespaces) == 1


def test_what_is_no_kernel_package_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(SystemExit, match="is not a kernel package"):
        script("benchmarks/hub_kernel.py").HubKernel(tmp_path).run()
    assert (tmp_path / "mine").read_text() == "keep"


@pytest.mark.parametrize("backend", ["cpu"])
def test_the_kernels_library_loads_it(kernel: Path, backend: str) -> None:
    kernels = pytest.importorskip("kernels", reason="needs kernels: pip install kernels")
    from kernels.layer.layer import _validate_layer

    found = kernels.get_local_kernel(kernel, backend=backend)

    class Replaced(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    _validate_layer(check_cls=Replaced, cls=found.layers.LambdaLayer2d, repo="lambda-op")
    benchmark = script_class(kernel / "benchmarks" / "benchmark.py")()
    benchmark.kernel = found
    benchmark.setup_map7()
    benchmark.benchmark_map7()
    torch.testing.assert_close(benchmark.out, benchmark.verify_map7(), rtol=1e-3, atol=1e-3)


def script_class(path: Path) -> type:
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["LambdaBenchmark"]
