"""What is delivered: the metadata, the files of wheel and sdist, and what works where only torch and NumPy are."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import check_jsonschema
import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gsoftmax
from gsoftmax import backbones, data, recipes, report, train
from gsoftmax.cli import parser, split_changes
from gsoftmax.completion import commands
from gsoftmax.config import Config
from gsoftmax.data import images
from gsoftmax.report import page

ROOT = Path(__file__).parents[1]
SCHEMAS = {
    "vendor.citation-file-format": ["CITATION.cff"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.github-issue-forms": [f".github/ISSUE_TEMPLATE/{n}.yml" for n in ("bug", "question", "reproduction")],
    "vendor.github-workflows": [f".github/workflows/{n}.yml" for n in ("ci", "wheels")],
}
LOSS = """
import torch, gsoftmax
from gsoftmax.kernels import native
loss_fn = gsoftmax.GSoftmaxLoss(num_classes=3)
x = torch.tensor([[2.0, 1.0, -1.0], [0.5, 0.0, 0.3]], requires_grad=True)
loss = loss_fn(x, torch.tensor([0, 2]))
loss.backward()
step = 1e-3  # the gradient of one output is the slope of the loss
with torch.no_grad():
    moved = x.clone()
    moved[0, 1] += step
    slope = (loss_fn(moved, torch.tensor([0, 2])) - loss) / step
assert abs(slope - x.grad[0, 1]) < 1e-2 * abs(slope), (slope, x.grad)
print(f"{loss.item():.6f}", gsoftmax.__file__, repr(native.unavailable()), sep="\\n")
"""


# what is written down in two places


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(("schema", "files"), SCHEMAS.items(), ids=SCHEMAS)
def test_files_follow_their_published_schema(schema, files):
    paths = [str(ROOT / file) for file in files]
    assert not check_jsonschema.main(["--builtin-schema", schema, *paths], standalone_mode=False)


def test_every_issue_form_is_checked():
    forms = {str(f.relative_to(ROOT)) for f in (ROOT / ".github").rglob("*.yml")}
    assert forms == {file for files in SCHEMAS.values() for file in files if file.startswith(".github")}


def test_the_citation_is_of_this_version_and_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["title"] == "gsoftmax"
    assert citation["version"] == gsoftmax.__version__
    assert citation["license"] == "Apache-2.0"
    paper = citation["preferred-citation"]
    assert [a["family-names"] for a in paper["authors"]] == ["Luo", "Wong", "Kankanhalli", "Zhao"]
    assert (paper["year"], paper["doi"]) == (2020, "10.1109/TNNLS.2019.2909737")


def test_the_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(gsoftmax.__version__)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)


def test_pre_commit_runs_the_versions_of_the_constraints():
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    tools = {"ruff-pre-commit": "ruff", "mirrors-mypy": "mypy", "check-jsonschema": "check-jsonschema"}
    seen = set()
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]:
        name = repo["repo"].rsplit("/", 1)[-1]
        if name in tools:
            seen.add(tools[name])
            assert repo["rev"].removeprefix("v") == pinned[tools[name]]
        if name == "local":
            for hook in repo["hooks"]:  # from the environment that `make setup` builds with the constraints
                tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
                seen.add(tool)
                assert hook["language"] == "system" and tool in pinned
    assert seen >= {"ruff", "mypy", "check-jsonschema"}


def test_everything_the_extras_name_is_pinned():
    pinned = {canonicalize_name(name) for name in pins()}
    wanted = {canonicalize_name(Requirement(r).name) for r in importlib.metadata.requires("gsoftmax")}
    assert wanted - pinned - {"gsoftmax"} == set()


def without_encoding(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls that read or write text in the encoding of the locale."""
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = ast.unparse(node.func)
        last, given = name.rpartition(".")[2], [k.arg for k in node.keywords]
        mode = next((k.value for k in node.keywords if k.arg == "mode"), None)
        if last in ("open", "fdopen") and not name.startswith(("tarfile.", "zipfile.")):
            place = 0 if name not in ("open", "os.fdopen", "gzip.open", "io.open") else 1
            mode = mode or (node.args[place] if len(node.args) > place else ast.Constant("rb" if "." in name else "r"))
            text = isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwaxt+")
            if text and (name != "gzip.open" or "t" in str(mode.value)) and "encoding" not in given:
                yield node.lineno, name
        few = {"read_text": 1, "write_text": 2, "TextIOWrapper": 2}.get(last, 0)
        if "encoding" not in given and len(node.args) < few:
            yield node.lineno, name


def test_text_is_read_and_written_as_utf_8():
    """In every locale; a comparison trained for hours and then had no page."""
    folders = [ROOT / name for name in ("src", "evidence", "benchmarks", "examples", "fuzz", "docs")]
    files = [path for folder in folders for path in folder.rglob("*.py")] + [ROOT / "setup.py"]
    assert len(files) > 120
    found = [(path.name, *call) for path in files for call in without_encoding(ast.parse(path.read_text("utf-8")))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "open(p)",
        "open(p, 'a')",
        "gzip.open(p, 'rt')",
        "p.read_text()",
        "p.write_text(x)",
        "p.open('w')",
        "os.fdopen(f, 'w')",
    ],
)
def test_text_without_an_encoding_is_noticed(line):
    assert len(list(without_encoding(ast.parse(line)))) == 1
    fixed = line[:-1] + ("" if line[-2] == "(" else ", ") + "encoding='utf-8')"
    assert list(without_encoding(ast.parse(fixed))) == []


@pytest.mark.parametrize("command", ["", *commands(parser())])
def test_help_has_examples_that_the_parser_takes(command):
    epilog = (commands(parser())[command] if command else parser()).epilog or ""
    examples = re.findall(r"^  (gsoftmax .*?)(?:   .*|  # .*)?$", epilog, re.M)
    assert examples, f"gsoftmax {command} --help has no example"
    for example in examples:
        words, _ = split_changes(shlex.split(example, comments=True)[1:])
        words = words[: words.index(">")] if ">" in words else words
        parsed = parser().parse_args(words)
        assert command in ("", parsed.command), example


def test_the_bill_of_materials_has_all_that_is_needed_and_its_licences():
    done = subprocess.run([sys.executable, ROOT / ".github" / "bill.py"], capture_output=True, text=True)
    found = json.loads(check(done))
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    parts = {str(canonicalize_name(part["name"])): part for part in found["components"]}
    assert parts.keys() >= closure("torch", "numpy", "jinja2", "pyyaml", "safetensors", "pillow", "timm") - {"gsoftmax"}
    assert not parts.keys() & {"pytest", "mypy", "sphinx", "hypothesis"}  # which reach no user
    for name, part in parts.items():
        assert part["purl"] == f"pkg:pypi/{name}@{importlib.metadata.version(name)}"
        said = part["licenses"][0]["license"]["name"]
        assert not re.search(r"\bA?GPL", said), (name, said)
    refs = [part["bom-ref"] for part in (found["metadata"]["component"], *found["components"])]
    assert len(set(refs)) == len(refs) == len(found["dependencies"])
    assert {ref for each in found["dependencies"] for ref in (each["ref"], *each["dependsOn"])} == set(refs)


# what the package asks of its surroundings


def closure(*names: str) -> set[str]:
    """The distributions that these need, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in requires:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


ONLY_TORCH_AND_NUMPY = """
import importlib, pkgutil, sys

refused, documented = (set(argument.split(",")) for argument in sys.argv[1:])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import gsoftmax

print("|gsoftmax")
for name in documented:
    vars(gsoftmax).pop(name, None)  # another module may have imported it
    try:
        getattr(gsoftmax, name)
    except ImportError as error:
        print("|gsoftmax." + name, "needs", error)
for module in pkgutil.walk_packages(gsoftmax.__path__, "gsoftmax.", onerror=lambda name: None):
    if module.name.rsplit(".")[-1] in ("__main__", "_native"):
        continue
    try:
        importlib.import_module(module.name)
        print("|" + module.name)
    except ImportError as error:
        print("|" + module.name, "needs", error)
"""


def test_modules_import_with_torch_and_numpy_alone():
    allowed = closure("torch", "numpy")
    owners = importlib.metadata.packages_distributions()
    refused = {m for m, dists in owners.items() if not allowed & {canonicalize_name(d) for d in dists}} - {"gsoftmax"}
    assert {"yaml", "scipy", "sklearn", "torchvision"} <= refused
    assert not {"torch", "numpy", "sympy"} & refused
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").iterdir())
    documented = re.findall(r"automodule:: gsoftmax\.(\w+)$", pages, re.M)
    assert {"functional", "losses", "train", "torchmetrics", "integrations"} <= {*documented}
    arguments = [",".join(sorted(refused)), ",".join(documented)]
    done = subprocess.run([sys.executable, "-c", ONLY_TORCH_AND_NUMPY, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line[1:] for line in done.stdout.splitlines() if line.startswith("|")]
    assert {"gsoftmax.functional", "gsoftmax.train", "gsoftmax.report", "gsoftmax.recipes", "gsoftmax.cli"} <= {*lines}
    # modules that are adapters of one library, and say so by their name; not every build of torch brings Triton
    needy = {line.split()[0] for line in lines if " needs " in line and not line.endswith("No module named 'triton'")}
    assert all(name == "gsoftmax.torchmetrics" or name.startswith("gsoftmax.integrations.") for name in needy), lines


WITHOUT_TORCH = """
import sys
import gsoftmax
from gsoftmax.cli import main

for line in ("", "--help", "--version", "heads", "recipes", "datasets", "train --help", "compare --seeds x"):
    try:
        main(line.split())
    except SystemExit:
        pass
    assert "torch" not in sys.modules, line
"""


def test_what_needs_no_torch_does_not_import_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("usage: gsoftmax", "lam=1.0", "wrn-cifar100-gsoftmax", "folder:PATH"))


TINY = b"P6 1 1 255 " + bytes(3)  # a picture
LIBRARIES = {
    "yaml": ("train", lambda folder: recipes.recipes.__wrapped__()),
    "sklearn": ("train", lambda folder: data.load("digits")),
    "PIL": ("train", lambda folder: images.read_image(str(folder / "tiny.ppm"))),
    "torchvision": ("train", lambda folder: backbones.create("resnet101", input_shape=(3, 64, 64))),
    "timm": ("train", lambda folder: backbones.create("timm:resnet18", input_shape=(3, 64, 64))),
    "safetensors": ("train", lambda folder: train.train(table_config(folder), folder / "run")),
    "jinja2": ("report", lambda folder: report.write(document(folder), folder / "report", figures=[])),
    "vl_convert": ("report", lambda folder: report.write(document(folder), folder / "report", figures=["svg"])),
}


def table_config(folder: Path) -> Config:
    x, y = np.random.default_rng(0).normal(size=(90, 3)).astype("float32"), np.arange(90) % 3
    np.savez(folder / "table.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return Config(data=f"npz:{folder / 'table.npz'}", epochs=1, device="cpu")


def document(folder: Path):
    np.savez(folder / "outputs.npz", x=np.random.default_rng(0).normal(size=(90, 3)), y=np.arange(90) % 3)
    return report.from_outputs(folder / "outputs.npz")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_named_with_its_extra_before_the_work(library, monkeypatch, tmp_path):
    extra, use = LIBRARIES[library]
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    page.vega.cache_clear()
    images._pillow.cache_clear()
    (tmp_path / "tiny.ppm").write_bytes(TINY)
    with pytest.raises(ValueError, match="which is not installed: pip install ") as error:
        use(tmp_path)
    assert f"pip install 'gsoftmax[{extra}]'" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists() and not (tmp_path / "report").exists()


# the real thing


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_", "PYTEST"))}
    environment |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    command = [str(word) for word in command]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, **options)


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built in a copy of the repository, so that it neither finds old files nor leaves new ones."""
    copy = tmp_path_factory.mktemp("sdist") / "tree"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".peers", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "runs", "_build",
        "*.so", "*.egg-info",
    )  # fmt: skip
    shutil.copytree(ROOT, copy, ignore=left_out)
    code = "from setuptools import build_meta; print('|' + build_meta.build_sdist('dist'))"
    name = re.findall(r"^\|(.*)$", check(run(sys.executable, "-c", code, cwd=copy)), re.M)[-1]
    return copy / "dist" / name


def build_wheel(sdist: Path, out: Path, **environment: str) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--disable-pip-version-check")
    check(run(sys.executable, "-m", "pip", "wheel", *options, "-w", out, sdist, env=environment, cwd=out))
    return next(out.glob("*.whl"))


def empty_environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel, torch, NumPy and what those two need; returns its folder of programs."""
    venv.create(folder, symlinks=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(check(run(programs / "python", "-c", where)).strip())
    for name in closure("torch", "numpy"):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(distribution.locate_file(top)))
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check")
    check(run(*pip, "install", "--no-deps", "--no-index", wheel))
    for missing in ("yaml", "safetensors", "sklearn", "vl_convert", "torchvision", "PIL"):
        assert run(programs / "python", "-c", f"import {missing}", cwd=folder).returncode == 1, missing
    return programs


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("empty") / "environment", wheel)


def package_files() -> set[str]:
    """Of the sources, as a wheel names them."""
    files = (f for f in (ROOT / "src" / "gsoftmax").rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {f.relative_to(ROOT / "src").as_posix() for f in files if f.suffix not in (".c", ".so")}


@pytest.mark.slow
def test_sdist_and_wheel_are_the_same_bytes_when_they_are_built_again(tmp_path):
    """In another folder, at another time, with another umask: anyone can compare a build with what was published."""
    code = "from setuptools import build_meta as b; print('|' + b.build_sdist('dist') + '|' + b.build_wheel('dist'))"
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "dist", "runs", "tests", "docs", "*.so", "*.egg-info"
    )
    found = []
    for name, umask in (("first", 0o022), ("second/in/a/deeper/folder", 0o077)):
        tree = tmp_path / name
        shutil.copytree(ROOT, tree, ignore=left_out)
        for path in (p for p in tree.rglob("*") if p.is_file() and found):
            os.utime(path, (10**9, 10**9))
            path.chmod(path.stat().st_mode & ~umask)  # as a checkout has them
        check(run(sys.executable, "-c", code, cwd=tree, env={"SOURCE_DATE_EPOCH": "1700000000"}, umask=umask))
        found.append({path.name: path.read_bytes() for path in (tree / "dist").iterdir()})
    assert len(found[0]) == 2 and found[0] == found[1]


@pytest.mark.slow
def test_sdist_holds_the_package_and_nothing_else(sdist):
    with tarfile.open(sdist) as file:
        names = {m.name.split("/", 1)[1] for m in file.getmembers() if m.isfile()}
    assert {f"src/{name}" for name in package_files()} <= names
    assert {f"src/gsoftmax/kernels/{name}" for name in ("native.c", "native_terms.h")} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "CITATION.cff"} <= names
    others = {name.split("/")[0] for name in names}
    assert not others & {"tests", "benchmarks", "results", "docs", "examples", "runs", ".github"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.slow
def test_wheel_holds_the_package_and_its_compiled_part(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata_file = next(n for n in names if n.endswith("dist-info/METADATA"))
        metadata = Parser().parsestr(file.read(metadata_file).decode())
    assert package_files() <= names
    for name in ("py.typed", "recipes/table1.yaml", "report/templates/report.html", "completion.py"):
        assert f"gsoftmax/{name}" in names
    assert {name.split("/")[0] for name in names} == {"gsoftmax", metadata_file.split("/")[0]}
    assert len([n for n in names if re.fullmatch(r"gsoftmax/kernels/_native\.[^/]*(so|pyd)", n)]) == 1
    assert metadata["Version"] == gsoftmax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(Requirement(r).name for r in needed) == ["numpy", "torch"]
    assert metadata.get_payload().startswith("# gsoftmax")


@pytest.mark.slow
def test_loss_and_backward_in_an_empty_environment(programs, tmp_path):
    loss, file, why = check(run(programs / "python", "-W", "error", "-c", LOSS, cwd=tmp_path)).splitlines()
    assert Path(file).is_relative_to(programs.parent)
    assert why == "''"  # the compiled kernel is there
    assert 0 < float(loss) < 2


@pytest.mark.slow
def test_install_without_a_compiler_falls_back(sdist, programs, tmp_path):
    wheel = build_wheel(sdist, tmp_path, CC="false", CXX="false", LDSHARED="false")
    with zipfile.ZipFile(wheel) as file:
        assert not [name for name in file.namelist() if name.endswith((".so", ".pyd"))]
    plain = empty_environment(tmp_path / "environment", wheel)
    loss, file, why = check(run(plain / "python", "-W", "error", "-c", LOSS, cwd=tmp_path)).splitlines()
    assert Path(file).is_relative_to(plain.parent)
    assert "was not built" in why
    compiled = check(run(programs / "python", "-c", LOSS, cwd=tmp_path)).splitlines()[0]
    assert float(loss) == pytest.approx(float(compiled), abs=2e-6)


@pytest.mark.slow
def test_commands_that_need_nothing_else(programs, tmp_path):
    command = programs / "gsoftmax"
    assert check(run(command, "--version", cwd=tmp_path)) == f"gsoftmax {gsoftmax.__version__}\n"
    assert "GSoftmaxHead" in check(
        run(programs / "python", "-c", "import gsoftmax; print(dir(gsoftmax))", cwd=tmp_path)
    )
    assert "lam=1.0" in check(run(command, "heads", cwd=tmp_path))
    assert "folder:PATH" in check(run(command, "datasets", cwd=tmp_path))
    for name in commands(parser()):
        assert "usage: gsoftmax" in check(run(command, name, "--help", cwd=tmp_path))


# what a command lacks, and the extra that has it
LACKING = {
    "compare digits": "train",
    "compare cifar10-fast": "train",
    "train digits --out digits": "train",
    "train npz:table.npz --out table": "train",
    "train wrn-cifar100-gsoftmax --smoke": "train",
    "reproduce table1 --smoke": "train",
    "recipes": "train",
    "evaluate run": "train",
    "predict run table.npz": "train",
    "export run model.onnx": "train",
    "analyze outputs.npz": "report",
    "report run": "report",
    "completion bash": "completion",
}


@pytest.mark.slow
def test_every_command_has_an_entry_or_needs_nothing():
    nothing = {"datasets", "heads"}
    assert {line.split()[0] for line in LACKING} | nothing == set(commands(parser()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with input for the commands: a table, outputs, and a run trained with all dependencies installed."""
    folder = tmp_path_factory.mktemp("finished")
    document(folder)
    train.train(table_config(folder), folder / "run")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("line", "extra"), LACKING.items(), ids=LACKING)
def test_a_missing_extra_is_one_line_that_says_what_to_install(line, extra, programs, finished, tmp_path):
    here = shutil.copytree(finished, tmp_path / "here")
    before = set(here.rglob("*"))
    done = run(programs / "gsoftmax", *line.split(), cwd=here)
    said = done.stderr.strip().splitlines()
    assert (done.returncode, len(said)) == (2, 1), done.stdout + done.stderr
    assert said[0].startswith("gsoftmax: ")
    assert f"pip install 'gsoftmax[{extra}]'" in said[0]
    assert set(here.rglob("*")) == before  # it is said before the work, not after it
