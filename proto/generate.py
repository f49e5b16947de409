"""Generates the Python, TypeScript and Go sides of the contracts, their descriptors for tools and other languages, and
docs/contracts.md. C++ generates its own where it is built.

The output is committed, so that nobody needs protoc; it depends only on the .proto files and the pinned
generators, and `--check` proves that it is fresh. TypeScript needs its generator from npm (`make typescript`), Go those
of Debian 12: a side without its generators is left as it is, and named. `make proto` and `make proto-check` call this.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

PROTO_ROOT = Path(__file__).resolve().parent
PYTHON_ROOT = PROTO_ROOT.parent / "clients" / "python"
TYPESCRIPT = PROTO_ROOT.parent / "clients" / "typescript"
TYPESCRIPT_PLUGIN = TYPESCRIPT / "node_modules" / ".bin" / "protoc-gen-es"
GO = PROTO_ROOT.parent / "clients" / "go"
GO_MODULE = "github.com/astraflow/astraflow/clients/go"
# Code of newer ones needs a newer gRPC than Debian's; this compiles with both.
GO_PLUGINS = {"protoc-gen-go": "protoc-gen-go v1.28.1", "protoc-gen-go-grpc": "protoc-gen-go-grpc 1.0"}
GOOGLE_RPC = ("google/rpc/error_details.proto", "google/rpc/status.proto")
PAGE = PROTO_ROOT.parent / "docs" / "contracts.md"
DESCRIPTORS = PROTO_ROOT.parent / "clients" / "descriptors" / "astraflow.binpb"
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi", "_pb.ts", ".pb.go")


def main() -> int:
    """Generate, or with `--check` compare; returns 0 when the tree under `--into` is fresh afterwards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and list what differs")
    parser.add_argument("--into", type=Path, default=PYTHON_ROOT, help="source root to write or check")
    parser.add_argument(
        "--typescript", type=Path, default=TYPESCRIPT / "src" / "gen", help="the same in TypeScript"
    )
    parser.add_argument("--go", type=Path, default=GO / "astraflow", help="the same in Go")
    parser.add_argument("--page", type=Path, default=PAGE, help="page of all rpcs to write or check")
    parser.add_argument("--descriptors", type=Path, default=DESCRIPTORS, help="descriptors to write or check")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trees = {arguments.into: generate(new_folder(scratch, "python"))}
        if TYPESCRIPT_PLUGIN.exists():
            trees[arguments.typescript] = generate_typescript(new_folder(scratch, "typescript"))
        else:
            print("proto: TypeScript is left as it is; `make typescript` installs its generator")
        if (other := other_go_plugin()) is None:
            trees[arguments.go] = generate_go(new_folder(scratch, "go"))
        else:
            print(f"proto: Go is left as it is; {other}")
        described = describe()
        singles = {
            arguments.page: page_of_rpcs(described).encode(),
            arguments.descriptors: described.SerializeToString(deterministic=True),
        }
        stale = [name for into, fresh in trees.items() for name in differences(fresh, into=into)]
        stale += stale_files(singles)
        if arguments.check:
            return report(stale)
        for into, fresh in trees.items():
            install(fresh, into=into)
        for path, content in singles.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        num_files = len(singles) + sum(len(fresh) for fresh in trees.values())
        print(f"proto: {num_files} files, {len(stale)} changed, in {' and '.join(map(str, trees))}")
    return 0


def generate(scratch: Path) -> dict[str, Path]:
    """Run protoc into the empty folder `scratch`; returns relative path -> generated file."""
    outputs = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy")]
    # Abstract stubs would demand rpcs that a contract declares missing; the kit checks servicers at start.
    outputs.append(f"--mypy_grpc_out=generate_concrete_servicer_stubs:{scratch}")
    plugins = [f"--plugin=protoc-gen-{name}={plugin(name)}" for name in ("mypy", "mypy_grpc")]
    protoc(*plugins, *outputs)
    remove_empty_services(scratch)
    add_package_markers(scratch)
    return {str(path.relative_to(scratch)): path for path in sorted(scratch.rglob("*")) if path.is_file()}


def generate_typescript(scratch: Path) -> dict[str, Path]:
    """The same for TypeScript, with the error details of `google.rpc`, for which npm has no kept package."""
    plugin_options = [f"--plugin=protoc-gen-es={TYPESCRIPT_PLUGIN}", f"--es_out={scratch}"]
    protoc(*plugin_options, "--es_opt=target=ts,import_extension=js", *GOOGLE_RPC)
    return {str(path.relative_to(scratch)): path for path in sorted(scratch.rglob("*.ts"))}


def other_go_plugin() -> str | None:
    """Why Go cannot be generated here as it was; None when it can."""
    for name, version in GO_PLUGINS.items():
        path = shutil.which(name)
        found = subprocess.check_output([path, "--version"], text=True).strip() if path else "none"
        if found != version:
            return f"its generator is {version} (Debian 12: {', '.join(GO_PLUGINS)}), found {found}"
    return None


def generate_go(scratch: Path) -> dict[str, Path]:
    """The same for Go, in packages named after the files' `go_package`."""
    kinds = ("go", "go-grpc")
    protoc(
        *(f"--{kind}_out={scratch}" for kind in kinds),
        *(f"--{kind}_opt=module={GO_MODULE}" for kind in kinds),
    )
    return {str(path.relative_to(scratch / "astraflow")): path for path in sorted(scratch.rglob("*.go"))}


def new_folder(parent: str, name: str) -> Path:
    """An empty folder."""
    folder = Path(parent, name)
    folder.mkdir()
    return folder


def protoc(*options: str) -> None:
    """Run protoc over every contract. Exits with its message when it refuses them."""
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto file under {PROTO_ROOT}; this script belongs beside the contracts")
    command = [sys.executable, "-m", "grpc_tools.protoc", *include_paths(), *options, *sources]
    finished = subprocess.run(command, cwd=PROTO_ROOT, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"protoc refused the contracts (exit {finished.returncode}):\n{finished.stderr}")


def describe() -> descriptor_pb2.FileDescriptorSet:
    """Return the contracts as protoc reads them, with imports; ours with their comments."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "all.pb"
        protoc(f"--descriptor_set_out={output}", "--include_imports", "--include_source_info")
        described = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    for file in described.file:
        if not (PROTO_ROOT / file.name).exists():
            file.ClearField("source_code_info")
    return described


def page_of_rpcs(described: descriptor_pb2.FileDescriptorSet) -> str:
    """Return the text of docs/contracts.md."""
    sys.path.insert(0, str(PROTO_ROOT))
    from contracts_page import page

    return page(described)


def stale_files(wanted: dict[Path, bytes]) -> list[str]:
    """Name the committed files whose content is not the wanted one."""
    return [
        str(path) for path, content in wanted.items() if not path.exists() or path.read_bytes() != content
    ]


def include_paths() -> list[str]:
    """Where imports resolve: our contracts, protobuf's well-known types, then google.rpc."""
    return [
        f"-I{PROTO_ROOT}",
        f"-I{package_folder('grpc_tools') / '_proto'}",
        f"-I{package_folder('google.rpc').parents[1]}",
    ]


def package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed in {sys.prefix}; `make proto` installs it")
    return Path(next(iter(spec.submodule_search_locations)))


def plugin(name: str) -> Path:
    """The protoc plug-in of this environment, so that another one on PATH is never used by accident."""
    path = Path(sys.executable).parent / f"protoc-gen-{name}"
    if not path.exists():
        raise SystemExit(f"{path} is missing; run `make proto`, which installs mypy-protobuf first")
    return path


def remove_empty_services(scratch: Path) -> None:
    """Drop the service modules of files that declare only messages: there is nothing in them to import."""
    for module in sorted(scratch.rglob("*_pb2_grpc.py")):
        if "class " not in module.read_text():
            module.unlink()
            module.with_suffix(".pyi").unlink()


def add_package_markers(scratch: Path) -> None:
    """Make `astraflow/<domain>` and below regular packages; the root `astraflow` is written by hand."""
    for domain in sorted(scratch.glob("*/*")):
        origin = f"proto/{domain.relative_to(scratch)}"
        for folder in (domain, *(path for path in domain.rglob("*") if path.is_dir())):
            (folder / "__init__.py").write_text(f'"""Generated contracts: see {origin}."""\n')


def differences(fresh: dict[str, Path], *, into: Path) -> list[str]:
    """Relative paths that are missing, different, or committed though no .proto makes them any more."""
    changed = [name for name, path in fresh.items() if not same_bytes(path, into / name)]
    return sorted(changed + leftovers(fresh, into=into))


def leftovers(fresh: dict[str, Path], *, into: Path) -> list[str]:
    """Generated files under `into` that no .proto makes any more."""
    found = (path for path in into.rglob("*") if path.name.endswith(GENERATED_SUFFIXES))
    return [name for name in (str(path.relative_to(into)) for path in found) if name not in fresh]


def same_bytes(one: Path, other: Path) -> bool:
    """Whether both files exist and hold the same bytes."""
    return other.exists() and one.read_bytes() == other.read_bytes()


def install(fresh: dict[str, Path], *, into: Path) -> None:
    """Bring `into` up to date; files that are already equal keep their time stamps."""
    for name in leftovers(fresh, into=into):
        (into / name).unlink()
    for name, path in fresh.items():
        if not same_bytes(path, into / name):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, into / name)


def report(stale: list[str]) -> int:
    """Say which committed files differ from what the contracts make now."""
    for name in stale:
        print(f"stale generated file: {name}")
    if stale:
        print("run `make proto` and commit the result")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
