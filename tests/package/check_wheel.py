"""Build the sdist and the wheel, and check them in fresh environments.

    python tests/package/check_wheel.py [--pythons python3.11 python3.12] [--torch torch==2.13.0] [--dist dist]

Not part of the test suite, because it installs torch from the package index. For each interpreter it makes a virtual
environment, installs the wheel with its dependencies, and runs the commands and PROGRAM below in an empty folder.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "lambdanets" / "__init__.py").read_text(), re.MULTILINE)[1]  # type: ignore[index]
IN_SDIST = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")

# Values and gradients of a layer and a network, from the installed package.
PROGRAM = """
import importlib.metadata, pathlib, sys
import torch
import lambdanets

assert pathlib.Path(sys.prefix) in pathlib.Path(lambdanets.__file__).parents, lambdanets.__file__
assert importlib.metadata.version("lambdanets") == lambdanets.__version__ == sys.argv[1]
torch.manual_seed(0)
x = torch.randn(2, 64, 14, 14)
layer = lambdanets.LambdaLayer2d(64)
layer(x).square().sum().backward()
assert layer(x).shape == x.shape and all(p.grad.isfinite().all() for p in layer.parameters())
network = lambdanets.create_model("resnet26", placement="CCLL", num_classes=10).eval()
with torch.no_grad():
    assert network(torch.randn(2, 3, 64, 64)).shape == (2, 10)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: forward and backward pass")
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return what it printed; without PYTHONPATH, so that only what is installed is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=environment)
    if done.returncode:
        shown = " ".join("..." if "\n" in str(word) else str(word) for word in command)
        raise SystemExit(f"{shown} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def environment(folder: Path, python: str) -> Path:
    """Make a virtual environment and return its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def tracked(path: str = ".") -> list[str]:
    """The files of the working tree that git tracks, relative to the root of the repository."""
    names = run("git", "-C", ROOT, "ls-files", path).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def build(work: Path, dist: Path) -> tuple[Path, Path]:
    """Build from the tracked files alone: the sdist, and the wheel from the sdist."""
    source = work / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    python = environment(work / "build", sys.executable)
    run(python, "-m", "pip", "install", "--quiet", "build", "twine")
    shutil.rmtree(dist, ignore_errors=True)
    run(python, "-m", "build", "--outdir", dist, source)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    run(python, "-m", "twine", "check", "--strict", sdist, wheel)  # does the README render on the package index?
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Every tracked file of the package must be in both archives, and nothing else may be in the wheel."""
    package = set(tracked("lambdanets"))
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
        about = f"lambdanets-{VERSION}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{about}/METADATA").decode())
        assert "lambdanets = lambdanets.cli:main" in archive.read(f"{about}/entry_points.txt").decode()
    assert metadata["Version"] == VERSION, metadata["Version"]
    assert f"{about}/licenses/LICENSE" in found, "the wheel has no licence"
    inside = {name for name in found if not name.startswith(f"{about}/")}
    assert inside == package, f"missing: {sorted(package - inside)}, not tracked: {sorted(inside - package)}"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not (missing := (package | set(IN_SDIST)) - names), f"the sdist lacks {sorted(missing)}"
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names), "the sdist is too large"
    sizes = ", ".join(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB" for path in (sdist, wheel))
    print(f"{sizes}; {len(package)} files of the package in both")


def check_installed(python: str, wheel: Path, torch: str, work: Path) -> None:
    """Install the wheel into a fresh environment of this interpreter, and use it there."""
    begin = time.monotonic()
    fresh = work / "fresh"
    inside, empty = environment(fresh, python), work / "empty"
    empty.mkdir(exist_ok=True)
    run(inside, "-m", "pip", "install", "--quiet", "--no-cache-dir", torch, wheel)
    run(inside, "-m", "pip", "check")
    command = fresh / "bin" / "lambdanets"
    assert run(command, "--version", cwd=empty) == f"lambdanets {VERSION}\n"
    assert "lambda_resnet50" in run(command, "models", cwd=empty)
    run(command, "bench", "op", "--help", cwd=empty)
    print(run(inside, "-c", PROGRAM, VERSION, cwd=empty).strip())
    run(command, "selftest", "--cases", "40", cwd=empty)
    assert not any(empty.iterdir()), f"files were left: {list(empty.iterdir())}"
    shutil.rmtree(fresh)  # with CUDA packages an environment has several gigabytes
    print(f"  commands and 40 cases of the self-test; {time.monotonic() - begin:.0f} s with the installation")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="*", default=[sys.executable], help="interpreters; none: only build")
    parser.add_argument("--torch", default="torch", help="requirement, for example torch==2.13.0")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where both archives are left")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder), options.dist)
        check_contents(sdist, wheel)
        for python in options.pythons:
            check_installed(python, wheel, options.torch, Path(folder))


if __name__ == "__main__":
    main()
