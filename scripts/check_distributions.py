"""Build the wheel and the sdist, check their contents, and use the wheel as a newcomer without a compiler would.

    python scripts/check_distributions.py --dist dist                  # builds and checks
    python scripts/check_distributions.py --dist dist --environment build/clean    # and installs and runs

The environment is a fresh one without any extra; no folder of compilers is on its path.  Needs hatchling.
"""

from __future__ import annotations

import argparse
import email.parser
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
# The program for the clean environment: the library alone, on a model of two layers.
USE = """
import shutil, sys
assert not [name for name in ("cc", "gcc", "g++", "clang", "nvcc") if shutil.which(name)], "there is a compiler"
import torch, transformers, prefixkit
assert prefixkit.__version__ == "{version}" and "{root}" not in prefixkit.__file__, prefixkit.__file__
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=None, pad_token_id=None, bos_token_id=None,
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).eval()
prompts = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
greedy = dict(do_sample=False, max_new_tokens=6)
plain = model.generate(prompts, **greedy)
assert prefixkit.patch(model, tree_cache="always") is model
assert torch.equal(model.generate(prompts, **greedy), plain)
result = prefixkit.generate(model, None, prompts.tolist(), n=3, max_new_tokens=4, temperature=0.8)
assert len(result) == 6 and len(result[0].tokens) == 4
assert all(getattr(prefixkit, name) is not None for name in prefixkit.__all__)
prefixkit.unpatch(model)
print(result)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, in a folder."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, stdout=sys.stderr)
    return folder / f"prefixkit-{VERSION}-py3-none-any.whl", folder / f"prefixkit-{VERSION}.tar.gz"


def tracked(*below: str) -> set[str]:
    """Files tracked by git, below some folders."""
    listed = subprocess.run(["git", "ls-files", "-z", *below], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def faults(wheel: Path, sdist: Path) -> list[str]:
    """The faults of wheel and sdist: missing files, superfluous files, wrong metadata."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        metadata = archive.read(f"prefixkit-{VERSION}.dist-info/METADATA")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    package = tracked("prefixkit")
    named = {one.removeprefix("/") for one in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    beyond = {name for name in in_wheel if ".dist-info/" not in name} - package
    found = [f"the wheel lacks {name}" for name in sorted(package - in_wheel)]
    found += [f"the wheel holds {name}" for name in sorted(beyond)]
    found += [f"the sdist names {name}, which is not there" for name in sorted(named) if not (ROOT / name).exists()]
    wanted = tracked(*named, "README.md", "LICENSE", "pyproject.toml")
    found += [f"the sdist lacks {name}" for name in sorted(wanted - in_sdist)]
    return found + _metadata_faults(metadata)


def _metadata_faults(text: bytes) -> list[str]:
    metadata = Metadata.from_email(text, validate=True)  # or raise
    message = email.parser.BytesParser().parsebytes(text)
    found = [] if str(metadata.version) == VERSION else [f"METADATA has the version {metadata.version}"]
    found += [] if message.get_payload() else ["METADATA has no description"]
    extras = set(PROJECT["project"]["optional-dependencies"])
    return found + ([] if set(metadata.provides_extra or ()) == extras else ["METADATA has other extras"])


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel into a fresh environment, without an extra and then with that of the command line."""
    venv.create(folder, with_pip=True, clear=True)
    programs = folder / "bin"
    # Nothing from the environment that runs this script: no path to its packages, no compiler.
    clean = {"PATH": str(programs), "HOME": str(folder), "LANG": "C.UTF-8", "OMP_WAIT_POLICY": "PASSIVE"}

    def run(*command: object, codes: tuple[int, ...] = (0,), **more: str) -> str:
        done = subprocess.run(
            [str(one) for one in command], cwd=folder, env={**clean, **more}, capture_output=True, text=True
        )
        if done.returncode not in codes:
            raise SystemExit(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def install(what: str) -> None:
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        run(programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what, **pip)

    install(str(wheel))
    print(run(programs / "python", "-c", USE.format(version=VERSION, root=ROOT)).strip())
    # The extra's packages may be installed already: transformers requires many of them.
    said = run(programs / "prefixkit", "--help", codes=(0, 2))
    if "evaluate" not in said and 'pip install "prefixkit[campaign]"' not in said:
        raise SystemExit(f"prefixkit --help says neither its commands nor the extra that they need:\n{said}")
    install(f"{wheel}[campaign]")
    for command in ("sample", "evaluate", "report", "export", "inspect", "warmup"):
        run(programs / "prefixkit", command, "--help")
    print(run(programs / "prefixkit", "env").strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--environment", type=Path, help="where a fresh environment is made, which is emptied first")
    options = parser.parse_args()
    wheel, sdist = build(options.dist.resolve())
    if found := faults(wheel, sdist):
        raise SystemExit("\n".join(found))
    print(
        f"{wheel.name}: {wheel.stat().st_size:,} bytes, {sdist.name}: {sdist.stat().st_size:,} bytes, as they should be"
    )
    if options.environment:
        use(wheel, options.environment.resolve())


if __name__ == "__main__":
    main()
